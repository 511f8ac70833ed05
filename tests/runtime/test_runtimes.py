"""One conformance suite for every runtime: handles, lanes, failures, references, and a clean end."""

import concurrent.futures
import os
import re
import signal
import threading

import psutil
import pytest
import warm_start
from patience import PATIENCE_S, eventually
from worker_target import Reporting, SlowToMake, Target, Unmade, Unreadable

from slime.liveness import heartbeat, waits
from slime.runtime.base import Call, WorkerSpec, gather, result_or_failure
from slime.runtime.local import LocalRuntime
from slime.runtime.placement import Placement, Slot
from slime.runtime.worker_watch import WorkerSilent
from slime.utils.errors import RunStopped, WorkerDied
from slime.utils.machine import shm

LIMIT_S = 2.0


class Made:
    """Runtimes of both kinds and workers for several tests; each is started when first asked for."""

    def __init__(self, new_folder):
        self._new_folder = new_folder
        self._runtimes, self._workers = {}, {}
        self.prefix = shm.make_prefix()

    def new_runtime(self, kind, *limit_s):
        if kind == "local":
            return LocalRuntime(self._new_folder("run"), self.prefix, *limit_s)
        return pytest.importorskip("slime.runtime.on_ray").RayRuntime(self._new_folder("run"), *limit_s)

    def runtime(self, kind, *limit_s):
        if (kind, limit_s) not in self._runtimes:
            self._runtimes[kind, limit_s] = self.new_runtime(kind, *limit_s)
        return self._runtimes[kind, limit_s]

    def worker(self, runtime, name, **where):
        if (runtime, name) not in self._workers:
            self._workers[runtime, name] = runtime.spawn(WorkerSpec(name, **where), Target, 10)
        return self._workers[runtime, name]

    def close(self):
        for made in reversed(self._runtimes.values()):  # the first one on Ray has started it
            made.close()
            made.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    everything = Made(tmp_path_factory.mktemp)
    yield everything
    everything.close()
    assert shm.list_segments(everything.prefix) == []


@pytest.fixture(params=["local", "ray"])
def kind(request):
    return request.param


@pytest.fixture
def runtime(made, kind):
    return made.runtime(kind)


@pytest.fixture
def watched(made, kind):
    """A runtime with less patience."""
    return made.runtime(kind, LIMIT_S)


@pytest.fixture
def watched_alone(made, kind):
    """For a test that makes a worker fail, which a runtime tells once."""
    alone = made.new_runtime(kind)
    yield alone
    alone.close()


@pytest.fixture
def worker(made, runtime):
    """One that no test ends."""
    return made.worker(runtime, "target")


@pytest.fixture
def sibling(made, runtime):
    """Another beside it, with devices and an environment; the last test that has it ends it."""
    return made.worker(runtime, "sibling", slot=Slot(0, (3, 4)), env={"OMP_NUM_THREADS": "1"})


@pytest.fixture(params=["apart-local", "near-local", "apart-ray"])
def handle(request, made):
    """A worker in its own process, in the driver, and in an actor: Ray knows no place beside the driver."""
    where, kind = request.param.split("-")
    if where == "near":
        return made.worker(made.runtime(kind), "beside", near_driver=True)
    return made.worker(made.runtime(kind), "target")


def test_a_file_in_the_working_folder_does_not_shadow_what_a_worker_imports(tmp_path, monkeypatch):
    (tmp_path / "queue.py").write_text("raise SystemExit('the stranger ran')\n")
    monkeypatch.chdir(tmp_path)
    prefix = shm.make_prefix()
    runtime = LocalRuntime(tmp_path / "run", prefix)
    try:
        with warm_start.real_processes():
            target = runtime.spawn(WorkerSpec("target"), Target, 10)
        assert target.call(Target.add, 5).result(PATIENCE_S) == 15
    finally:
        runtime.close()


def test_a_call_returns_its_value(handle):
    assert handle.call(Target.add, 5).result(PATIENCE_S) == 15


def test_arguments_may_be_named(handle):
    assert handle.call(Target.add, x=5).result(PATIENCE_S) == 15


def test_an_object_within_the_object_is_called_like_the_whole(handle):
    assert handle.part(Target.numbers).call(list.count, 2).result(PATIENCE_S) == 1
    assert handle.part(Target.numbers).call_control(list.index, 3).result(PATIENCE_S) == 2


def test_an_exception_keeps_its_type_and_message(handle):
    with pytest.raises(ValueError, match="--flag 3: too small"):
        handle.call(Target.fail).result(PATIENCE_S)


def test_the_control_lane_does_not_queue_behind_work(handle):
    waiting = handle.call(Target.wait)
    handle.call_control(Target.wake).result(PATIENCE_S)
    assert waiting.result(PATIENCE_S) == "woken"


def test_an_overdue_call_is_a_named_error(worker):
    assert worker.call(Target.add, 1).result(PATIENCE_S) == 11
    overdue = worker.call(Target.wait)
    with pytest.raises(waits.WaitTimeout, match=r"target\.wait: not done after 0\.2"):
        overdue.result(0.2)
    worker.call_control(Target.wake).result(PATIENCE_S)
    assert overdue.result(PATIENCE_S) == "woken"


