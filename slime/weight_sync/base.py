"""What a weight transport is: a sender on the trainer's first rank, a delivery to one engine, and what lies between.

A `Parcel` is a version of the weights that any engine can still fetch: it stays valid until the parcel after the
next one is made, so that an engine that restarts late catches up without asking the trainer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from slime.wire.control import EngineControl, Receipt
from slime.wire.manifest import WeightManifest

NamedTensors = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Parcel:
    """One version of the weights, ready to be taken.

    Example: version "3f2a:7" over the "tensor" transport: `payload` is the manifest of three shared segments.
    Over "disk" it is the folder of a checkpoint. `checksum` None: the transport leaves checking to its reader.
    """

    version: str
    transport: str
    num_tensors: int
    nbytes: int
    checksum: int | None
    payload: WeightManifest | Path


class Sender(Protocol):
    """Trainer side; lives as long as the run. Buckets come in order, then `finish` makes the parcel."""

    def send(self, bucket: NamedTensors) -> None: ...

    def finish(self, version: str) -> Parcel: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SenderOptions:
    """What a sender may need to know about the run."""

    shm_prefix: str
    folder: Path  # where checkpoints for the engines are written
    hf_checkpoint: str  # config and tokenizer of those checkpoints


@dataclass(frozen=True, slots=True)
class Transport:
    """One way to move weights. `engine_needs`: the name that an engine's `transports` must contain."""

    name: str
    engine_needs: str
    make_sender: Callable[[SenderOptions], Sender]
    deliver: Callable[[Parcel, EngineControl], Awaitable[Receipt]]
    compare: Callable[[Parcel, EngineControl, str], Awaitable[list[str]]]


def check_receipt(parcel: Parcel, receipt: Receipt, engine: str) -> None:
    """The engine holds what was sent, as far as it reports."""
    wrong: dict[str, tuple[Any, Any]] = {
        what: (sent, held)
        for what, sent, held in [
            ("version", parcel.version, receipt.version),
            ("tensors", parcel.num_tensors, receipt.tensors),
            ("bytes", parcel.nbytes, receipt.nbytes),
            ("checksum", parcel.checksum, receipt.checksum),
        ]
        if held is not None and sent is not None and held != sent
    }
    if wrong:
        details = ", ".join(f"{what} {sent} sent but {held} held" for what, (sent, held) in wrong.items())
        raise RuntimeError(f"engine {engine} holds other weights than were pushed: {details}")
