"""Records activations inside decoder layers by token, also where a rank holds only some of the tokens."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slime.backends.base import MicroBatch
from slime.cli.verify_model.cases import Activations

OUTPUT = "output"
# Parts of a layer in the order of computation, by their hub name; Megatron's name where it differs.
PARTS = {
    "input_layernorm": "input_layernorm",
    "self_attn": "self_attention",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp": "mlp",
}
# (keyword arguments of a layer, micro-batch) -> which of its tokens this rank computes, -1 for padding
Share = Callable[[dict[str, Any], MicroBatch], Tensor]


@dataclass(frozen=True, slots=True)
class CapturedPiece:
    """Part of one activation: `values` [n, H] of the tokens numbered `tokens` [n] in a packed micro-batch."""

    documents: tuple[int, ...]
    lengths: tuple[int, ...]
    layer: int
    part: str
    tokens: Tensor
    values: Tensor


@contextmanager
def recording(
    layers: Sequence[tuple[int, nn.Module]], mbs: Sequence[MicroBatch], ids: Sequence[int], share: Share
) -> Iterator[list[CapturedPiece]]:
    """Collect pieces during one pass over `mbs`; `ids`: the documents of this rank's batch."""
    pieces: list[CapturedPiece] = []
    handles = [hook for layer in layers for hook in _hook_layer(*layer, mbs, ids, share, pieces)]
    try:
        yield pieces
    finally:
        for handle in handles:
            handle.remove()


def _hook_layer(
    number: int,
    layer: nn.Module,
    mbs: Sequence[MicroBatch],
    ids: Sequence[int],
    share: Share,
    pieces: list[CapturedPiece],
) -> Iterator[Any]:
    calls = -1
    tokens: Tensor | None = None

    def begin(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal calls, tokens
        calls += 1
        # Micro-batches that only fill a schedule come after the real ones.
        tokens = share(kwargs, mbs[calls]) if calls < len(mbs) else None

    def keep(part: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            if tokens is None:
                return
            value = (output[0] if isinstance(output, tuple) else output).detach()
            value = value.reshape(-1, value.shape[-1]).float().cpu()
            if len(value) != len(tokens):
                return  # families with several streams, or layers that run more than once
            mb, real = mbs[calls], tokens >= 0
            documents, lengths = tuple(ids[p] for p in mb.positions), mb.documents.lengths
            pieces.append(CapturedPiece(documents, lengths, number, part, tokens[real], value[real].clone()))

        return hook

    yield layer.register_forward_pre_hook(begin, with_kwargs=True)
    yield layer.register_forward_hook(keep(OUTPUT))
    for part, other in PARTS.items():
        module = getattr(layer, part, None) or getattr(layer, other, None)
        if module is not None:
            yield module.register_forward_hook(keep(part))


def whole_stream(_kwargs: dict[str, Any], mb: MicroBatch) -> Tensor:
    """Return the tokens of a rank of the FSDP trainer: all of them."""
    return torch.arange(mb.input_ids.shape[1])


def padded_batch(_kwargs: dict[str, Any], mb: MicroBatch) -> Tensor:
    """Return the tokens of a rank for a family that runs on a padded batch."""
    lengths = torch.tensor(mb.documents.lengths)
    real = torch.arange(mb.documents.longest) < lengths[:, None]
    return torch.where(real.flatten(), real.flatten().cumsum(0) - 1, -1)


def megatron_share(tensor_rank: int, tensor_size: int) -> Share:
    """Return the tokens of a rank of the Megatron trainer; rank and size are of sequence parallelism."""

    def share(kwargs: dict[str, Any], mb: MicroBatch) -> Tensor:
        stream = kwargs["packed_seq_params"]
        total = sum(stream.documents.lengths)
        numbers = torch.full((total,), -1)
        numbers[stream.real.cpu()] = torch.arange(mb.input_ids.shape[1])
        if stream.plan is not None:
            numbers = numbers[stream.plan.local.cpu()]
        return numbers.chunk(tensor_size)[tensor_rank]

    return share


def assemble(pieces: list[CapturedPiece]) -> Activations:
    """Join the pieces of all ranks to documents."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, pieces)
    streams: dict[Any, Tensor] = {}
    for piece in (piece for part in gathered for piece in part):
        key = (piece.documents, piece.lengths, piece.layer, piece.part)
        shape = (sum(piece.lengths), piece.values.shape[-1])
        streams.setdefault(key, torch.full(shape, float("nan")))[piece.tokens] = piece.values
    return {
        (document, layer, part): values
        for (documents, lengths, layer, part), stream in streams.items()
        for document, values in zip(documents, stream.split(lengths), strict=True)
    }
