"""Interfaces of a weight transport: a sender at the trainer, a delivery to an engine, and bundles.

A `WeightBundle` is a version of the weights that any engine can still fetch: it stays valid until the bundle
after the next one is made, so that an engine that restarts late catches up without asking the trainer.

A live transport sends to paused engines, and leaves nothing to fetch. The trainer writes its weights to disk
when an engine missed them or has restarted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from slime.wire.control import EngineControl, Receipt
from slime.wire.protocol import EngineInfo

NamedTensors = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class WeightBundle:
    """One version of the weights, ready to be loaded by engines.

    Example: version "3f2a:7" over the "tensor" transport: `payload` is the manifest of three shared segments.
    Over "disk" it is the folder of a checkpoint, over "delta" where changes are published. None: a live push
    has brought the version to the engines, and nothing is written. `checksum` None: readers of this transport
    check themselves. `metrics`: the sender's counts, for the log. `written`: the folder of this version;
    None: no engine reads folders.
    """

    version: str
    transport: str
    num_tensors: int
    nbytes: int
    checksum: int | None
    payload: Any
    metrics: Mapping[str, float] = field(default_factory=dict)
    written: Path | None = None


class Sender(Protocol):
    """Trainer side of a transport; lives as long as the run. It gets buckets in order, then `finish`."""

    def send(self, bucket: NamedTensors) -> None: ...

    def finish(self, version: str) -> WeightBundle: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Target:
    """An engine that is paused for a live push. `life` changes at a restart: a new process is in no group."""

    url: str
    life: int
    num_ranks: int
    gpu_ids: tuple[int, ...]  # empty on a CPU machine
    parallel_updates: bool = False  # it receives in several process groups at once


@dataclass(frozen=True, slots=True)
class LiveReport:
    """Outcome of a live push, over all stages. `failures`: engine address -> why it has no new weights.

    `rank_bytes`: trainer rank -> the bytes that it sent, of each rank that sends.
    """

    num_tensors: int
    nbytes: int
    failures: dict[str, str]
    rank_bytes: Mapping[int, int] = field(default_factory=dict)


class LiveSender(Protocol):
    """Trainer side of a live transport, on every rank that sends. `failures`: those of the push so far."""

    failures: dict[str, str]

    def open(self, version: str, targets: tuple[Target, ...]) -> None: ...

    def send(self, bucket: NamedTensors) -> None: ...

    def finish(self) -> LiveReport: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DeltaOptions:
    """Options of delta transports. `agents`: engine address -> its agent; other engines share `local`."""

    local: Path  # the local copy for the engines of this machine
    remove_local: bool = False  # the copy belongs to the run and is removed with it
    encoding: str = "xor"
    checksum: str = "xxh3-128"
    agents: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SenderOptions:
    """Facts about the run that a sender may need."""

    shm_prefix: str
    folder: Path  # where checkpoints for the engines are written
    hf_checkpoint: str  # config and tokenizer of those checkpoints
    rank: int = 0
    host: str = "127.0.0.1"  # address of this rank for engines
    deadline_s: float = 120.0  # longest wait for one bucket
    stage: int = 0  # this rank's pipeline stage; without a pipeline there is a single one
    # `quantization_config` of those checkpoints; None: unchanged.
    quantization: Mapping[str, Any] | None = None
    # Config of adapters that are sent alone; None: the whole model is sent.
    adapter_config: Mapping[str, Any] | None = None
    keep_files: bool = False  # versions on disk are kept after their use
    delta: DeltaOptions | None = None  # None: the run sends no deltas
    # Called with each folder that is not a push's version (such as a late full copy), before readers see it.
    after_writing: Callable[[Path], None] = lambda folder: None


@dataclass(frozen=True, slots=True)
class Site:
    """Relative placement of trainer and engines."""

    cuda: bool = False
    colocated: bool = False
    # Each GPU of an engine has a trainer rank on it; read only if they are colocated.
    every_gpu_trains: bool = True


async def nothing_to_prepare(bundle: WeightBundle, control: EngineControl, info: EngineInfo) -> None:
    """Do nothing: `deliver` does all the work."""


@dataclass(frozen=True, slots=True)
class Transport:
    """The code of a transport that publishes bundles; its capabilities are in its row of the catalog.

    `prepare`: work that can be done while the engine still generates, before `deliver`. `compare`: returns
    the names of tensors that differ between an engine and the push.
    """

    make_sender: Callable[[SenderOptions], Sender]
    deliver: Callable[[WeightBundle, EngineControl, EngineInfo], Awaitable[Receipt]]
    compare: Callable[[WeightBundle, EngineControl, EngineInfo, str], Awaitable[list[str]]]
    prepare: Callable[[WeightBundle, EngineControl, EngineInfo], Awaitable[None]] = nothing_to_prepare


def check_receipt(bundle: WeightBundle, receipt: Receipt, engine: str) -> None:
    """Raise unless the engine reports the weights that were sent."""
    wrong: dict[str, tuple[Any, Any]] = {
        what: (sent, held)
        for what, sent, held in [
            ("version", bundle.version, receipt.version),
            ("tensors", bundle.num_tensors, receipt.tensors),
            ("bytes", bundle.nbytes, receipt.nbytes),
            ("checksum", bundle.checksum, receipt.checksum),
        ]
        if held is not None and sent is not None and held != sent
    }
    if wrong:
        details = ", ".join(f"{what} {sent} sent but {held} loaded" for what, (sent, held) in wrong.items())
        raise RuntimeError(f"engine {engine} holds other weights than were pushed: {details}")
