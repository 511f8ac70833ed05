"""Reads and writes `run.json`, which describes the run that a folder belongs to.

    {"id": "3f9c01aa", "name": "tiny-1234", "start": "2026-03-01T12:00:00+00:00", "end": null, "exit": null,
     "resumed": null, "checkpoints": "/runs/ckpt",
     "settings": {"lr": {"value": 1e-06, "source": "default"}, ...},
     "versions": {"torch": "2.11.0", ...}, "machine": {"host": "a", ...},
     "earlier": [{"start": ..., "end": ..., "exit": ..., "settings": ..., ...}]}

A folder belongs to one run. Resuming continues it: the previous start moves to `earlier`, and id and name
stay.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import platform
import re
import secrets
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from slime.utils.errors import FolderInUse
from slime.utils.files.folder_lock import FolderLock, is_locked
from slime.utils.files.step_folders import read_step, same_folder, step_folders

_NAMED = 5  # runs in a message
RUN_FILE, METRICS_FILE = "run.json", "metrics.jsonl"
LAST_MODEL = "model"  # a link in the folder of a run to the model that it saved last
_RESERVE = ".run.json.room"  # reserved space: overwritten and renamed at the end of a run on a full disk
_RESERVE_BYTES = 32 << 10  # in addition to the size at the start: restarts, and why the run ended
_PACKAGES = "slime-rl torch transformers safetensors numpy ray sglang megatron-core flash-attn"
_SEEDS = ("seed", "rollout_seed")
# Settings in which runs that differ only by their seed may differ.
_OF_ONE_RUN = {*_SEEDS, "config", "load", "quiet", "log_level", "dashboard"}
_FINISHED, _LOST = "finished", "lost: the process ended without a word"
CLAIM = "claim"  # the name of a lock: a run that is about to start has chosen this folder
_SECRET = "********"  # replaces a secret in the settings


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a run. `end` and `exit` None: it runs, or was killed. `resumed`: from which checkpoint."""

    start: str
    settings: dict[str, Any]
    versions: dict[str, str]
    machine: dict[str, Any]
    checkpoints: str | None = None  # where it saves
    resumed: dict[str, Any] | None = None
    end: str | None = None
    exit: str | None = None
    restarts: tuple[dict[str, Any], ...] = ()  # of the trainer: when, at which step, why, from what
    inputs: dict[str, str] | None = None  # digests of the files that define the run; None: not known

    @property
    def values(self) -> dict[str, Any]:
        """Return the settings without their sources."""
        return {name: entry["value"] for name, entry in self.settings.items()}

    @property
    def restarts_text(self) -> str:
        """Return a sentence on the restarts; empty if there was none."""
        if not self.restarts:
            return ""
        last, times = self.restarts[-1], len(self.restarts)
        often = "once" if times == 1 else f"{times} times"
        return f"trainer restarted {often}, last at step {last['step']} ({last['time']}): {last['cause']}"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The run of a folder: its current or last start, and earlier ones."""

    id: str
    name: str
    last: Start
    earlier: tuple[Start, ...] = field(default=())

    @property
    def num_starts(self) -> int:
        return len(self.earlier) + 1

    @property
    def seed(self) -> str:
        """Return the seeds of the run as text, to compare."""
        return str([self.last.values.get(name) for name in _SEEDS])

    def settings_without_seed(self) -> str | None:
        """Return the settings as text, without folder and seed: equal in runs that differ by the seed only.

        Digests of the reward and other files are part of it. None: the settings are not known.
        """
        values = {n: value for n, value in self.last.values.items() if n not in _OF_ONE_RUN}
        if not values:
            return None
        text = json.dumps([values, self.last.inputs], sort_keys=True)
        return text.replace(str(values.get("run_dir")), "RUN")


@dataclass(frozen=True, slots=True)
class Resumption:
    """The run that `--load` resumes: its folder, and the id of the run that wrote the checkpoint.

    `run_id` None: there is no checkpoint yet, so the run starts from the beginning.
    """

    folder: str
    run_id: str | None

    def continues(self, record: RunRecord | None) -> bool:
        """Return whether this resumes the run of a folder. None: an earlier version did not name its run."""
        if record is None:
            return True
        return record.id == self.run_id or same_folder(record.last.checkpoints, self.folder)


def resumption_of(load: str | None, step: int | None, finetune: bool) -> Resumption | None:
    """Return the run that --load resumes; None: this is a new run, whatever weights it starts from."""
    if load is None or finetune:
        return None
    steps = step_folders(load)
    with contextlib.suppress(ValueError, KeyError):  # an unreadable one is reported when it is loaded
        return Resumption(load, read_step(steps[max(steps) if step is None else step]).manifest.run_id)
    return Resumption(load, None)


def name_of_run(folder: Path) -> str:
    """Return the name of a folder's run: the folder's name, or its parent's if it is just called run."""
    folder = folder.absolute()
    return folder.parent.name or folder.name if folder.name == "run" else folder.name


