"""A run in which nothing moves ends with the chain of causes; one that moves or computes lives."""

import contextlib
import math
import os
import threading

import pytest
from patience import PATIENCE_S, eventually

from slime.liveness import hang_watch, vital_signs, waits
from slime.liveness.hang_watch import HangWatch
from slime.liveness.notes import NotedWait, Notes
from slime.liveness.vital_signs import Signs
from slime.liveness.wait_table import read_table
from slime.runtime.worker_watch import WorkerSilent
from slime.utils.errors import RunStopped


class FakeRuntime:
    """Two ranks that say what a test lets them say."""

    def __init__(self):
        self.told, self.dumped, self.asked = {}, 0, 0
        self.live = lambda: None  # what happens between two looks of the watch

    def before_silence(self, tell):
        self.tell = tell

    def notes(self):
        self.asked += 1
        self.live()
        return self.told

    def dump_stacks(self):
        self.dumped += 1
        return list(self.told)


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(hang_watch, "_LOOK_S", 0.02)
    monkeypatch.setattr(hang_watch, "signs_of", lambda pids: Signs(stopped=False, held=False, cpu_s=0.0))
    runtime = FakeRuntime()
    runtime.told["trainer-0"] = Notes(
        3, [NotedWait("train: stands in all_reduce", "the other ranks", 9, None)]
    )
    return runtime


@contextlib.contextmanager
def watched(tmp_path, runtime, limit_s):
    watch = HangWatch(tmp_path, runtime, limit_s)
    try:
        yield watch
    finally:
        watch.close()


def in_a_driver(work):
    """Whatever `work` raises in a thread of its own, as a driver from Python has one."""
    raised = []

    def drive():
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=drive)
    thread.start()
    thread.join(PATIENCE_S)
    return raised[0]


def test_a_run_that_stands_still_is_ended_with_who_waits_for_whom(tmp_path, runtime):
    def hang():
        waited = waits.waiting("training", owner="run"), waits.waiting("trainer-0.train", target="trainer-0")
        with watched(tmp_path, runtime, 0.3) as watch, watch.guarding(), waited[0], waited[1]:
            while True:
                threading.Event().wait(0.02)

    error = in_a_driver(hang)
    assert isinstance(error, RunStopped) and "--timeouts hang=0.3" in str(error)
    assert "run waits: training" in str(error) and "trainer-0 waits for the other ranks" in str(error)
    assert f"stacks of driver, trainer-0 are in {tmp_path}/logs" in str(error) and runtime.dumped == 1
    assert "in hang" in (tmp_path / "logs" / "driver.log").read_text()
    assert "training" in {row.what for row in read_table(tmp_path).rows}  # it stays, to be looked at


@pytest.mark.parametrize("alive", ["a wait ends", "a rank moves", "time is left", "meant to last"])
def test_a_run_that_lives_is_left_alone(tmp_path, runtime, alive):
    def live():
        if alive == "a wait ends":
            with waits.waiting("a part"):
                pass
        if alive == "a rank moves":
            runtime.told["trainer-0"] = Notes(runtime.asked)

    runtime.live = live
    deadline_s = {"time is left": 1000.0, "meant to last": math.inf}.get(alive)
    with watched(tmp_path, runtime, 0.2) as watch, waits.waiting("it", deadline_s=deadline_s):
        eventually(lambda: runtime.asked > 80)  # twice in each look
        assert watch.error is None
    assert read_table(tmp_path).rows == ()


def test_processes_that_compute_get_longer(tmp_path, runtime, monkeypatch):
    monkeypatch.setattr(hang_watch, "_CPU_LOOK_S", 0.0)
    monkeypatch.setattr(vital_signs, "_BUSY_FACTOR", 1000.0)  # longer than any machine sleeps
    monkeypatch.setattr(hang_watch, "signs_of", lambda pids: Signs(False, False, os.times().elapsed))
    with watched(tmp_path, runtime, 0.3) as watch:
        eventually(lambda: watch._clock.silent_s > 0.6)
        assert watch.error is None


def test_a_silent_worker_and_an_overdue_wait_are_explained_too(tmp_path, runtime):
    with watched(tmp_path, runtime, 0.0):
        silent = WorkerSilent("trainer-1 (pid 7) has not answered for 60 s")
        with waits.waiting("saving", owner="run"):
            runtime.tell(silent)
            eventually(lambda: read_table(tmp_path))
        assert "has not answered" in str(silent) and "run waits: saving" in str(silent)
    raises, evaluating = pytest.raises(waits.WaitTimeout), waits.waiting("evaluating", owner="run")
    with watched(tmp_path, runtime, 0.0) as watch, raises as overdue, watch.guarding(), evaluating:
        waits.until(lambda: False, "an answer", 0.0)
    assert "an answer: not done" in str(overdue.value) and "run waits: evaluating" in str(overdue.value)
