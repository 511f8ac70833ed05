"""The main program of a child process of the local runtime: one object, driven over a socket.

Frames are pickles between processes of one run: (lane, call id) and (method, args, kwargs) in, (call id, ok,
value) out; one that begins with `BEAT` is a heartbeat, with notes on what this process waits for. The main
thread runs the work lane, so that signals and debuggers behave; the control lane and the heartbeat have
threads of their own.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import os
import pickle
import queue
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from slime.liveness import stacks, usage, waits
from slime.liveness.heartbeat import BEAT_S
from slime.liveness.notes import take_notes, working
from slime.runtime import reports
from slime.utils.errors import portable
from slime.utils.machine import garbage

WORK, CONTROL = "work", "control"  # the lanes
BEAT = b"beat"  # a pickle begins otherwise
_HEAD_BYTES = 64
MAKE = "__init__"  # the first call: makes the object, from the path of its class


def invoke(target: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call: `weights.receive` is the method `receive` of what `target.weights()` returns."""
    *owners, name = method.split(".")
    for owner in owners:
        target = getattr(target, owner)()
    return getattr(target, name)(*args, **kwargs)


def make_object(made: concurrent.futures.Future[Any], make: Callable[[], Any]) -> None:
    """Make the object of a worker; calls wait for `made` and fail with its error."""
    try:
        made.set_result(make())
    except BaseException as error:
        made.set_exception(error)
        raise


class _Worker:
    """Reads calls, runs them on their lane, and writes the results."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._write_lock = threading.Lock()
        self._lanes: dict[str, queue.SimpleQueue[tuple[int, bytes]]] = {
            WORK: queue.SimpleQueue(),
            CONTROL: queue.SimpleQueue(),
        }
        self._made: concurrent.futures.Future[Any] = concurrent.futures.Future()  # the object, or why not

    def run(self) -> None:
        threading.Thread(target=self._read, name="calls", daemon=True).start()
        threading.Thread(target=self._serve, args=(CONTROL,), name="control", daemon=True).start()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        self._serve(WORK)

    def _beat(self) -> None:
        """Send heartbeats, whatever the lanes do."""
        with contextlib.suppress(OSError):  # the driver is gone, which the reader sees
            while True:
                frame = BEAT + pickle.dumps((take_notes(), reports.drain_reports()))
                with self._write_lock:
                    self._connection.send_bytes(frame)
                time.sleep(BEAT_S)

    def _read(self) -> None:
        while True:
            try:
                frame = self._connection.recv_bytes()
            except (EOFError, OSError):
                os._exit(1)  # the driver is gone; its janitor frees shared memory
            lane, call_id = pickle.loads(frame[:_HEAD_BYTES].rstrip(b"\0"))
            self._lanes[lane].put((call_id, frame[_HEAD_BYTES:]))

    def _serve(self, lane: str) -> None:
        while True:
            call_id, frame = self._lanes[lane].get()
            try:
                self._answer(call_id, True, self._call(*pickle.loads(frame)))
            except Exception as error:
                self._answer(call_id, False, portable(error))

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if method != MAKE:
            target = self._made.result()  # every call has the cause where the object could not be made
            with working(method):
                return invoke(target, method, args, kwargs)
        from slime.utils.misc import load_function  # here the heartbeat is on: what it loads may take long

        path, *rest = args
        with working("start"):
            make_object(self._made, lambda: load_function(path)(*rest, **kwargs))
        garbage.search_new_only()
        return None

    def _answer(self, call_id: int, ok: bool, value: Any) -> None:
        frame = pickle.dumps((call_id, ok, value))
        with self._write_lock:
            self._connection.send_bytes(frame)


def encode_call(lane: str, call_id: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Encode a call after a header of fixed size, which can be read even if the arguments cannot."""
    return pickle.dumps((lane, call_id)).ljust(_HEAD_BYTES, b"\0") + pickle.dumps((method, args, kwargs))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--name", default="worker", help="of this process in the table of waits")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the driver, which ends us in order
    waits.name_process(options.name)
    usage.follow(options.name, os.getpid())
    reports.keep_reports()
    stacks.answer_signal()
    garbage.search_seldom()
    _Worker(Connection(options.fd)).run()


if __name__ == "__main__":
    main()
