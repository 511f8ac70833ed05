"""Runs a tracker in its own process: reads new metrics and samples from a run's folder and sends them.

The files are the queue: nothing is lost while the service is unreachable. RUN/trackers/NAME.json holds how
much was sent, so that a resumed run sends the rest. The process ends when its standard input is closed, which
happens however the run ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from slime.observability.trackers.base import SampleTable, Service, TrackedRun, sample_tables
from slime.observability.tracking import rows_after
from slime.record import RecordError, open_record
from slime.utils.files.run_file import METRICS_FILE, read_run
from slime.utils.misc import load_function

_POLL_S = 2.0
_MOST_ROWS = 500  # of one step
_LONGEST_PAUSE_S = 300.0  # between attempts to reach a service that fails
_OF_THE_LINE = ("time", "run", "start", "step_key", "step")  # keys that are not metrics
_LAST_S = 120.0  # limit for sending the rest once the run has ended


@dataclass(frozen=True, slots=True)
class SentProgress:
    """Progress of a tracker. `error`: why it is stuck; None: it is not.

    Example: SentProgress(offset=5120, rollouts_until=1754820000.1) has sent 5,120 bytes of metrics.jsonl.
    """

    offset: int = 0
    rollouts_until: float = 0.0
    refused: int = 0  # reports that the service rejected
    error: str | None = None


def progress_file(folder: Path, name: str) -> Path:
    return folder / "trackers" / f"{name}.json"


def read_progress(folder: Path, name: str) -> SentProgress:
    """Return how much a tracker has sent; nothing if there is no file."""
    try:
        data = json.loads(progress_file(folder, name).read_bytes())
        data.pop("pid", None)  # of an earlier release
        return SentProgress(**data)
    except (OSError, ValueError, TypeError, AttributeError):
        return SentProgress()


class Follower:
    """Sends one run to one service; `step` is called repeatedly."""

    def __init__(self, name: str, run: TrackedRun, open_service: Callable[[TrackedRun], Service]):
        self._name, self._run, self._open = name, run, open_service
        self._service: Service | None = None
        self._failed_at: tuple[int, float] | None = None  # where an open service failed last
        self.progress = replace(read_progress(run.folder, name), error=None)

    def step(self) -> bool:
        """Send some of the new data; return False if there was none. Errors of the service are raised."""
        if self._service is None:
            self._service = self._open(self._run)
            self.progress = replace(self.progress, error=None)
            self._save(self.progress)
        found = False
        file = self._run.folder / METRICS_FILE
        rows = rows_after(file, self.progress.offset) if file.exists() else iter(())
        for offset, line in itertools.islice(rows, _MOST_ROWS):
            if "step_key" in line:
                report = partial(self._service.scalars, *_numbers(line), line.get("time", 0.0))
                self._send(report, replace(self.progress, offset=offset))
                found = True
        for until, tables in self._new_tables():
            send_all = partial(_send_all, self._service, tables)
            self._send(send_all, replace(self.progress, rollouts_until=until))
            found = True
        if found:
            self._service.flush()
            self._save(self.progress)
        return found

    def failed(self, error: BaseException) -> None:
        """Record the error; the next `step` reopens the service and continues after the last flush."""
        traceback.print_exception(error)
        with contextlib.suppress(Exception):
            if self._service is not None:
                self._service.finish()
        self._service = None
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        self.progress = replace(read_progress(self._run.folder, self._name), error=text)
        self._save(self.progress)

    def finish(self) -> None:
        if self._service is not None:
            self._service.finish()

    def _send(self, act: Callable[[], None], after: SentProgress) -> None:
        here = (self.progress.offset, self.progress.rollouts_until)
        try:
            act()
        except Exception:
            if self._failed_at != here:  # the service may be unreachable
                self._failed_at = here
                raise
            traceback.print_exc()  # it was reopened since, so it rejects this report
            after = replace(after, refused=after.refused + 1)
        self.progress = after

    def _new_tables(self) -> Iterator[tuple[float, list[SampleTable]]]:
        max_rows = self._run.options.get("tracker_samples", 0)
        if not max_rows:
            return
        # RecordError: there is no record, or not yet.
        with contextlib.suppress(RecordError), open_record(self._run.folder) as record:
            for row in record.rollouts(since=self.progress.rollouts_until):
                yield row.time, list(sample_tables(record, row.kind, row.rollout_id, max_rows))

    def _save(self, progress: SentProgress) -> None:
        file = progress_file(self._run.folder, self._name)
        file.parent.mkdir(exist_ok=True)
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(progress)))
        temporary.rename(file)


def _send_all(service: Service, tables: list[SampleTable]) -> None:
    for table in tables:
        service.table(table)


def follow(follower: Follower, run_ended: Callable[[float], bool]) -> bool:
    """Send until the run has ended; return False if the rest could not be sent. `run_ended` waits."""
    pause_s, ended = 0.0, False
    while True:
        try:
            idle = not follower.step()
            if ended and idle:
                follower.finish()
                return True
            pause_s = _POLL_S if idle else 0.0
        except Exception as error:
            follower.failed(error)
            if ended:
                return False
            pause_s = min(max(2 * pause_s, 5.0), _LONGEST_PAUSE_S)
        ended = ended or run_ended(pause_s)


@contextlib.contextmanager
def only_one(folder: Path, name: str) -> Iterator[None]:
    """Wait for the tracker process of an earlier start, which ends soon after its run."""
    file = progress_file(folder, name).with_suffix(".lock")
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def tracked_run(folder: Path, options: Mapping[str, Any] | None = None) -> TrackedRun:
    """Read the run; `options` None: the flags of its last start without secrets."""
    found = read_run(folder)
    settings = found.last.settings if found is not None else {}
    config = {name: entry.get("value") for name, entry in settings.items()}
    config = {name: value for name, value in config.items() if value != "********"}
    run_id, name = (found.id, found.name) if found is not None else (folder.name, folder.name)
    return TrackedRun(run_id, name, folder, config if options is None else options, config)


def main(argv: list[str]) -> int:
    """Run `python -m slime.observability.trackers.follower NAME RUN`; stdin's first line has the options."""
    name, folder = argv[0], Path(argv[1])
    # A signal to the whole job ends the run, which then ends this process.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)  # training comes first
    given = json.loads(sys.stdin.readline())

    ended = threading.Event()

    def wait_for_the_end() -> None:  # on a thread, so that even a service that hangs ends with the run
        while os.read(0, 4096):
            pass
        ended.set()
        time.sleep(_LAST_S)
        os._exit(1)

    threading.Thread(target=wait_for_the_end, name="run-watch", daemon=True).start()
    with only_one(folder, name):
        follower = Follower(name, tracked_run(folder, given["options"]), load_function(given["service"]))
        done = follow(follower, ended.wait)
    sys.stderr.flush()
    os._exit(0 if done else 1)  # skip exit handlers of packages, which may hang


def _numbers(line: dict[str, Any]) -> tuple[dict[str, float], str, int]:
    values = {}
    for key, value in line.items():
        if value in ("nan", "inf", "-inf"):
            value = float(value)
        if key not in _OF_THE_LINE and isinstance(value, (int, float)):
            values[key] = value
    return values, str(line["step_key"]), int(line.get("step", 0))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
