"""The token ids that samples were drawn from, as train data: for every sample of a batch, or for none."""

from collections.abc import Sequence

import torch

from slime.arguments import Args
from slime.arguments.groups.objectives import SUPERVISED_LOSSES
from slime.arguments.groups.trained_sampling import replays_nucleus
from slime.utils import top_p
from slime.utils.types import RolloutBatch, Sample


def add_nuclei(args: Args, batch: RolloutBatch, samples: Sequence[Sample]) -> None:
    """Add what `samples` recorded; tokens of a sample that recorded
    nothing were drawn from the whole vocabulary.

    Not for supervised losses: they are of the model as it is, whoever wrote the tokens.
    """
    if args.loss_type in SUPERVISED_LOSSES:
        return
    if replays_nucleus(args):
        _require(args, batch, samples)
    if all(sample.rollout_top_p_token_offsets is None for sample in samples):
        return
    pairs = [_tensors(sample) for sample in samples]
    batch["rollout_top_p_token_ids"] = [ids for ids, _ in pairs]
    batch["rollout_top_p_token_offsets"] = [offsets for _, offsets in pairs]


def _require(args: Args, batch: RolloutBatch, samples: Sequence[Sample]) -> None:
    for sample, mask in zip(samples, batch["loss_masks"], strict=True):
        if sample.rollout_top_p_token_offsets is None and mask.any():
            raise ValueError(
                f"sample {sample.index} (group {sample.group_index}) does not carry the token ids that it "
                f"was drawn from (rollout_top_p_token_ids), which --rollout-top-p {args.rollout_top_p:g} "
                f"and --rollout-top-k {args.rollout_top_k} need: let the generate function send its "
                f"sampling_params as it gets them (custom_params has {top_p.REQUEST_FIELD!r}) and pass the "
                "answer's meta_info to sample.append_response_tokens; or accept log-probs of another "
                "distribution with --allow-sampling-mismatch."
            )


def _tensors(sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    if offsets is None:
        return torch.zeros(0, dtype=torch.int32), torch.zeros(sample.response_length + 1, dtype=torch.int32)
    ids = [] if ids is None else ids
    return tuple(torch.as_tensor(part, dtype=torch.int32).reshape(-1) for part in (ids, offsets))
