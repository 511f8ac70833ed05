"""The delta transport: a full copy once, then the changed bytes of each version, in a folder.

The trainer remembers the bytes it published last (one copy of the model in host memory) and compares. A
local copy next to the engines applies the deltas (`local_copy.py`), and the engines load from it, unpatched.
Engines on other machines have their own agent (`weight_agent.py`), which is asked for the version.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from slime.utils.files.checksums import sync_path
from slime.utils.files.safetensors_files import write_index, write_tensors
from slime.weight_sync.base import NamedTensors, SenderOptions, Transport, WeightBundle
from slime.weight_sync.delta.local_copy import LocalCopy, find_route
from slime.weight_sync.delta.publication import (
    INDEX,
    WANTED,
    DeltaEntry,
    FolderSource,
    Index,
    folder_name,
    read_index,
    replace_text,
)
from slime.weight_sync.delta.weight_agent import ask_agent
from slime.weight_sync.disk import compare_with_folder, copy_config, room_for
from slime.weight_sync.verify import reload_and_compare
from slime.wire.control import EngineControl, Receipt
from slime.wire.delta_codec import checksum_function, encode, worker_pool
from slime.wire.delta_manifest import MANIFEST, DeltaManifest, TensorRecord
from slime.wire.protocol import EngineInfo

logger = logging.getLogger(__name__)

_MAX_CHAIN = 32  # deltas after a full copy; a late engine applies all of them
_SHARD_BYTES = 1 << 30
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Published:
    """A published version. `agents`: engine address -> agent; the other engines load from `local`."""

    folder: Path
    local: Path
    agents: Mapping[str, str]


class DeltaSender:
    """Publishes a full copy, then deltas; a full copy again when deltas outgrow it or on request.

    Full copies after the first are written in the background, from the remembered bytes.
    """

    def __init__(self, options: SenderOptions):
        assert options.delta is not None, "a run that sends deltas has options for them"
        self._options, self._delta, self._folder = options, options.delta, options.folder
        self._checksum = checksum_function(options.delta.checksum)
        # Bytes of `_version`, or of the version that is being sent.
        self._known: dict[str, torch.Tensor] = {}
        self._sums: dict[str, str] = {}
        self._version: str | None = None  # None: nothing is published, or a push is under way
        self._base: str | None = None
        self._records: list[TensorRecord] = []
        self._index: list[DeltaEntry] = []
        # Guards all fields above between the caller and the thread of full copies.
        self._state = threading.Lock()
        self._pool = worker_pool()
        self._closing = threading.Event()
        self._background = threading.Thread(target=self._serve_requests, name="full-copies", daemon=True)
        self._background.start()

    @property
    def _staging(self) -> Path:
        return self._folder / "delta.tmp"

    # ---- a push --------------------------------------------------------------------------------------------

    def send(self, bucket: NamedTensors) -> None:
        with self._pushing("weights"):
            if not self._records:
                self._begin()
            news = [(name, tensor.detach().to("cpu", copy=True).contiguous()) for name, tensor in bucket]
            if self._base is not None and any(not self._is_same_kind(name, new) for name, new in news):
                logger.warning(
                    "The model's tensors differ from the last push: publishing a full copy, not a delta."
                )
                self._base = None
            file = f"delta-{len({record.file for record in self._records}) + 1:05d}.bin"
            with open(self._staging / file, "wb") as out:
                for record, payload in self._pool.map(lambda item: self._encode(*item), news):
                    size, offset = len(payload), out.tell()
                    self._records.append(replace(record, file=file, offset=offset, size=size))
                    out.write(payload)
                out.flush()
                os.fsync(out.fileno())
            self._known.update(news)

    def _begin(self) -> None:
        self._base, self._version = self._version, None
        shutil.rmtree(self._staging, ignore_errors=True)
        self._staging.mkdir(parents=True)

    def _is_same_kind(self, name: str, new: torch.Tensor) -> bool:
        old = self._known.get(name)
        return old is not None and old.dtype == new.dtype and old.shape == new.shape

    def _encode(self, name: str, new: torch.Tensor) -> tuple[TensorRecord, bytes]:
        data, itemsize = _bytes_of(new), new.element_size()
        num_changed, payload = 0, b""
        if self._base is not None:
            num_changed, payload = encode(_bytes_of(self._known[name]), data, itemsize, self._delta.encoding)
        same = self._base is not None and not payload
        checksum = self._sums[name] if same else self._checksum(data)
        self._sums[name] = checksum
        return TensorRecord(name, data.size, itemsize, checksum, num_changed=num_changed), payload

    def finish(self, version: str) -> WeightBundle:
        with self._pushing(f"weights {version}"):
            records, self._records = self._records, []
            sent = {record.name for record in records}
            if self._base is not None and sent != set(self._known):
                self._base = None
            self._known = {name: tensor for name, tensor in self._known.items() if name in sent}
            if self._base is None:
                entry = self._write_full(version, dict(self._known), dict(self._sums), self._staging)
            else:
                entry = self._write_delta(version, records)
            self._version = version
            self._publish(entry)
        nbytes = sum(record.nbytes for record in records)
        num_elements = sum(record.nbytes // record.itemsize for record in records)
        metrics: dict[str, float] = {"perf/update_weights_wire_bytes": entry.nbytes}
        if entry.base is not None:
            num_changed = sum(record.num_changed for record in records)
            metrics["perf/update_weights_density"] = num_changed / max(1, num_elements)
        published = Published(self._folder, self._delta.local, self._delta.agents)
        written = self._folder / entry.folder
        return WeightBundle(version, "delta", len(records), nbytes, None, published, metrics, written)

    @contextlib.contextmanager
    def _pushing(self, what: str) -> Iterator[None]:
        """Publish a full copy next if this push fails: the remembered bytes are then half old, half new."""
        try:
            with self._state, room_for(what, self._folder, "--update-weight-disk-dir"):
                yield
        except BaseException:
            self._version, self._base, self._records = None, None, []
            shutil.rmtree(self._staging, ignore_errors=True)
            raise

    # ---- what is published ---------------------------------------------------------------------------------

    def _write_delta(self, version: str, records: list[TensorRecord]) -> DeltaEntry:
        for file in list(self._staging.iterdir()):
            if not file.stat().st_size:
                file.unlink()  # for a bucket in which nothing changed
        return self._rename(self._staging, "delta", version, self._base, records)

    def _write_full(
        self, version: str, tensors: dict[str, torch.Tensor], sums: dict[str, str], staging: Path
    ) -> DeltaEntry:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        weight_map: dict[str, str] = {}
        for i, shard in enumerate(_shards(tensors), 1):
            file = f"model-{i:05d}.safetensors"
            write_tensors(staging / file, shard)
            weight_map.update(dict.fromkeys(shard, file))
        write_index(staging, weight_map, sum(t.nbytes for t in tensors.values()))
        copy_config(self._options, staging)
        for path in staging.iterdir():
            sync_path(path)
        records = [TensorRecord(name, t.nbytes, t.element_size(), sums[name]) for name, t in tensors.items()]
        return self._rename(staging, "full", version, None, records)

    def _rename(
        self, staging: Path, kind: str, version: str, base: str | None, records: list[TensorRecord]
    ) -> DeltaEntry:
        files = {path.name: path.stat().st_size for path in sorted(staging.iterdir())}
        manifest = DeltaManifest(
            version, base, self._delta.encoding, self._delta.checksum, files, tuple(records)
        )
        replace_text(staging / MANIFEST, manifest.to_json())
        name, again = folder_name(kind, version), 1
        target = self._folder / name
        while target.exists():  # a full copy that is found broken is replaced
            again += 1
            target = self._folder / f"{name}-{again}"
        staging.rename(target)
        nbytes = sum(files.values()) + (target / MANIFEST).stat().st_size
        return DeltaEntry(version, base, target.name, nbytes)

    def _publish(self, entry: DeltaEntry) -> None:
        """Publish an entry, a late full copy in its place; entries that become superfluous are removed."""
        if not self._index:
            self._options.after_writing(self._folder)
        later = [i for i, other in enumerate(self._index) if other.base == entry.version]
        self._index.insert(later[0] if later else len(self._index), entry)
        gone = [] if self._options.keep_files else self._superfluous()
        self._index = [other for other in self._index if other not in gone]
        replace_text(self._folder / INDEX, Index(tuple(self._index)).to_json())
        for old in gone:
            shutil.rmtree(self._folder / old.folder, ignore_errors=True)

    def _superfluous(self) -> list[DeltaEntry]:
        """Return entries that no engine needs to reach the newest version or the one before it.

        Of the versions up to the full copy, only the step to it stays, for engines one version behind.
        """
        fulls = [
            i for i, entry in enumerate(self._index) if entry.base is None and entry.version != self._version
        ]
        if not fulls:
            return []
        start = self._index[fulls[-1]]
        before = self._index[: fulls[-1]]
        return [entry for entry in before if entry.base is None or entry.version != start.version]

    # ---- full copies during training -----------------------------------------------------------------------

    def _serve_requests(self) -> None:
        while not self._closing.wait(_LOOK_S):
            wanted = self._folder / WANTED
            if wanted.exists() or self._deltas_outgrow():
                try:
                    if self._write_full_late():
                        wanted.unlink(missing_ok=True)
                except Exception:  # the run continues with deltas; the next push tries again
                    logger.exception("A full copy of the weights could not be written to %s", self._folder)
                    self._closing.wait(10.0)

    def _deltas_outgrow(self) -> bool:
        with self._state:
            if self._version is None:
                return False
            newest = max(i for i, entry in enumerate(self._index) if entry.base is None)
            chain = self._index[newest + 1 :]
            return len(chain) >= _MAX_CHAIN or sum(e.nbytes for e in chain) > self._index[newest].nbytes

    def _write_full_late(self) -> bool:
        """Write a full copy, also over one that is found broken. False: not now, a push is under way."""
        with self._state:
            if self._version is None:
                return False
            version, tensors, sums = self._version, dict(self._known), dict(self._sums)
        entry = self._write_full(version, tensors, sums, self._folder / "full.tmp")
        self._options.after_writing(self._folder / entry.folder)
        with self._state:
            self._publish(entry)
        return True

    def close(self) -> None:
        self._closing.set()
        self._background.join()
        self._pool.shutdown(wait=False, cancel_futures=True)
        shutil.rmtree(self._staging, ignore_errors=True)
        if not self._options.keep_files:
            (self._folder / INDEX).unlink(missing_ok=True)
            for entry in self._index:
                shutil.rmtree(self._folder / entry.folder, ignore_errors=True)
        if self._delta.remove_local:
            shutil.rmtree(self._delta.local, ignore_errors=True)


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _shards(tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size and size + tensor.nbytes > _SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


# ---- the engines' side -------------------------------------------------------------------------------------


async def prepare(bundle: WeightBundle, control: EngineControl, info: EngineInfo) -> None:
    """Bring the engine's copy to the version while the engine still generates, if it will load the copy."""
    place: Published = bundle.payload
    agent = place.agents.get(control.url)
    if agent is not None:
        await ask_agent(agent, bundle.version, load=False)
    elif not await _deltas_for(place, bundle.version, control, info):
        await _local_folder(place, bundle.version)


