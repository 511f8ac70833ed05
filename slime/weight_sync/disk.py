"""Sends weights through a checkpoint folder that engines read; it is renamed when it is complete."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from slime.utils.errors import RunStopped
from slime.utils.files.safetensors_files import all_files, read_tensors, write_index, write_tensors
from slime.utils.machine import shm
from slime.weight_sync.base import NamedTensors, SenderOptions, Transport, WeightBundle
from slime.weight_sync.verify import reload_and_compare
from slime.wire.control import EngineControl, Receipt
from slime.wire.manifest import WeightManifest, fill_bucket, plan_bucket
from slime.wire.protocol import EngineInfo

_KEEP = 2  # versions on disk: the served one, and the previous one while engines switch
_NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


class DiskSender:
    """Writes one safetensors file per bucket, and an index that names them."""

    transport = "disk"

    def __init__(self, options: SenderOptions):
        self._folder, self._options = options.folder, options
        self._version = ""  # sent last
        self._index: dict[str, str] = {}
        self._nbytes = 0

    @property
    def _staging(self) -> Path:
        return self._folder / "incoming.tmp"

    def send(self, bucket: NamedTensors) -> None:
        with room_for("weights", self._folder, "--update-weight-disk-dir"):
            if not self._index:
                shutil.rmtree(self._staging, ignore_errors=True)
                self._staging.mkdir(parents=True)
            file = f"model-{len(set(self._index.values())) + 1:05d}.safetensors"
            write_tensors(self._staging / file, dict(bucket))
        self._index.update((name, file) for name, _ in bucket)
        self._nbytes += sum(tensor.nbytes for _, tensor in bucket)

    def finish(self, version: str) -> WeightBundle:
        with room_for(f"weights {version}", self._folder, "--update-weight-disk-dir"):
            write_index(self._staging, self._index, self._nbytes, version=version)
            copy_config(self._options, self._staging)
        target = self._target(version)
        shutil.rmtree(target, ignore_errors=True)
        self._staging.rename(target)
        bundle = WeightBundle(
            version, self.transport, len(self._index), self._nbytes, None, target, written=target
        )
        self._index, self._nbytes = {}, 0
        self._version = version
        for old in self._written[:-_KEEP]:
            shutil.rmtree(old, ignore_errors=True)
        return bundle

    @property
    def _written(self) -> list[Path]:
        """Return the versions of this run that may be removed, oldest first, whichever process wrote them."""
        run, _, number = self._version.rpartition(":")
        found: dict[int, Path] = {}
        for path in () if self._options.keep_files else self._folder.glob(f"{self._target(f'{run}:').name}*"):
            earlier = path.name.rpartition("-")[2]
            if earlier.isdecimal() and int(earlier) <= int(number):
                found[int(earlier)] = path
        return [found[n] for n in sorted(found)]

    def _target(self, version: str) -> Path:
        return self._folder / f"weights-{version.replace(':', '-')}"

    def close(self) -> None:
        shutil.rmtree(self._staging, ignore_errors=True)
        for folder in self._written:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def room_for(what: str, folder: Path, flag: str) -> Iterator[None]:
    """Turn a full disk into an error that names the folder; a version appears only when it is complete."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise RunStopped(
            f"no room for {what} in {folder} ({error.strerror}, {shutil.disk_usage(folder).free} bytes "
            "free); the versions before it are intact, and engines serve the last of them. Free some "
            f"space, or name another folder with {flag}."
        ) from error


def copy_config(options: SenderOptions, folder: Path) -> None:
    """Copy config and tokenizer into a folder of weights, which makes it a complete checkpoint."""
    source = Path(options.hf_checkpoint)
    if not source.is_dir():
        return  # a hub name: the engine already has its config
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja", ".txt", ".model") and "index" not in file.name:
            shutil.copy(file, folder / file.name)
    config = folder / "config.json"
    if options.quantization is not None and config.is_file():
        said = json.loads(config.read_text()) | {"quantization_config": dict(options.quantization)}
        config.write_text(json.dumps(said, indent=2))


async def deliver(bundle: WeightBundle, control: EngineControl, info: EngineInfo) -> Receipt:
    receipt = await control.update_from_disk(str(bundle.payload), bundle.version)
    # The engine counts the tensors of its loader, which need not match those of the files one to one.
    return Receipt(await control.version(), None, None, receipt.checksum)


async def compare(
    bundle: WeightBundle, control: EngineControl, info: EngineInfo, shm_prefix: str
) -> list[str]:
    return await compare_with_folder(bundle.payload, bundle.version, control, info, shm_prefix)


async def compare_with_folder(
    folder: Path, version: str, control: EngineControl, info: EngineInfo, shm_prefix: str
) -> list[str]:
    """Compare the files' tensors, copied to shared memory, with the engine's."""
    if not info.dialect.compares_manifests:
        return await reload_and_compare(control, folder, version)
    tensors = list(read_tensors(all_files(folder)))
    segment = shm.create_segment(plan_bucket(tensors)[1], shm_prefix)
    try:
        bucket = fill_bucket(segment.name, segment.buffer, tensors)
        return await control.check_equal(WeightManifest(version, (bucket,), len(tensors), bucket.nbytes))
    finally:
        segment.unlink()


DISK = Transport(DiskSender, deliver, compare)
