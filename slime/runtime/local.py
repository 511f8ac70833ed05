"""Runs objects in child processes connected by sockets; nothing is left when the driver ends."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Generic

from slime.arguments import Args
from slime.catalog.deadlines import timeout_s
from slime.liveness import stacks
from slime.liveness.vital_signs import Signs, signs_of
from slime.runtime.base import Call, Handle, P, R, T, WorkerSpec
from slime.runtime.placement import Placement, Slot
from slime.runtime.reports import log_reports
from slime.runtime.worker_main import BEAT, CONTROL, MAKE, WORK, encode_call, invoke
from slime.runtime.worker_watch import DEFAULT_LIMIT_S, RuntimeWithWorkers, WorkerHandle
from slime.utils.errors import RunStopped, WorkerDied
from slime.utils.machine import shm, warm_start
from slime.utils.machine.accelerator import device_count
from slime.utils.machine.children import (
    Child,
    describe_exit,
    import_environment,
    last_lines,
    open_log,
    stop_process,
)
from slime.utils.machine.run_identity import LOOPBACK

_JOIN_S = 5.0  # an ended process that left its socket to a child may keep its reader waiting


class _Lane:
    """A daemon thread that runs calls in order: a call that never ends cannot keep the driver alive."""

    def __init__(self, name: str):
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Call[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def submit(self, work: Callable[[], R], call: Call[R]) -> Call[R]:
        self._calls.put((work, call))
        return call

    def _serve(self) -> None:
        while True:
            work, call = self._calls.get()
            try:
                call.set_result(work())
            except BaseException as error:  # whatever was raised belongs to the caller
                call.set_exception(error)


class InProcessHandle(Handle[T]):
    """An object in the driver's process; each lane is a thread."""

    def __init__(self, make: Callable[[], T], name: str):
        self.name = name
        self._lanes = {lane: _Lane(f"{name}-{lane}") for lane in (WORK, CONTROL)}
        self._target = self._lanes[WORK].submit(make, Call(name, MAKE))

    def send(self, lane: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call[Any]:
        return self._lanes[lane].submit(
            lambda: invoke(self._target.result(), method, args, kwargs), Call(self.name, method)
        )

    def kill(self) -> None:
        """Do nothing: the threads are daemons of this process."""


class ProcessHandle(WorkerHandle[T]):
    """An object in a child process; the first call creates it."""

    def __init__(self, spec: WorkerSpec, log_path: Path):
        super().__init__(spec)
        self.log_path = log_path
        self._sending = threading.Lock()
        self._heard = False  # set by every frame, reset by the watch
        self._process, self._connection = _start_worker(spec, log_path)
        # Readable once the process has ended; None: the system has no such thing, and its socket shows it.
        self._exit: int | None = None
        with contextlib.suppress(AttributeError, OSError):
            self._exit = os.pidfd_open(self.pid)
        self._reader = threading.Thread(target=self._read, name=f"{self.name}-answers", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, lane: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call[Any]:
        call_id, call = self._begin(method)
        frame = encode_call(lane, call_id, method, args, kwargs)
        # A broken socket is the reader's business: it sees the end and fails every pending call.
        with self._sending, contextlib.suppress(OSError):
            if not call.done():  # a silent process reads nothing
                self._connection.send_bytes(frame)
        return call

    def _read(self) -> None:
        while True:
            try:
                frame = self._next_frame()
            except (EOFError, OSError):
                self._see_end()
                return
            if frame.startswith(BEAT):
                self.notes, found = pickle.loads(frame[len(BEAT) :])
                log_reports(self.name, found, warnings=self.is_replaceable)
            else:
                self._answer(*pickle.loads(frame))
            self._heard = True

    def _next_frame(self) -> bytes:
        """Read a frame. EOFError: the process has ended, even if a child that it forked holds the socket."""
        if self._exit is not None and self._connection not in wait([self._connection, self._exit]):
            raise EOFError
        return self._connection.recv_bytes()

    def _see_end(self) -> None:
        self._process.wait()
        if self._exit is not None:
            os.close(self._exit)
        how, log = describe_exit(self._process.poll()), self.log_path
        death = WorkerDied(f"{self.name} {how}; last lines of {log}:\n{last_lines(log)}")
        self.fail(death)
        self.end.set_result(death)

    def kill(self) -> None:
        self.ended_here = True
        stop_process(self._process, grace_s=0.0)

    def join_reader(self) -> None:
        """Wait for the thread that reads answers: if it ran while the interpreter ends, that might crash."""
        if threading.current_thread() is not self._reader:
            self._reader.join(_JOIN_S)

    # ---- what the watch over heartbeats asks ---------------------------------------------------------------

    @property
    def title(self) -> str:
        return f"{self.name} (pid {self.pid})"

    async def heard(self, timeout_s: float) -> bool:
        heard, self._heard = self._heard, False
        return heard

    def signs(self) -> Signs | None:
        return signs_of([self.pid])


def _start_worker(spec: WorkerSpec, log_path: Path) -> tuple[Child, Connection]:
    ours, theirs = socket.socketpair()
    devices = spec.slot.env if spec.slot is not None else {}
    env = {**os.environ, **spec.env, **devices, **import_environment()}
    # Not `-m`: the package imports that module, too, and there would be two of it.
    command = [sys.executable, "-P", "-c", "from slime.runtime.worker_main import main; main()"]
    command += ["--fd", str(theirs.fileno()), "--name", spec.name]
    with open_log(log_path, spec.name) as log:
        process = warm_start.start(command, env=env, log=log, pass_fds=[theirs.fileno()])
    theirs.close()
    return process, Connection(ours.detach())


@dataclass(frozen=True, slots=True)
class SegmentRef(Generic[R]):
    """A pickled value in shared memory."""

    segment: str

    def load(self) -> R:
        try:
            segment = shm.open_segment(self.segment)
        except FileNotFoundError as error:
            raise RunStopped(
                f"{shm.FOLDER / self.segment} was removed by another program before it was read: something "
                f"empties {shm.FOLDER} while the run uses it. The same command resumes a run that saves."
            ) from error
        value: R = pickle.loads(segment.buffer.numpy().data)
        return value

    def drop(self) -> None:
        (shm.FOLDER / self.segment).unlink(missing_ok=True)  # somebody may have emptied the folder


class LocalRuntime(RuntimeWithWorkers[ProcessHandle[Any]]):
    """Starts child processes and ends them."""

    def gpus_of_machine(self) -> int:
        return device_count()

    def find_machines(self, wanted: int, num_gpus: int = 0) -> int:
        return 1

    def __init__(self, run_dir: Path, shm_prefix: str, silence_limit_s: float = DEFAULT_LIMIT_S):
        super().__init__(run_dir, silence_limit_s)
        self._shm_prefix = shm_prefix

    def claim(self, placement: Placement) -> Placement:
        """Return the plan: all visible devices are ours."""
        return placement

    def relocate(self, slots: Sequence[Slot]) -> list[Slot | None]:
        """Return the slots: the only machine is the driver's."""
        return list(slots)

    @property
    def driver_address(self) -> str:
        return LOOPBACK

    def use_all_hosts(self) -> None:
        """Do nothing: there is one."""

    @property
    def other_hosts(self) -> tuple[str, ...]:
        return ()

    def ask_other_hosts(
        self, question: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> dict[str, R | Exception]:
        return {}

    def spawn(self, spec: WorkerSpec, cls: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Handle[T]:
        if spec.near_driver:
            return InProcessHandle(lambda: cls(*args, **kwargs), spec.name)
        log_path = self.log_folder / f"{spec.name}.log"
        handle: ProcessHandle[T] = ProcessHandle(spec, log_path)
        handle.send(WORK, MAKE, (f"{cls.__module__}.{cls.__qualname__}", *args), kwargs)
        self._hold(handle)
        return handle

    def close(self) -> None:
        handles = list(self._workers)
        super().close()
        for handle in handles:
            handle.join_reader()

    def dump_stacks(self) -> list[str]:
        """Ask all workers and engines; a stopped one writes its stacks when it is resumed."""
        handles = self._living()
        asked = stacks.ask_children()
        return [handle.name for handle in handles if handle.pid in asked]

    def put(self, value: R) -> SegmentRef[R]:
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        segment = shm.create_segment(len(data), self._shm_prefix)
        segment.buffer.numpy()[:] = memoryview(data)
        return SegmentRef(segment.name)


def open_runtime(args: Args, run_dir: Path, shm_prefix: str) -> LocalRuntime:
    return LocalRuntime(run_dir, shm_prefix, timeout_s(args, "worker-silence"))
