"""Processes are killed at bad moments: nothing is lost, nothing is counted twice, nothing is left behind."""

import contextlib
import signal
import subprocess
import sys

import psutil
import pytest
from loop_helpers import ROOT, make_world, run_train, series, start_train, wait_for
from patience import PATIENCE_S
from processes import cmdline

from slime.liveness import stacks
from slime.rollout.dumps import load_rollout_dump
from slime.utils.machine import shm

SLOW_REWARD = '''
"""A reward that takes a while, and behind the first rollout as long as there is a file `wait`."""
import asyncio
from pathlib import Path


async def reward(args, sample, **kwargs):
    await asyncio.sleep(0.3)
    while sample.index >= 16 and Path(__file__).with_name("wait").exists():
        await asyncio.sleep(0.05)
    return sample.response.count("a") / max(1, sample.response_length) + 0.01 * (sample.index % 7)
'''


STUCK = '''
"""A rollout function that never returns, and does nothing."""
import threading


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    threading.Event().wait()
'''


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = make_world(tmp_path_factory.mktemp("faults"))
    (folder / "slow.py").write_text(SLOW_REWARD)
    return folder


def engine_of(driver: psutil.Process) -> psutil.Process | None:
    return next((p for p in children(driver) if "slime.engines.embedded" in " ".join(cmdline(p))), None)


@contextlib.contextmanager
def in_mid_run(world, name, process):
    """The driver after its first step; it does not get beyond the second rollout before the block ends."""
    try:
        wait_for(lambda: series(world, name, "train/loss"), process)
        yield psutil.Process(process.pid)
    finally:
        (world / "wait").unlink()


def children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def segments_of(pid: int) -> list[str]:
    return shm.list_segments(f"slime-{pid}")


def all_gone(processes: list[psutil.Process], seconds: float = PATIENCE_S) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def dumped(world, name, rollouts):
    return [
        [
            (s.index, s.group_index, tuple(s.tokens))
            for s in load_rollout_dump(f"{world}/{name}/{{rollout_id}}.pt", i)
        ]
        for i in range(rollouts)
    ]


@pytest.mark.parametrize("transport", ["auto", pytest.param("distributed", marks=pytest.mark.slow)])
def test_an_engine_killed_in_mid_run_is_replaced_and_no_sample_is_lost_or_doubled(world, transport):
    """A live transport leaves nothing that the new engine could load: the idle trainer writes it."""
    calm, killed = f"calm-{transport}", f"killed-{transport}"
    settings = {
        "update_weight_transport": transport,
        "custom_rm_path": f"{world}/slow.py:reward",
        "num_rollout": 3,
        "rollout_max_response_len": 60,
    }
    run_train(world, calm, **settings, save_debug_rollout_data=f"{world}/{calm}-dump/{{rollout_id}}.pt")
    (world / "wait").touch()
    process = start_train(
        world, killed, **settings, save_debug_rollout_data=f"{world}/{killed}-dump/{{rollout_id}}.pt"
    )
    with in_mid_run(world, killed, process) as driver:
        engine_of(driver).kill()
    assert process.wait(PATIENCE_S) == 0, (world / f"{killed}.out").read_text()[-4000:]
    assert "is being restarted" in (world / f"{killed}.out").read_text()
    # Sampling seeds depend on the sample alone and the new engine has the
    # same weights: the same tokens come again.
    assert dumped(world, f"{killed}-dump", 3) == dumped(world, f"{calm}-dump", 3)
    assert max(series(world, killed, "rollout/weight_version").values()) == 4


def trainer_of(driver: psutil.Process) -> psutil.Process | None:
    return next((p for p in children(driver) if "slime.runtime.worker_main" in " ".join(cmdline(p))), None)


@pytest.mark.slow
def test_a_stopped_engine_is_replaced_and_the_run_goes_on(world):
    (world / "wait").touch()
    process = start_train(world, "stopped", custom_rm_path=f"{world}/slow.py:reward", num_rollout=3)
    with in_mid_run(world, "stopped", process) as driver:
        engine_of(driver).suspend()
    assert process.wait(PATIENCE_S) == 0, (world / "stopped.out").read_text()[-4000:]
    said = (world / "stopped.out").read_text()
    assert "no sign of life" in said and "is stopped (SIGSTOP" in said and "is ready again" in said
    assert sorted(series(world, "stopped", "train/loss")) == [0, 1, 2]