def test_references_reach_workers(runtime, worker):
    ref = runtime.put(list(range(100)))
    assert worker.call(Target.total, ref).result(PATIENCE_S) == 4950
    ref.drop()


def test_references_reach_workers_in_the_driver(made):
    runtime = made.runtime("local")
    ref = runtime.put(list(range(100)))
    beside = made.worker(runtime, "beside", near_driver=True)
    assert beside.call(Target.total, ref).result(PATIENCE_S) == 4950
    ref.drop()


def test_a_death_is_noticed_although_nobody_waits_with_the_last_lines_of_its_log(watched_alone, monkeypatch):
    """The death itself tells of it, and no look of a watch."""
    monkeypatch.setattr(heartbeat.HeartbeatWatch, "_judge", lambda *rest: None)
    doomed = watched_alone.spawn(WorkerSpec("doomed"), Target, 0)
    pid = doomed.call(Target.say, "these are my last words").result(PATIENCE_S)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"(?s)doomed.*these are my last words"):
        watched_alone.failure.result(PATIENCE_S)


def test_a_death_is_noticed_although_a_child_of_the_worker_still_holds_its_socket(made):
    runtime = made.new_runtime("local")
    try:
        doomed = runtime.spawn(WorkerSpec("doomed"), Target, 0)
        child = doomed.call(Target.fork).result(PATIENCE_S)
        os.kill(doomed.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="killed by signal 9"):
            runtime.failure.result(PATIENCE_S)
        os.kill(child, signal.SIGKILL)
    finally:
        runtime.close()


def test_a_worker_that_was_ended_on_purpose_is_no_failure(watched):
    ended = watched.spawn(WorkerSpec("ended"), Target, 0)
    ended.call(Target.pid).result(PATIENCE_S)
    ended.kill()
    assert "ended" in str(ended.end.result(PATIENCE_S))
    assert not watched.failure.done()


def test_a_worker_tells_what_it_waits_for_and_where_it_stands(runtime, worker):
    answer = worker.call(Target.wait)

    def stands():
        return [wait for wait in runtime.notes()["target"].waits if wait.what.startswith("wait: stands in")]

    told = eventually(stands)[0]
    assert "stands in wait (" in told.what and "worker_target.py:" in told.what
    assert told.age_s >= 0 and told.deadline_s is None
    assert "target" in runtime.dump_stacks()
    log = runtime.log_folder / "target.log"
    eventually(lambda: "worker_target.py" in log.read_text())  # the line of the thread that waits
    worker.call_control(Target.wake).result(PATIENCE_S)
    assert answer.result(PATIENCE_S) == "woken"
    eventually(lambda: not stands())


def test_a_gather_says_in_the_table_for_whom_it_waits(worker):
    answer = worker.call(Target.wait)
    waiting = threading.Thread(target=lambda: gather([answer, worker.call(Target.add, 1)]))
    waiting.start()
    found = eventually(lambda: [wait for wait in waits.active() if "target.wait and 1" in wait.name])
    assert (found[0].owner, found[0].target) == ("driver", "target")
    worker.call_control(Target.wake).result(PATIENCE_S)
    waiting.join()


def test_a_stopped_worker_is_told_and_answers_again_when_it_goes_on(made, watched, caplog):
    sleeper = made.worker(watched, "sleeper")
    pid = sleeper.call(Target.pid).result(PATIENCE_S)
    caplog.clear()
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(
        WorkerSilent,
        match=rf"sleeper \(pid {pid}.*\) has not answered for \d+ s: .*stopped .*worker-silence",
    ):
        gather([sleeper.call(Target.add, 1), sleeper.call_control(Target.wake)], 120)
    with pytest.raises(WorkerDied):
        sleeper.call(Target.add, 1).result(PATIENCE_S)
    assert f"sleeper (pid {pid}" in caplog.text  # warned of before the limit
    caplog.clear()  # on a busy machine it may have been late before, and answered again
    os.kill(pid, signal.SIGCONT)
    # The worker of the other runtime may be late, too, on a busy machine: its line does not count.
    again = re.compile(rf"sleeper \(pid {pid}\b.*responds again")
    waits.until(lambda: again.search(caplog.text), "the next heartbeat", 60)
    assert sleeper.call(Target.add, 1).result(PATIENCE_S) == 11


def test_a_wait_for_something_else_ends_with_a_silent_worker():
    work, failure = Call("rollout", "generate"), concurrent.futures.Future()
    with pytest.raises(waits.WaitTimeout, match=r"rollout\.generate: not done"):
        work.result(0.01)
    failure.set_exception(WorkerSilent("trainer-1 (pid 7) has not answered for 60 s"))
    with pytest.raises(WorkerSilent, match="trainer-1"):
        result_or_failure(work, failure)
    work.set_result(5)
    assert result_or_failure(work, concurrent.futures.Future()) == 5


