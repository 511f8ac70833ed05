"""Runs reward checks in worker processes with a hard deadline; a check that hangs is killed.

A symbolic comparison or a regular expression can run forever inside one C call, which only the end of its
process interrupts. A process that does not start a check is replaced as well; that is no wrong response.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil

from slime.arguments import PluginArgs, with_defaults
from slime.catalog.deadlines import timeout_s
from slime.catalog.limits import limit
from slime.liveness import waits
from slime.rollout.rm_hub.workers import limits
from slime.utils.machine import children
from slime.utils.reward_failure import infra_error, invalid, too_large

logger = logging.getLogger(__name__)

_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_END_S = 1.0  # until the exit code of a process is known whose pipe has ended
_START_TIMEOUT_S = 120.0  # interpreter start and imports, on a busy machine
_WORKER = Path(__file__).with_name("worker.py")
_PROJECT_ROOT = Path(__file__).parents[4]


class CheckPool:
    """`await pool.check("pkg.mod:func", *plain_args)` runs the function in a worker process.

    Workers start when first needed. Waiting for a free worker does not count against the deadline. Use from
    any event loop; `close()` ends the workers, and they also die with this process.
    """

    def __init__(self, num_workers: int, deadline_s: float):
        if num_workers < 1:
            raise ValueError(f"--limits reward-workers is {num_workers}: at least one worker is needed")
        if deadline_s <= 0:
            raise ValueError(f"--timeouts reward is {deadline_s}: a check needs a deadline above 0")
        self.deadline_s = deadline_s
        self._lock = threading.Lock()
        self._closed = False
        self._started = False
        self._jobs: queue.SimpleQueue[tuple[Future[Any], str, tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._workers = [_Worker() for _ in range(num_workers)]
        # Each thread starts and owns one worker. The kernel kills a worker when the thread that started it
        # ends, so the threads last as long as the pool; as daemons they never delay our exit.
        self._threads = [
            threading.Thread(target=self._serve, args=(worker,), name="reward-check", daemon=True)
            for worker in self._workers
        ]

    async def check(self, function: str, *arguments: Any) -> Any:
        """Return the function's value, or a failure: it gave up, was killed, raised, or its worker broke."""
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the reward check pool is closed")
            if not self._started:
                self._started = True
                for thread in self._threads:
                    thread.start()
            self._jobs.put((future, function, arguments))
        # Waiting for a free worker counts too, so the wait as a whole has no deadline of its own.
        with waits.waiting(f"reward check {function}", owner="rollout", target="reward workers"):
            return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End all workers now; running and waiting checks return `infra_error`."""
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._jobs.put(None)
            for worker in self._workers:
                worker.end()  # its thread notices, answers and cleans up

    def _serve(self, worker: _Worker) -> None:
        while (job := self._jobs.get()) is not None:
            future, function, arguments = job
            if not future.set_running_or_notify_cancel():
                continue  # given up while it waited for a worker
            try:
                worker.start()
                if self._closed:
                    worker.end()
                future.set_result(worker.run(function, arguments, self.deadline_s))
            except (EOFError, OSError):  # the worker died: out of memory, a crash, or `close`
                how = worker.describe_end()
                if not self._closed:
                    logger.warning("A reward worker %s while it ran %s; a new one replaces it", how, job[1])
                future.set_result(infra_error(f"reward check {function} lost its worker, which {how}"))
                worker.kill()
            except Exception as error:  # arguments that cannot be pickled are the caller's mistake
                future.set_exception(error)
        worker.kill()


class _Worker:
    """A child process, once it is started, and our end of its pipe. Used by one thread at a time."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.pid = 0  # who runs the checks: the process, or a child that it forked

    def start(self) -> None:
        """Start the process, unless it runs."""
        if self.process is not None and self.process.poll() is None:
            return
        self.kill()
        self._connection, theirs = multiprocessing.Pipe()
        search_path = os.pathsep.join([str(_PROJECT_ROOT), *(entry for entry in sys.path if entry)])
        self.process = children.start(
            [sys.executable, str(_WORKER), str(theirs.fileno()), str(os.getpid())],
            pass_fds=(theirs.fileno(),),
            env={**os.environ, **children.thread_environment(1), "PYTHONPATH": search_path},
        )
        theirs.close()
        self._loaded: set[str] = set()  # functions that it has imported
        self.pid = self.process.pid

    def describe_end(self) -> str:
        """Describe how the worker ended; its own output is part of this process's output."""
        if self.process is None:
            return "did not start"
        try:
            code = self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return f"(pid {self.pid}) broke off"
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        return f"(pid {self.pid}) {children.describe_exit(code)}{hint}"

    def end(self) -> None:
        """End the process at once, with all that it forked."""
        if self.process is not None:
            children.kill_group(self.process)

    def kill(self) -> None:
        self.end()
        if self.process is not None:
            self.process.wait()
            self._connection.close()
            self.process = None

    def run(self, function: str, arguments: tuple[Any, ...], deadline_s: float) -> Any:
        # Imports are slow and not the check's fault. A worker that has the function answers at once.
        start_s = deadline_s if function in self._loaded else max(_START_TIMEOUT_S, deadline_s)
        timer = threading.Timer(start_s, self.end)  # a large request waits for its reader, who may be stopped
        timer.start()
        try:
            self._connection.send((function, arguments, deadline_s, min(limits.CPU_BUDGET_S, deadline_s)))
        finally:
            timer.cancel()
        if not self._connection.poll(start_s):
            self.kill()
            return infra_error(f"reward check {function}: its worker did not start it within {start_s:g} s")
        kind, value = self._connection.recv()
        if kind == "unloadable":
            return infra_error(f"reward check {function} cannot be imported: {value}")
        self.pid = value
        self._loaded.add(function)
        if not self._connection.poll(deadline_s):
            stopped = psutil.pid_exists(self.pid) and psutil.Process(self.pid).status() in _STOPPED
            self.kill()
            if stopped:  # not the fault of the answer that was checked
                return infra_error(f"reward check {function}: its worker was stopped from outside")
            late = f"ran longer than --timeouts reward={deadline_s:g} and was killed"
            return too_large(f"timeout: {function} {late}")
        kind, value = self._connection.recv()
        if kind == "ok":
            return value
        if kind == "exhausted":
            self.kill()  # broken off in the middle of a library's work, whose state nobody knows
        return invalid(f"{function} raised {value}") if kind == "error" else too_large(f"{function}: {value}")


_pools: dict[tuple[int, float], CheckPool] = {}
_pools_lock = threading.Lock()


def get_pool(args: PluginArgs) -> CheckPool:
    """Return the process-wide pool of this size and deadline, made on first use."""
    with_defaults(args)
    key = (limit(args, "reward-workers"), timeout_s(args, "reward"))
    with _pools_lock:
        if key not in _pools:
            _pools[key] = CheckPool(*key)
        return _pools[key]


def close_pools() -> None:
    """End the workers of all pools made by `get_pool`."""
    with _pools_lock:
        pools = list(_pools.values())
        _pools.clear()
    for pool in pools:
        pool.close()