def is_used(folder: Path) -> bool:
    """Return whether a run has logged metrics here; a run that ended before that may be replaced."""
    file = folder / METRICS_FILE
    return file.is_file() and file.stat().st_size > 0


def choose_run_folder(base: str, resumption: Resumption | None) -> str:
    """Return the folder of the resumed run among `base`, `base-2`, ..., or else the first free one."""
    free: str | None = None
    for number in itertools.count(1):
        name = base if number == 1 else f"{base}-{number}"
        folder = Path(name)
        if is_used(folder):
            if resumption is not None and resumption.continues(read_run(folder)):
                return name
        elif free is None and not is_locked(folder, "--run-dir") and not is_locked(folder, CLAIM):
            free = name
        if free is not None and not folder.exists():
            break
    assert free is not None
    return free


@contextlib.contextmanager
def claim_run_folder(base: str, resumption: Resumption | None) -> Iterator[str]:
    """Choose a folder like `choose_run_folder`, and keep other runs from choosing it meanwhile.

    Runs that start together search for a free folder before any of them has written to one.
    """
    with contextlib.ExitStack() as stack:
        while True:
            name = choose_run_folder(base, resumption)
            record = read_run(Path(name))
            if resumption is not None and record is not None and resumption.continues(record):
                break  # the resumed run; opening its folder checks whether it is still active
            try:
                Path(name).mkdir(parents=True, exist_ok=True)
                stack.callback(_remove_empty, Path(name))
                stack.callback(FolderLock(Path(name), CLAIM).release)
            except FolderInUse:
                continue
            except OSError:  # opening the folder reports why it cannot be written
                break
            if not is_used(Path(name)) and not is_locked(Path(name), "--run-dir"):
                break
            stack.close()
        yield name


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # it holds a run
        folder.rmdir()


# Settings in which two starts of one run may differ.
_OF_A_START = {"load", "run_dir", "auto_resume", "ckpt_step", "log_level", "quiet", "dry_run"}
_OF_A_START |= {"max_restarts", "peer_copies", "timeouts", "elastic", "record_dir"}


def is_unfinished(folder: Path, settings: dict[str, Any], save: str | None) -> bool:
    """Return whether a folder holds a run with these settings that saves there and did not finish."""
    last = _start_with(folder, settings, save)
    return last is not None and last.exit != _FINISHED


def has_finished(folder: Path, settings: dict[str, Any], save: str) -> bool:
    """Return whether a folder holds a finished run with these settings that has checkpoints there."""
    last = _start_with(folder, settings, save)
    return last is not None and last.exit == _FINISHED and bool(step_folders(save))


def has_ended_well(folder: Path) -> bool:
    """Return whether the last start of a folder's run has finished."""
    record = read_run(folder)
    return record is not None and record.last.exit == _FINISHED


def _start_with(folder: Path, settings: dict[str, Any], save: str | None) -> Start | None:
    """Return the last start of a folder's run if it has these settings and saves there; None: nowhere."""
    record = read_run(folder)
    if record is None or not record.last.settings:
        return None
    if record.last.checkpoints != save and not same_folder(record.last.checkpoints, save):
        return None
    return None if _differences(record.last, settings) else record.last


