"""Builds packed micro-batches from a rank's batch by concatenation and index arithmetic."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime.algorithms.nucleus import Nucleus
from slime.backends.attention.documents import PackedDocuments
from slime.backends.base import MicroBatch
from slime.utils.ranges import ranges
from slime.utils.types import RolloutBatch

TokenInputs = Mapping[str, Sequence[Tensor]]  # by name: for each sample of the rank's batch [R_i, ...]


def build_micro_batch(
    batch: RolloutBatch, positions: Sequence[int], tokens: TokenInputs | None = None, *, replay: bool = False
) -> MicroBatch:
    """Build one packed stream from the samples at `positions`; `tokens`: further values per response token.

    `replay`: with the experts that the engine chose. The ids from which it drew tokens are included if they
    were recorded. No positions: a two-token stream whose one target has mask 0, so that a rank without
    samples runs the same passes.
    """
    if not positions:
        return empty_micro_batch(tokens or ())
    documents = [batch["tokens"][p] for p in positions]
    lengths = [len(document) for document in documents]
    response_lengths = [batch["response_lengths"][p] for p in positions]
    input_ids = torch.cat(documents)
    sizes, responses = np.array(lengths), np.array(response_lengths)
    logit_positions = torch.from_numpy(ranges(sizes.cumsum() - responses - 1, responses))
    return MicroBatch(
        input_ids=input_ids[None],
        position_ids=torch.from_numpy(ranges(np.zeros_like(sizes), sizes))[None],
        documents=PackedDocuments.from_lengths(lengths),
        logit_positions=logit_positions,
        targets=input_ids[logit_positions + 1],
        segments=torch.from_numpy(np.repeat(np.arange(len(positions)), responses)),
        loss_mask=torch.cat([batch["loss_masks"][p] for p in positions]).float(),
        rollout_mask_sums=torch.tensor(
            [batch["rollout_mask_sums"][p] for p in positions], dtype=torch.float32
        ),
        positions=tuple(positions),
        response_lengths=tuple(response_lengths),
        tokens={
            name: torch.cat([values[p] for p in positions]).float() for name, values in (tokens or {}).items()
        },
        routed_experts=_routed_experts(batch, positions) if replay and "routed_experts" in batch else None,
        nucleus=_nucleus(batch, positions) if "rollout_top_p_token_ids" in batch else None,
        media=_media(batch, positions),
    )


def build_micro_batches(
    batch: RolloutBatch,
    micro_batches: Sequence[Sequence[int]],
    tokens: TokenInputs | None = None,
    *,
    replay: bool = False,
) -> list[MicroBatch]:
    return [build_micro_batch(batch, positions, tokens, replay=replay) for positions in micro_batches]


def _nucleus(batch: RolloutBatch, positions: Sequence[int]) -> Nucleus:
    ids, offsets = batch["rollout_top_p_token_ids"], batch["rollout_top_p_token_offsets"]
    return Nucleus.of([ids[p] for p in positions], [offsets[p] for p in positions])


def _media(batch: RolloutBatch, positions: Sequence[int]) -> tuple[Mapping[str, Any] | None, ...]:
    if "multimodal_train_inputs" not in batch:
        return ()
    found = tuple(batch["multimodal_train_inputs"][p] for p in positions)
    return found if any(media is not None for media in found) else ()


def _routed_experts(batch: RolloutBatch, positions: Sequence[int]) -> Tensor:
    """Return [T, layers, topk]; an engine never computes a sample's last token, which gets -1."""
    parts = []
    for position in positions:
        routed = batch["routed_experts"][position].to(torch.int32)
        if len(routed) != len(batch["tokens"][position]) - 1:
            raise ValueError(
                f"sample {batch['sample_indices'][position]} has experts of {len(routed)} tokens for "
                f"{len(batch['tokens'][position])} tokens: an engine records all but the last."
            )
        parts += [routed, torch.full((1, *routed.shape[1:]), -1, dtype=torch.int32)]
    return torch.cat(parts)


def check_routed_experts(mb: MicroBatch, layers: int, topk: int, experts: int) -> None:
    """Refuse samples whose recorded experts are missing or are not of this model."""
    found = mb.routed_experts
    if found is None:
        raise ValueError(
            "--use-rollout-routing-replay: the samples carry no rollout_routed_experts; use engines that "
            "return them, or --use-routing-replay of the Megatron trainer, which needs none."
        )
    if tuple(found.shape[1:]) != (layers, topk) or int(found.max()) >= experts:
        raise ValueError(
            f"--use-rollout-routing-replay: the samples carry choices of {tuple(found.shape[1:])} (layers, "
            f"experts per token) with expert {int(found.max())} among them; the model has {(layers, topk)} "
            f"and {experts} experts. Engines and trainer must run the same model."
        )


def split_by_sample(values: Tensor, micro_batch: MicroBatch) -> list[Tensor]:
    """Split flat per-token values [R] into one tensor [R_i] per sample of the micro-batch."""
    return list(torch.split(values, list(micro_batch.response_lengths)))


def by_sample(mbs: Sequence[MicroBatch], outputs: Sequence[dict[str, Tensor]]) -> dict[str, list[Tensor]]:
    """Outputs [R, ...] by name of each micro-batch -> by name one [R_i, ...] per sample, in batch order."""
    found: dict[str, dict[int, Tensor]] = {}
    for mb, flat in zip(mbs, outputs, strict=True):
        for name, values in flat.items():
            # zip stops at once for a micro-batch of weight zero: it has no positions.
            found.setdefault(name, {}).update(zip(mb.positions, split_by_sample(values, mb), strict=False))
    return {name: [values[position] for position in sorted(values)] for name, values in found.items()}


def empty_micro_batch(token_names: Iterable[str]) -> MicroBatch:
    """Build a micro-batch of weight zero, with the same names among its tokens."""
    zero = torch.zeros(1, dtype=torch.int64)
    return MicroBatch(
        input_ids=torch.zeros(1, 2, dtype=torch.int64),
        position_ids=torch.arange(2)[None],
        documents=PackedDocuments.from_lengths([2]),
        logit_positions=zero,
        targets=zero,
        segments=zero,
        loss_mask=torch.zeros(1),
        rollout_mask_sums=torch.zeros(1),
        positions=(),
        response_lengths=(1,),
        tokens={key: torch.zeros(1) for key in token_names},
    )