@pytest.mark.slow
def test_a_stopped_trainer_rank_ends_the_run_by_name(world):
    settings = {
        "custom_rm_path": f"{world}/slow.py:reward",
        "num_rollout": 1000,
        "timeouts": "worker-silence=4",
        "max_restarts": 0,
    }
    process = start_train(world, "frozen", **settings)
    driver = psutil.Process(process.pid)
    wait_for(lambda: series(world, "frozen", "train/loss"), process)
    family, rank = children(driver), trainer_of(driver)
    rank.suspend()
    assert process.wait(PATIENCE_S) == 1
    said = (world / "frozen.out").read_text()
    assert f"error: trainer-0 (pid {rank.pid}) has not answered for" in said and "stopped (SIGSTOP" in said
    assert "--timeouts worker-silence=4" in said and "Traceback" not in said
    assert "who waited for whom:" in said and "for trainer-0: a sign of life" in said
    assert "stacks of the driver" in (world / "frozen" / "logs" / "driver.log").read_text()
    assert "Current thread" in (world / "frozen" / "logs" / "engine-0.log").read_text()
    assert all_gone(family) and segments_of(process.pid) == []


STOPS_ITSELF = '''
"""A trainer rank is stopped (SIGSTOP) in the middle of a push, which this is called in."""
import os
import signal

calls = []


def stop_rank(args, version_dir, rollout_engines):
    calls.append(version_dir)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
'''


def test_a_rank_that_is_stopped_in_mid_push_ends_the_run_by_name_with_who_waited_for_it(world):
    (world / "stops.py").write_text(STOPS_ITSELF)
    process = start_train(
        world,
        "mid-push",
        num_rollout=1000,
        update_weight_transport="disk",
        update_weight_disk_dir=world / "mid-push-weights",
        custom_update_weight_post_write_path=f"{world}/stops.py:stop_rank",
        max_restarts=0,
        timeouts="worker-silence=4",
    )
    family = wait_for(lambda: children(psutil.Process(process.pid)), process)
    assert process.wait(PATIENCE_S) == 1
    said = (world / "mid-push.out").read_text()
    assert "error: trainer-0 (pid" in said and "its process is stopped (SIGSTOP" in said
    assert "run waits: pushing weights" in said and "trainer-0.actor.export" in said
    assert all_gone(family) and segments_of(process.pid) == []


def test_a_run_that_stands_still_ends_with_who_waited_for_whom(world):
    (world / "stuck.py").write_text(STUCK)
    process = start_train(
        world, "still", rollout_function_path=f"{world}/stuck.py:generate_rollout", timeouts="hang=2"
    )
    assert process.wait(PATIENCE_S) == 1
    said = (world / "still.out").read_text()
    assert "(--timeouts hang=2): no process does anything" in said and "Traceback" not in said
    assert "run waits: generating" in said and "driver waits: rollout.manager.generate" in said
    assert "in generate_rollout" in (world / "still" / "logs" / "driver.log").read_text()
    status = subprocess.run(
        [sys.executable, "-m", "slime", "status", str(world / "still")],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert "waits when it ended:" in status.stdout and "generating" in status.stdout


@pytest.mark.slow
def test_an_engine_that_keeps_dying_stops_the_run_with_the_cause(world):
    process = start_train(
        world,
        "dying",
        custom_rm_path=f"{world}/slow.py:reward",
        num_rollout=200,
        limits="engine-restarts=1",
    )
    driver = psutil.Process(process.pid)
    wait_for(lambda: series(world, "dying", "train/loss"), process)
    first = engine_of(driver)
    first.kill()
    second = wait_for(lambda: (found := engine_of(driver)) != first and found, process)
    second.kill()
    assert process.wait(PATIENCE_S) != 0
    said = (world / "dying.out").read_text()
    assert "engines died 2 times within 600 s" in said and "killed by signal 9" in said
    assert segments_of(process.pid) == []


@pytest.mark.slow
def test_a_run_that_is_asked_where_it_stands_writes_it_to_its_log_and_goes_on(world):
    (world / "wait").touch()
    process = start_train(world, "asked", custom_rm_path=f"{world}/slow.py:reward", num_rollout=2)
    with in_mid_run(world, "asked", process) as driver:
        driver.send_signal(stacks.SIGNAL)
        wait_for(lambda: "asyncio tasks" in (world / "asked/logs/driver.log").read_text(), process)
    assert process.wait(PATIENCE_S) == 0, (world / "asked.out").read_text()[-4000:]
    assert "Current thread" in (world / "asked/logs/driver.log").read_text()


INTERRUPTED = pytest.param(signal.SIGINT, marks=pytest.mark.slow)  # as in test_bad_input.py


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, INTERRUPTED])
def test_the_end_of_the_driver_ends_everything(world, sent):
    name = f"end-{sent}"
    process = start_train(world, name, custom_rm_path=f"{world}/slow.py:reward", num_rollout=1000)
    driver = psutil.Process(process.pid)
    wait_for(lambda: series(world, name, "train/loss"), process)
    family = children(driver)
    assert len(family) >= 2
    process.send_signal(sent)
    code = process.wait(PATIENCE_S)
    assert code == (-sent if sent == signal.SIGKILL else 128 + sent), "as shells and schedulers count"
    assert all_gone(family)
    assert segments_of(process.pid) == []
