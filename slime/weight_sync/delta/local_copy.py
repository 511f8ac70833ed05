"""A checkpoint folder next to an engine, updated from version to version with published deltas.

    state.json                   which folder is the current version; replaced in one rename
    weights-<version>/           a checkpoint that an engine loads from disk
    incoming.tmp/                the version being written; invalid until it is renamed

A new version is written to its own folder, verified tensor by tensor, synced and renamed; then state.json
names it. If the process dies meanwhile, the current version is untouched. Several processes may share a copy.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from slime.liveness import waits
from slime.utils.files.checksums import sync_path
from slime.weight_sync.delta.publication import (
    INDEX,
    DeltaEntry,
    DeltaSource,
    Index,
    folder_name,
    is_at_least,
    read_index,
    replace_text,
)
from slime.weight_sync.disk import room_for
from slime.wire.delta_codec import DeltaError, apply, checksum_function, worker_pool
from slime.wire.delta_manifest import MANIFEST, DeltaManifest, TensorRecord

logger = logging.getLogger(__name__)

_STATE, _STAGING, _LOCK = "state.json", "incoming.tmp", "lock"
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Route:
    """A way to reach a version: a start, and deltas in order. `full` None: start from the current copy."""

    full: DeltaEntry | None
    deltas: tuple[DeltaEntry, ...]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in (*((self.full,) if self.full else ()), *self.deltas))


@dataclass(frozen=True, slots=True)
class Arrival:
    """Result of `bring_to`. `route`: "held" (nothing to do), "delta" or "full"; `nbytes`: bytes read."""

    version: str
    folder: Path
    route: str
    num_deltas: int
    nbytes: int
    seconds: float


class _Broken(DeltaError):
    """A published folder does not give the version that it names, or the copy it was applied to is bad."""

    def __init__(self, entry: DeltaEntry, why: object):
        super().__init__(f"{entry.folder}: {why}")
        self.entry = entry


def find_route(index: Index, held: str | None, target: str, without: Sequence[str] = ()) -> Route | None:
    """Return the route with the fewest bytes, from the current copy or a full one; None: there is none."""
    usable = [entry for entry in index.entries if entry.folder not in without]
    fulls = {entry.version: entry for entry in usable if entry.base is None}
    deltas = {entry.version: entry for entry in usable if entry.base is not None}
    found: list[Route] = []
    version, chain = target, tuple[DeltaEntry, ...]()
    while True:
        if version == held:
            found.append(Route(None, chain))
        if version in fulls:
            found.append(Route(fulls[version], chain))
        step = deltas.get(version)
        if step is None or step in chain:
            return min(found, key=lambda route: route.nbytes, default=None)
        assert step.base is not None, "a delta has a base"
        version, chain = step.base, (step, *chain)


@dataclass(slots=True)
class _Attempts:
    """Findings of one call. `broken`: folders, published or local, that did not apply, and why."""

    started: float
    broken: dict[str, str] = field(default_factory=dict)
    requested_full: bool = False

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


class LocalCopy:
    """One folder on this machine."""

    def __init__(self, folder: Path):
        self._folder = folder

    @property
    def version(self) -> str | None:
        state = self._state()
        return state["version"] if state else None

    def _state(self) -> dict[str, str] | None:
        try:
            state = json.loads((self._folder / _STATE).read_text())
            return state if (self._folder / state["folder"]).is_dir() else None
        except (FileNotFoundError, ValueError, KeyError):
            return None

    def bring_to(
        self,
        source: DeltaSource,
        version: str | None = None,
        *,
        exact: bool = False,
        deadline_s: float = 600.0,
    ) -> Arrival:
        """Bring the copy to at least `version` (None: the newest), or exactly it; waits until the deadline.

        A delta that does not apply (damaged, another base) is skipped and a full copy used; if there is none,
        the trainer is asked for one.
        """
        started = time.monotonic()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._refuse_strange_weights()
        with self._locked(deadline_s):
            attempts = _Attempts(started)
            what = f"weights {version or 'newest'} from {source}"
            with waits.waiting(what, owner=str(self._folder), deadline_s=deadline_s) as wait:
                while True:
                    arrival = self._attempt(source, version, exact, attempts)
                    if arrival is not None:
                        return arrival
                    if wait.age_s > deadline_s:
                        raise DeltaError(self._no_way(source, version, attempts))
                    time.sleep(_LOOK_S)

    def _attempt(
        self, source: DeltaSource, version: str | None, exact: bool, attempts: _Attempts
    ) -> Arrival | None:
        """Try once to reach the version; None: it is not published yet."""
        index, state = read_index(source), self._state()
        target = _target(index, version, exact)
        if target is None:
            return None
        if state is not None and state["version"] == target:
            return Arrival(target, self._folder / state["folder"], "held", 0, 0, attempts.seconds)
        held = state["version"] if state and state["folder"] not in attempts.broken else None
        route = find_route(index, held, target, [*attempts.broken])
        if route is None:
            if not attempts.requested_full:
                logger.warning(
                    "No chain of deltas leads to weights %s: requesting a full copy from the trainer", target
                )
                source.want_full()
                attempts.requested_full = True
            return None
        try:
            folder = self._follow(route, source, target, state)
        except _Broken as error:
            logger.warning("A published delta could not be applied: %s", error)
            # The local copy may be damaged, so it is skipped first. A folder that fails on a full copy too is
            # broken.
            at_fault = state["folder"] if state and route.full is None else error.entry.folder
            attempts.broken[at_fault] = str(error)
            return None
        kind = "delta" if route.full is None else "full"
        return Arrival(target, folder, kind, len(route.deltas), route.nbytes, attempts.seconds)

    def _no_way(self, source: DeltaSource, version: str | None, attempts: _Attempts) -> str:
        try:
            latest = read_index(source).latest
        except DeltaError as error:
            latest = f"unknown, as {error}"
        tried = f" Tried: {'; '.join(attempts.broken.values())}." if attempts.broken else ""
        return (
            f"no route from weights {self.version} in {self._folder} to {version or 'the newest'}: {source} "
            f"publishes up to {latest}.{tried} The copy here is unchanged."
        )

    # ---- one route -----------------------------------------------------------------------------------------

    def _follow(
        self, route: Route, source: DeltaSource, target: str, state: Mapping[str, str] | None
    ) -> Path:
        staging = self._folder / _STAGING
        self._tidy(keep=state["folder"] if state else None)
        (staging / "new").mkdir(parents=True)
        (staging / "fetched").mkdir()
        try:
            with room_for(f"weights {target}", self._folder, "--update-weight-local-checkpoint-dir"):
                held = state if route.full is None else None
                steps = _read_steps(route, source, staging / "fetched")
                base = self._folder / held["folder"] if held else staging / "base"
                if held is None:
                    base.mkdir()
                    for file, path in steps[0].files.items():
                        (base / file).symlink_to(path.resolve())
                with worker_pool() as pool:
                    _rewrite(base, staging / "new", steps, pool, link=held is not None)
                return self._switch(staging / "new", target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _switch(self, made: Path, version: str) -> Path:
        target = self._folder / folder_name("weights", version)
        shutil.rmtree(target, ignore_errors=True)  # left by an earlier process whose state file is lost
        sync_path(made)
        made.rename(target)
        sync_path(self._folder)
        replace_text(self._folder / _STATE, json.dumps({"version": version, "folder": target.name}))
        return target

    def _refuse_strange_weights(self) -> None:
        """Refuse folders called `weights-...` that are not copies of ours, since such folders are removed."""
        strange = next(self._folder.glob("weights-*"), None)
        if strange is not None and not (self._folder / _LOCK).exists():
            raise DeltaError(
                f"{self._folder} holds {strange.name}, which slime did not write; give an empty folder."
            )

    def _tidy(self, keep: str | None) -> None:
        """Remove the version before the current one: no engine loads it any more."""
        for path in self._folder.iterdir():
            if path.name == _STAGING or (path.name.startswith("weights-") and path.name != keep):
                shutil.rmtree(path, ignore_errors=True)

    @contextlib.contextmanager
    def _locked(self, deadline_s: float) -> Iterator[None]:
        with open(self._folder / _LOCK, "w") as file:
            what = f"the copy of weights in {self._folder}"
            waits.until(lambda: _try_lock(file.fileno()), what, deadline_s)
            yield  # closing the file gives the lock back


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _target(index: Index, version: str | None, exact: bool) -> str | None:
    """Return the version to go to; None: it is not published yet."""
    if exact and version is not None:
        return version if any(entry.version == version for entry in index.entries) else None
    latest = index.latest
    if latest is None or (version is not None and not is_at_least(latest, version)):
        return None
    return latest


# ---- bytes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Step:
    """One published folder of a route, and its files; the step of a full copy changes no bytes."""

    entry: DeltaEntry
    manifest: DeltaManifest
    tensors: dict[str, TensorRecord]
    files: dict[str, Path]

    def change(self, name: str, data: np.ndarray) -> None:
        """Change a tensor's bytes to those of this version; DeltaError if the result is another."""
        record = self.tensors[name]
        if data.size != record.nbytes:
            raise DeltaError(f"it has {data.size} bytes here, not {record.nbytes}")
        if record.size:
            with open(self.files[record.file], "rb") as file:
                file.seek(record.offset)
                apply(file.read(record.size), data, record.itemsize, self.manifest.encoding)
        if checksum_function(self.manifest.checksum)(data) != record.checksum:
            raise DeltaError("it has another checksum than the trainer's")