def test_an_answer_that_comes_as_a_look_ends_is_the_answer():
    class JustInTime:
        """An answer that arrives between the end of a look and the question whether it is there."""

        def __init__(self):
            self.looks = 0

        def done(self):
            return self.looks > 0

        def result(self, deadline_s=None):
            self.looks += 1
            if self.looks == 1:
                raise waits.WaitTimeout(f"generate: not done after {deadline_s} s")
            return "batch"

    assert result_or_failure(JustInTime(), concurrent.futures.Future()) == "batch"


def test_a_long_call_is_no_silence(made, watched):
    busy = made.worker(watched, "sleeper")
    assert busy.call(Target.spin, 1.25 * LIMIT_S).result(PATIENCE_S) == "spun"


def test_arguments_that_a_worker_cannot_read_fail_their_call_alone(worker):
    assert worker.call(Target.add, 1).result(PATIENCE_S) == 11
    with pytest.raises(Exception, match="unreadable here"):
        worker.call(Target.add, Unreadable()).result(PATIENCE_S)
    assert worker.call(Target.add, 1).result(PATIENCE_S) == 11


def test_the_first_failure_ends_a_gather_although_others_wait(worker, sibling):
    waiting = worker.call(Target.wait)
    with pytest.raises(ValueError, match="too small"):
        gather([waiting, sibling.call(Target.fail)], 200)
    assert not waiting.done()
    worker.call_control(Target.wake).result(PATIENCE_S)
    assert waiting.result(PATIENCE_S) == "woken"


def test_environment_and_slot_reach_the_worker(sibling):
    assert sibling.call(Target.env, "OMP_NUM_THREADS").result(PATIENCE_S) == "1"
    assert sibling.call(Target.env, "CUDA_VISIBLE_DEVICES").result(PATIENCE_S) == "3,4"


def test_a_dead_worker_fails_its_calls_with_the_cause(sibling):
    with pytest.raises(WorkerDied, match="sibling"):
        sibling.call(Target.die).result(PATIENCE_S)
    with pytest.raises(WorkerDied):
        sibling.call(Target.add, 1).result(PATIENCE_S)


def test_closing_ends_every_process(tmp_path):
    runtime = LocalRuntime(tmp_path, shm.make_prefix())
    pids = [
        runtime.spawn(WorkerSpec(f"w{i}"), Target, 0).call(Target.pid).result(PATIENCE_S) for i in range(2)
    ]
    runtime.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_constructor_that_fails_is_the_cause_of_every_call(runtime):
    """Also where the process that was made for it stays: whoever waits is not left waiting."""
    handle = runtime.spawn(WorkerSpec("unmade"), Unmade)
    for call in (handle.call, handle.call_control):
        with pytest.raises(ValueError, match="host1 did not answer"):
            call(Unmade.add, 1).result(PATIENCE_S)
    handle.kill()


def test_errors_of_a_worker_reach_the_log_of_the_driver_with_its_name(runtime, caplog):
    handle = runtime.spawn(WorkerSpec("far"), Reporting)
    handle.call(Reporting.evict).result(PATIENCE_S)
    eventually(lambda: "far: engine-1 is evicted: no weights" in caplog.text)
    assert "restarted" not in caplog.text, "warnings of ranks stay in their logs"
    [record] = [record for record in caplog.records if "is evicted" in record.getMessage()]
    assert (record.name, record.levelname) == ("slime.engines.fleet", "ERROR")
    handle.kill()


def test_warnings_of_a_worker_that_may_live_in_the_driver_reach_its_log_too(made, caplog):
    """Under Ray it lives elsewhere; what it reports does not depend on that."""
    handle = made.runtime("ray").spawn(WorkerSpec("rollout", near_driver=True), Reporting)
    handle.call(Reporting.evict).result(PATIENCE_S)
    eventually(lambda: "rollout: engine-1 is restarted" in caplog.text)
    assert "not of ours" not in caplog.text
    handle.kill()


def test_more_gpus_than_a_ray_cluster_has_are_refused_with_the_numbers(made):
    plan = Placement((), (Slot(0, (0,)), Slot(1, tuple(range(100)), machine=1)))
    said = r"needs machines with 1, 100 GPUs, and those of the Ray cluster have \d+(, \d+)*"
    with pytest.raises(ValueError, match=said):
        made.runtime("ray").claim(plan)


def test_a_value_that_was_removed_from_the_shared_memory_is_dropped_and_missed_with_the_reason(made):
    ref = made.runtime("local").put([1, 2, 3])
    shm.unlink_prefix(made.prefix)  # another program has emptied it
    with pytest.raises(RunStopped, match="was removed by another program before it was read"):
        ref.load()
    ref.drop()


def test_a_worker_under_ray_may_be_silent_while_its_object_is_made(made):
    runtime = made.runtime("ray", LIMIT_S)
    handle = runtime.spawn(WorkerSpec("slow-to-make"), SlowToMake, 4 * LIMIT_S)
    assert handle.call(SlowToMake.add, 1).result(PATIENCE_S) == 11
    handle.kill()
