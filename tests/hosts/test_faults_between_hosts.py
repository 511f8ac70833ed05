"""Faults between hosts: the run goes on or ends with host and cause; nothing is lost or trained twice."""

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from loop_helpers import flags, make_world, series
from network_hosts import RAY, ROOT, Host, environment, join_ray, network_hosts, ray_on, slow_cable
from patience import eventually
from trapped_rank import TRAPS

from slime.record import RECORD_FILE
from slime.record.audit import audit
from slime.utils.files.run_file import read_run
from tests.crash.chains import metric_names, same, weights_of

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(3600)]

LONG_S = 1800.0
RUN = {
    "runtime": "ray",
    "actor_num_nodes": 2,
    "actor_num_gpus_per_node": 1,
    "rollout_num_gpus": 2,
    "num_rollout": 4,
    "rollout_batch_size": 2,
    "n_samples_per_prompt": 2,
    "global_batch_size": 4,
    "rollout_max_response_len": 6,
    "deterministic_mode": True,
    "save_interval": 2,
    "skip_preflight": ["reward", "lengths", "machine"],
}


@dataclass
class Scene:
    """A run on hosts, and what a test does to them. The first host is the driver's."""

    hosts: list[Host]
    world: Path
    run: str
    process: subprocess.Popen

    @property
    def shown(self) -> str:
        return (self.world / f"{self.run}.out").read_text()

    def until(self, condition: Callable[[], object]) -> None:
        eventually(lambda: condition() or self.process.poll() is not None, LONG_S)
        assert self.process.poll() is None, self.shown[-8000:]

    def until_shown(self, words: str) -> None:
        self.until(lambda: words in self.shown)

    def trapped(self, number: int = 0) -> Host:
        """Wait for the rank that waits in its trap; return its host."""
        note = self.world / f"{self.run}.struck-{number}"
        self.until(lambda: note.exists() and note.read_text())
        return self.host(note.read_text())

    def host(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    def end(self) -> int:
        return self.process.wait(LONG_S)


@contextlib.contextmanager
def scene(world: Path, run: str, number: int = 2, traps=(), ray=None, **changes) -> Iterator[Scene]:
    """Start a run on hosts that share `world`; whatever it left is ended.

    `ray`: the environment of all processes on hosts but the first.
    """
    notes = [str(world / f"{run}.struck-{number}") for number in range(len(traps))]
    traps = [{"rank": 1, "how": "wait", **t, "note": note} for t, note in zip(traps, notes, strict=True)]
    values = {**RUN, "save": world / f"{run}-ckpt", "train_env_vars": None, **changes}
    values["train_env_vars"] = json.dumps({TRAPS: json.dumps(traps)})
    with network_hosts(number, shared=world) as hosts, ray_on(hosts, **(ray or {})) as address:
        line = [sys.executable, str(ROOT / "tests/support/trapped_rank.py"), json.dumps(traps), "train.py"]
        with driven_by(hosts, address, world, run, [*line, *flags(world, run, **values)]) as seen:
            yield seen


@contextlib.contextmanager
def driven_by(hosts: list[Host], address: str, world: Path, run: str, line: list[str]) -> Iterator[Scene]:
    """Start the driver on the first host."""
    env = [f"{k}={v}" for k, v in {**environment(), "RAY_ADDRESS": address}.items()]
    line = hosts[0].command("env", "-C", str(world), *env, *line)
    with open(world / f"{run}.out", "w") as out:
        process = subprocess.Popen(line, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    try:
        yield Scene(hosts, world, run, process)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return make_world(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def calm(world) -> Path:
    """The world, in which the run `calm` met no fault."""
    with scene(world, "calm") as calm:
        assert calm.end() == 0, calm.shown[-8000:]
    return world


def assert_conserved(world: Path, run: str) -> None:
    """What was handed out has one end each, and no step was trained twice."""
    found = audit(world / run / RECORD_FILE, finished=True)
    assert found.violations == []
    assert len(series(world, run, "train/loss")) == RUN["num_rollout"]


def assert_same_end(world: Path, run: str) -> None:
    assert_conserved(world, run)
    names = metric_names(world, "calm")
    assert names == metric_names(world, run)
    for name in names:
        assert same(series(world, run, name), series(world, "calm", name)), name
    assert weights_of(world / f"{run}-ckpt") == weights_of(world / "calm-ckpt")
    ours, theirs = (audit(world / name / RECORD_FILE, finished=True) for name in (run, "calm"))
    assert (ours.digest, ours.steps) == (theirs.digest, theirs.steps)


KILLS = {
    "in a push": {"point": "any push", "nth": 1},  # the first one: there is no checkpoint yet
    "in the first step": {"point": "backward", "nth": 1},
    "in training": {"point": "optimizer", "nth": 2},
    "in a checkpoint": {"point": "checkpoint", "nth": 1},
}


def test_a_host_that_dies_four_times_and_comes_back_changes_nothing(calm):
    with scene(calm, "killed", traps=KILLS.values()) as seen:
        for number in range(len(KILLS)):
            lost = seen.trapped(number)
            assert lost is seen.hosts[1]
            lost.kill()
            lost.boot()
            join_ray(lost, seen.hosts[0])
        assert seen.end() == 0, seen.shown[-8000:]
    assert len(read_run(calm / "killed").last.restarts) == len(KILLS), seen.shown[-8000:]
    assert "engine-1 is ready again" in seen.shown, seen.shown[-8000:]
    assert_same_end(calm, "killed")


# Python alone is ahead: C++ compares the clock with that of the kernel, which is right.
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
static int is_python;
__attribute__((constructor)) static void look(void) {
    char path[4096] = "";
    is_python = readlink("/proc/self/exe", path, sizeof path - 1) > 0 && strstr(path, "/python") != 0;
}
int clock_gettime(clockid_t which, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(which, at);
    Dl_info caller;
    if (which == CLOCK_REALTIME && is_python && dladdr(__builtin_return_address(0), &caller))
        if (!strstr(caller.dli_fname, ".so") || strstr(caller.dli_fname, "libpython")) at->tv_sec += 3600;
    return code;
}
"""


def one_hour_ahead(folder: Path) -> dict[str, str]:
    """An environment in which programs read a clock that is an hour ahead."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("a wrong clock on one host needs a C compiler here")
    (folder / "clock.c").write_text(CLOCK)
    library = folder / "clock.so"
    line = [compiler, "-shared", "-fPIC", "-o", str(library), str(folder / "clock.c"), "-ldl"]
    subprocess.run(line, check=True)
    return {"LD_PRELOAD": str(library)}


@contextlib.contextmanager
def ten_times_slower(host: Host) -> Iterator[None]:
    """Let the programs of a host run for a tenth of the time."""
    ended = threading.Event()

    def slow() -> None:
        while not ended.is_set():
            for number, seconds in ((signal.SIGSTOP, 0.45), (signal.SIGCONT, 0.05)):
                for process in host.processes:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.send_signal(number)
                ended.wait(seconds)

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        for process in host.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)


def test_faults_that_pass_change_nothing(calm):
    """A wrong clock and a nearly full disk from the start; then no network for 30 s; then a slow host."""
    with scene(calm, "passing", ray=one_hour_ahead(calm)) as seen:
        other = seen.hosts[1]
        # Not the last bytes: then Ray could not start a process.
        other.run("sh", "-c", "cat /dev/zero > /tmp/filler; truncate --size -16M /tmp/filler")
        seen.until_shown("step 1/")
        other.cut()
        time.sleep(30.0)  # the fault itself
        other.heal()
        with ten_times_slower(other):
            seen.until_shown("step 3/")
        assert seen.end() == 0, seen.shown[-8000:]
    assert "its clock is 3" in seen.shown and "s off the driver's" in seen.shown, seen.shown
    assert re.search(r"/tmp has \d+ MiB left", seen.shown), seen.shown
    assert_same_end(calm, "passing")


def test_packets_that_are_late_or_lost_change_nothing(calm):
    with scene(calm, "lossy") as seen:
        seen.until_shown("first push")
        with slow_cable(seen.hosts[1], seen.hosts[:1], delay_s=0.05, loss=0.01):
            assert seen.end() == 0, seen.shown[-8000:]
    assert_same_end(calm, "lossy")


def test_copies_of_a_lost_host_are_on_its_neighbour_and_fewer_ranks_go_on(calm):
    trap = {"point": "optimizer", "nth": 3}
    with scene(calm, "elastic", traps=[trap], elastic=True, peer_copies=1, save_interval=100) as seen:
        lost = seen.trapped()
        lost.kill()
        assert seen.end() == 0, seen.shown[-8000:]
    assert "training continues on 1 rank(s)" in seen.shown
    [restart] = read_run(calm / "elastic").last.restarts
    assert restart["begins_from"].startswith("its state after step 2"), restart
    assert f"trainer-1 on {lost.name} ({lost.address})" in restart["cause"], restart
    assert_conserved(calm, "elastic")


def test_the_drivers_host_dies_and_another_one_continues_with_the_copy_of_the_record(calm):
    """The record is on the /tmp of the host that dies."""
    more = {"save": calm / "moved-ckpt", "record_dir": "/tmp/records"}
    line = [sys.executable, str(ROOT / "train.py"), *flags(calm, "moved", **{**RUN, **more})]
    slime = (sys.executable, "-m", "slime")
    with network_hosts(3, shared=calm) as hosts:
        first, second = hosts[:2], hosts[1:]
        with ray_on(first) as address, driven_by(first, address, calm, "moved", line) as seen:
            seen.until_shown("step 3/")
            first[0].kill()
            seen.end()
        on_another = second[0].run(*slime, "ledger", "audit", str(calm / "moved"), **environment())
        assert "the record is on host0; its copy here is as of step 2, copied at " in on_another.stdout
        assert on_another.returncode == 0, on_another.stdout
        second[0].run(*RAY, "stop", "--force", **environment())
        with ray_on(second) as address, driven_by(second, address, calm, "moved", line) as seen:
            assert seen.end() == 0, seen.shown[-8000:]
    assert "host0 had the record of this run: it continues from the copy" in seen.shown, seen.shown[-8000:]
    assert_same_end(calm, "moved")


def test_a_lost_host_that_nobody_replaces_ends_the_run_with_its_name(calm):
    """The network stays away, so that nobody sees an end, only silence."""
    times = "worker-silence=10,restart-wait=5,engine-silence=10,host=30"
    with scene(calm, "alone", num_rollout=200, timeouts=times) as seen:
        lost = seen.hosts[1]
        seen.until_shown("step 2/")
        lost.cut()
        assert seen.end() == 1, seen.shown[-8000:]
    assert f"({lost.address})" in seen.shown and "has 1 machine(s) for 1" in seen.shown, seen.shown[-8000:]
    assert audit(calm / "alone" / RECORD_FILE, finished=False).violations == []


def test_a_rollout_worker_of_a_lost_host_is_replaced_and_nothing_changes(world):
    """The host has a /tmp of its own, and neither a rank nor an engine. A worker on it waits for a reward."""
    with open(world / "reward.py", "a") as file:
        file.write("\n\nasync def slow(args, sample, **kwargs):\n    import asyncio\n\n")
        file.write("    await asyncio.sleep(3)\n    return await reward(args, sample, **kwargs)\n")
    sizes = {"actor_num_nodes": 1, "custom_rm_path": f"{world}/reward.py:slow"}
    with scene(world, "one-host", number=1, **sizes) as alone:
        assert alone.end() == 0, alone.shown[-8000:]
    with scene(world, "worked", rollout_workers=2, **sizes) as seen:
        seen.until_shown("step 1/")
        seen.hosts[1].kill()
        assert seen.end() == 0, seen.shown[-8000:]
    assert "rollout-worker-1 ended while it had" in seen.shown and "on host1 (" in seen.shown, seen.shown
    assert_conserved(world, "worked")
    assert series(world, "worked", "rollout/raw_reward") == series(world, "one-host", "rollout/raw_reward")
    assert weights_of(world / "worked-ckpt") == weights_of(world / "one-host-ckpt")