def _read_steps(route: Route, source: DeltaSource, scratch: Path) -> list[_Step]:
    """Fetch the published folders of a route, in their order."""
    steps: list[_Step] = []
    for entry in (*([route.full] if route.full else ()), *route.deltas):
        try:
            manifest = DeltaManifest.from_json(source.read(entry.folder, MANIFEST))
            if (manifest.version, manifest.base) != (entry.version, entry.base):
                raise DeltaError(
                    f"made from {manifest.base} to {manifest.version}, but {INDEX} says from {entry.base} "
                    f"to {entry.version}"
                )
            files = {
                file: source.path_of(entry.folder, file, nbytes, scratch)
                for file, nbytes in manifest.files.items()
            }
        except (DeltaError, FileNotFoundError) as error:  # damaged, or removed by the trainer meanwhile
            raise _Broken(entry, error) from error
        steps.append(_Step(entry, manifest, {record.name: record for record in manifest.tensors}, files))
    return steps


def _rewrite(
    base: Path, target: Path, steps: list[_Step], pool: concurrent.futures.ThreadPoolExecutor, *, link: bool
) -> None:
    """Write `base` with deltas applied to `target`, each tensor verified. `link`: share unchanged files."""
    missing = set(steps[-1].tensors)
    for path in sorted(base.iterdir()):
        if path.suffix != ".safetensors":
            shutil.copyfile(path, target / path.name)
            sync_path(target / path.name)
            continue
        header, regions = read_header(path)
        missing -= set(regions)
        build = _builder(path, regions, steps)
        if link and not any(
            step.tensors[name].size for step in steps for name in regions if name in step.tensors
        ):
            for _ in pool.map(build, regions):
                pass  # verified, too: engines will load the copy on this disk
            os.link(path, target / path.name)
            continue
        with open(target / path.name, "wb") as out:
            out.write(header)
            for data in pool.map(build, regions):
                out.write(data.data)
            out.flush()
            os.fsync(out.fileno())
    if missing:
        raise _Broken(steps[-1].entry, f"made for other weights: there is no {min(missing)} here")


def _builder(
    path: Path, regions: Mapping[str, tuple[int, int]], steps: Sequence[_Step]
) -> Callable[[str], np.ndarray]:
    """Return a function: name -> the tensor's bytes in the last version."""

    def build(name: str) -> np.ndarray:
        start, nbytes = regions[name]
        data = np.fromfile(path, np.uint8, nbytes, offset=start)
        for step in steps:
            try:
                step.change(name, data)
            except (DeltaError, KeyError, OSError) as error:
                raise _Broken(step.entry, f"tensor {name}: {error}") from error
        return data

    return build


def read_header(path: Path) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Return the header of a safetensors file, and name -> (offset in the file, bytes), in order."""
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if length > path.stat().st_size:
            raise DeltaError(f"{path.name} is not a safetensors file")
        text = file.read(length)
    try:
        table = {
            name: row["data_offsets"] for name, row in json.loads(text).items() if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError) as error:
        raise DeltaError(f"{path.name} is not a safetensors file ({error})") from error
    places = sorted((start, end, name) for name, (start, end) in table.items())
    return prefix + text, {name: (8 + length + start, end - start) for start, end, name in places}
