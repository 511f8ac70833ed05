"""For tests of deltas: a small model's tensors, an optimizer that moves a few, readers of folders."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from slime.weight_sync.base import DeltaOptions, SenderOptions
from slime.weight_sync.delta.publication import FolderSource, Index
from slime.weight_sync.delta.transport import DeltaSender


def small_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """Every kind of tensor that a checkpoint may have: 16 and 32 bits, bytes, a scalar, an empty one."""
    torch.manual_seed(seed)
    return {
        "a.weight": torch.randn(64, 96).bfloat16(),
        "b.weight": torch.randn(33, 7),
        "c.bytes": torch.randint(0, 255, (257,), dtype=torch.uint8),
        "d.scalar": torch.randn(()).bfloat16(),
        "e.frozen": torch.randn(128).bfloat16(),
        "f.empty": torch.empty(0, 4),
    }


def step(state: dict[str, torch.Tensor], seed: int, share: float = 0.05) -> dict[str, torch.Tensor]:
    """A few elements of every tensor but the frozen one move."""
    torch.manual_seed(1000 + seed)
    moved = {}
    for name, tensor in state.items():
        mask = torch.rand(tensor.shape) < share
        other = torch.randint_like(tensor, 255) if tensor.dtype == torch.uint8 else tensor * 1.01 + 0.001
        moved[name] = tensor if name == "e.frozen" else torch.where(mask, other, tensor)
    return moved


def make_sender(folder: Path, local: Path, model: str = "hub/name", **changes) -> DeltaSender:
    keep = changes.pop("keep_files", False)
    return DeltaSender(
        SenderOptions("no-shm", folder, model, keep_files=keep, delta=DeltaOptions(local, **changes))
    )


def publish(sender, state: dict[str, torch.Tensor], version: str):
    """The whole model in two buckets."""
    items = list(state.items())
    sender.send(items[: len(items) // 2])
    sender.send(items[len(items) // 2 :])
    return sender.finish(version)


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def assert_same_bits(held: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert set(held) == set(wanted)
    for name, tensor in wanted.items():
        assert held[name].dtype == tensor.dtype and held[name].shape == tensor.shape, name
        same = torch.equal(
            held[name].reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8)
        )
        assert same, name


def index_of(folder: Path) -> Index:
    return Index.from_json(FolderSource(folder).read("", "published.json"))