def other_settings(folder: Path, settings: dict[str, Any], save: str) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ from those of the folder's run, by name: its value and this one."""
    record = read_run(folder)
    if record is None or not same_folder(record.last.checkpoints, save):
        return {}
    return _differences(record.last, settings)


def changed_settings(record: RunRecord) -> dict[str, tuple[Any, Any]]:
    """Return the settings that a resumed run changed, by name: the earlier value and the current one."""
    if not record.earlier:
        return {}
    return _differences(record.earlier[-1], record.last.values)


def _differences(start: Start, settings: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that must be those of an earlier start and are not: its value and this one."""
    names = sorted((start.settings.keys() & settings.keys()) - _OF_A_START)
    pairs = {name: (start.settings[name]["value"], _as_written(settings[name])) for name in names}
    return {name: pair for name, pair in pairs.items() if not _same(*pair)}


def _same(was: Any, now: Any) -> bool:
    """Compare two settings; older records have paths as they were written, newer ones absolute paths."""
    if now == {}:
        return not was  # earlier versions wrote null where nothing was given
    if isinstance(was, list) and isinstance(now, list):
        return len(was) == len(now) and all(map(_same, was, now))
    if isinstance(was, dict) and isinstance(now, dict):
        return was.keys() == now.keys() and all(_same(was[key], now[key]) for key in was)
    if isinstance(was, str) and isinstance(now, str) and was != now:
        return was == _SECRET or (os.getcwd() in now and _in_full(was) == now)
    return bool(was == now)


def _in_full(text: str) -> str:
    """Return a setting with absolute paths: several separated by commas, or one after env: or hf:."""
    parts = (re.fullmatch(r"(env:|hf:|)(.*)", part, re.DOTALL) for part in text.split(","))
    return ",".join(match[1] + os.path.abspath(match[2].strip()) for match in parts if match is not None)


def _as_written(value: Any) -> Any:
    """Return a setting as it is read back from run.json."""

    def plain(part: Any) -> Any:
        return asdict(part) if is_dataclass(part) and not isinstance(part, type) else str(part)

    return json.loads(json.dumps(value, default=plain))


def refuse_other_run(folder: Path, resumption: Resumption | None) -> tuple[RunRecord | None, bool]:
    """Return a folder's run, and whether `resumption` resumes it. FolderInUse: it is another run."""
    try:
        before, used = read_run(folder), is_used(folder)
    except PermissionError as error:
        raise PermissionError(f"--run-dir {folder} cannot be read ({error.strerror})") from None
    resumes = resumption is not None and resumption.continues(before)
    if used and not resumes:
        owner = "an earlier run (it has metrics, and no run.json that names the run)"
        way_out = ", or resume that run (--load with the folder of its --save)."
        if before is not None:
            owner = f"run {before.id}, started {before.last.start} ({before.last.exit or 'not ended'})"
            if before.last.checkpoints is None:
                way_out = ". That run had no --save: there is nothing to resume from."
        raise FolderInUse(f"--run-dir {folder} belongs to {owner}: give another folder{way_out}")
    return before, resumes


def run_of_folder(folder: Path, resumption: Resumption | None) -> str | None:
    """Return the id of the run that a start in this folder resumes; None: it is a new run."""
    before, resumes = refuse_other_run(folder, resumption)
    if not resumes or resumption is None:
        return None
    return before.id if before is not None else resumption.run_id if is_used(folder) else None


def open_run_file(
    folder: Path,
    settings: dict[str, Any],
    checkpoints: str | None,
    resumption: Resumption | None,
    resumed: dict[str, Any] | None,
    inputs: dict[str, str] | None = None,
) -> RunRecord:
    """Write the record of the run that starts in `folder`; the caller holds its lock.

    FolderInUse: the folder belongs to another run.
    """
    before, resumes = refuse_other_run(folder, resumption)
    start = Start(_now(), settings, _versions(), _machine(), checkpoints, resumed, inputs=inputs)
    if resumes and before is not None:
        ended = replace(before.last, exit=before.last.exit or _LOST)
        record = replace(before, last=start, earlier=(*before.earlier, ended))
    else:
        run_id = run_of_folder(folder, resumption) or secrets.token_hex(4)
        record = RunRecord(run_id, name_of_run(folder), start)
    write_run(folder, record)
    with contextlib.suppress(OSError):  # the reserve is not essential
        (folder / _RESERVE).write_bytes(bytes((folder / RUN_FILE).stat().st_size + _RESERVE_BYTES))
    return record


def close_run_file(folder: Path, error: BaseException | None, stopped: str | None = None) -> None:
    """Record the end of the current start, and why. `stopped`: it was asked to end before its last step."""
    record = read_run(folder)
    if record is not None:
        cause = stopped if error is None and stopped else _cause(error)
        record = replace(record, last=replace(record.last, end=_now(), exit=cause))
        try:
            write_run(folder, record)
        except OSError:  # a full disk: use the space reserved at the start
            with open(folder / _RESERVE, "r+b") as file:
                file.write(_as_json(record).encode())
                file.truncate()
            (folder / _RESERVE).rename(folder / RUN_FILE)
        (folder / _RESERVE).unlink(missing_ok=True)


def add_restart(folder: Path, restart: dict[str, Any]) -> None:
    """Record that the trainer of the current start was lost and restarts."""
    record = read_run(folder)
    if record is not None:
        restarts = (*record.last.restarts, {"time": _now(), **restart})
        write_run(folder, replace(record, last=replace(record.last, restarts=restarts)))


def read_run(folder: Path) -> RunRecord | None:
    """Return the record of a folder's run; None if there is none, or it cannot be read."""
    try:
        data = json.loads((folder / RUN_FILE).read_bytes())
        earlier = tuple(Start(**entry) for entry in data.pop("earlier"))
        return RunRecord(data.pop("id"), data.pop("name"), Start(**data), earlier)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def no_run(folder: Path) -> str:
    """Return why there is no run in this folder; runs below it, such as those of a quick start, are named."""
    if not folder.exists():
        return f"{folder}: there is no such folder."
    if folder.is_file():
        return f"{folder} is a file; give the folder of a run."
    text = f"{folder} is no folder of a run: run.json is missing or cannot be read"
    inside = [str(run) for run in runs_inside(folder)]
    if not inside:
        return f"{text}. Give the folder that the run's command named with --out or --run-dir."
    return f"{text}. In it are the runs {', '.join(inside[:_NAMED])}" + (", ..." if inside[_NAMED:] else ".")


def runs_inside(folder: Path) -> list[Path]:
    """Return the runs one or two levels below a folder."""
    return sorted({file.parent for depth in ("*", "*/*") for file in folder.glob(f"{depth}/{RUN_FILE}")})


def write_run(folder: Path, record: RunRecord) -> None:
    """Write the file by a rename, so that readers always find a complete one."""
    temporary = folder / f"{RUN_FILE}.tmp"
    try:
        temporary.write_text(_as_json(record))
        temporary.rename(folder / RUN_FILE)
    except OSError:  # the partial file takes space
        temporary.unlink(missing_ok=True)
        raise


def _as_json(record: RunRecord) -> str:
    earlier = [asdict(start) for start in record.earlier]
    data = {"id": record.id, "name": record.name, **asdict(record.last), "earlier": earlier}
    return json.dumps(data, indent=1, default=str)


def _cause(error: BaseException | None) -> str:
    if error is None:
        return _FINISHED
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return f"{type(error).__name__}: {error}"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES.split():
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package.removesuffix("-rl")] = metadata.version(package)
    return found


def _machine() -> dict[str, Any]:
    place = {"host": socket.gethostname(), "platform": platform.platform()}
    return {**place, "cpus": os.cpu_count(), "pid": os.getpid()}