async def deliver(bundle: WeightBundle, control: EngineControl, info: EngineInfo) -> Receipt:
    place: Published = bundle.payload
    agent = place.agents.get(control.url)
    if agent is not None:
        await ask_agent(agent, bundle.version, load=True)
    elif not await _apply_deltas(place, bundle.version, control, info):
        folder = await _local_folder(place, bundle.version)
        await control.update_from_disk(str(folder), bundle.version)
    return Receipt(await control.version(), None, None, None)


async def _deltas_for(
    place: Published, version: str, control: EngineControl, info: EngineInfo
) -> tuple[DeltaEntry, ...]:
    """Return the deltas that the engine itself can apply to reach the version; none: it loads the copy."""
    if not info.dialect.applies_deltas:
        return ()
    held = await control.loaded_version()
    route = find_route(read_index(FolderSource(place.folder)), held, version)
    return route.deltas if route is not None and route.full is None else ()


async def _apply_deltas(place: Published, version: str, control: EngineControl, info: EngineInfo) -> bool:
    """Have the engine apply the deltas to its own weights; False: it must load the copy."""
    deltas = await _deltas_for(place, version, control, info)
    try:
        for entry in deltas:
            assert entry.base is not None, "a delta has a base"
            await control.update_from_delta(str(place.folder / entry.folder), entry.base, entry.version)
    except RuntimeError as error:
        logger.warning("Engine %s did not apply a delta, and loads the whole copy: %s", control.url, error)
        return False
    return bool(deltas)


async def compare(
    bundle: WeightBundle, control: EngineControl, info: EngineInfo, shm_prefix: str
) -> list[str]:
    """Compare the engine with the copy, whose tensors were all verified by the trainer's checksums."""
    place: Published = bundle.payload
    agent = place.agents.get(control.url)
    if agent is not None:
        answer = await ask_agent(agent, bundle.version, load=False)
        return await reload_and_compare(control, Path(answer["folder"]), bundle.version)
    folder = await _local_folder(place, bundle.version)
    return await compare_with_folder(folder, bundle.version, control, info, shm_prefix)


async def _local_folder(place: Published, version: str) -> Path:
    copy, source = LocalCopy(place.local), FolderSource(place.folder)
    return (await asyncio.to_thread(copy.bring_to, source, version, exact=True)).folder


DELTA = Transport(DeltaSender, deliver, compare, prepare)
