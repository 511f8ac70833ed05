"""Checks on samples and train data: one clear error for each thing that would otherwise train on nonsense."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slime.utils import top_p
from slime.utils.types import RolloutBatch, Sample, TokenKey, is_score

PER_TOKEN_KEYS: tuple[TokenKey, ...] = (
    *("loss_masks", "rollout_log_probs", "teacher_log_probs", "versions", "token_rewards"),
)
REQUIRED_KEYS = ("tokens", "response_lengths", "loss_masks", "rewards", "rollout_ids", "rollout_mask_sums")


def check_reward(sample: Sample, value: Any) -> float:
    """The reward as a float, or an error that names the sample: only a finite number may be trained on."""
    if is_score(value):
        return float(value)
    why = sample.reward_failure
    failure = f" ({why.kind}: {why.reason})" if why else ""
    hint = " It is a dict: choose its key with --reward-key." if isinstance(value, dict) else ""
    raise ValueError(
        f"the reward of sample {sample.index} (group {sample.group_index}) is {value!r}{failure}: only a "
        f"finite number can be trained on.{hint}"
    )


def check_samples(samples: Sequence[Sample], generate_function: str | None = None) -> None:
    """Lengths of one sample's fields agree; a mask or log-probs of another length is an error.

    `generate_function`: the path of the user's own that made those which name none themselves.
    """
    for sample in samples:
        path, length = sample.generate_function_path or generate_function, sample.response_length
        made_by = "" if path is None else f", returned by --custom-generate-function-path {path}"
        name = f"sample {sample.index} (group {sample.group_index}{made_by})"
        if length > len(sample.tokens) - 1:
            raise ValueError(
                f"{name} has response_length {length} but {len(sample.tokens)} tokens: at least one prompt "
                "token must come before the response; sample.tokens holds the ids of both."
            )
        if sample.loss_mask is not None and len(sample.loss_mask) != length:
            raise ValueError(
                f"loss_mask has {len(sample.loss_mask)} entries for {length} response tokens in {name}: "
                "every appended token needs a mask value."
            )
        if not {0, 1}.issuperset(sample.loss_mask or ()):
            other = next(value for value in sample.loss_mask or () if value not in (0, 1))
            raise ValueError(f"loss_mask holds {other!r} in {name}: a token is trained (1) or not (0).")
        for field in ("rollout_log_probs", "teacher_log_probs"):
            values = getattr(sample, field)
            if values is not None and len(values) != length:
                raise ValueError(f"{field} has {len(values)} entries for {length} response tokens in {name}.")


def check_distinct(samples: Sequence[Sample]) -> None:
    """Raise ValueError where a batch holds one Sample object several times: it would be trained so often."""
    sample, count = Counter(map(id, samples)).most_common(1)[0]
    if count > 1:
        twice = next(member for member in samples if id(member) == sample)
        raise ValueError(
            f"the batch holds the same Sample object {count} times, now as sample {twice.index} (group "
            f"{twice.group_index}): it would be trained {count} times. The generate or rollout function "
            "returned one object for several samples; return a Sample of its own for each."
        )


def validate_batch(batch: RolloutBatch, *, source: str = "the train data") -> None:
    """Raise ValueError unless every key fits: number of samples, response lengths, finite numbers."""
    missing = [key for key in REQUIRED_KEYS if key not in batch]
    if missing:
        raise ValueError(f"{source} has no {', '.join(missing)}: training needs {', '.join(REQUIRED_KEYS)}.")
    num_samples = len(batch["tokens"])
    if num_samples == 0:
        raise ValueError(f"{source} holds no samples.")
    lists: Mapping[str, Any] = batch
    for key in (*REQUIRED_KEYS, *PER_TOKEN_KEYS, "rollout_top_p_token_ids", "rollout_top_p_token_offsets"):
        if key in lists and len(lists[key]) != num_samples:
            raise ValueError(f"{key} of {source} has {len(lists[key])} entries for {num_samples} samples.")
    if ("rollout_top_p_token_ids" in batch) != ("rollout_top_p_token_offsets" in batch):
        raise ValueError(
            f"{source} has one of rollout_top_p_token_ids and rollout_top_p_token_offsets: it needs both."
        )
    # All masks and log-probs at once; single samples are checked only if one of them is wrong.
    sound = _is_mask(torch.cat(batch["loss_masks"]))
    if "rollout_log_probs" in batch:
        sound = sound and bool(torch.cat(batch["rollout_log_probs"]).isfinite().all())
    indices = batch.get("sample_indices", range(num_samples))
    for position, index in enumerate(indices):
        _check_sample(batch, position, f"sample {index} of {source}", sound=sound)


def _is_mask(values: torch.Tensor) -> bool:
    return bool(((values == 0) | (values == 1)).all())


def _check_sample(batch: RolloutBatch, position: int, name: str, *, sound: bool) -> None:
    length, tokens = batch["response_lengths"][position], batch["tokens"][position]
    total, reward = tokens.shape[0], batch["rewards"][position]
    if not 0 <= length < total:
        raise ValueError(
            f"{name} has response length {length} but {total} tokens: it must be from 0 to {total - 1}."
        )
    for key in PER_TOKEN_KEYS:
        if key in batch and batch[key][position].shape[0] != length:
            raise ValueError(
                f"{key} has {len(batch[key][position])} entries for {length} response tokens in {name}."
            )
    if not sound and not _is_mask(batch["loss_masks"][position]):
        raise ValueError(f"loss_masks of {name} holds other values than 0 and 1: a token is trained or not.")
    if not math.isfinite(reward):
        raise ValueError(f"the reward of {name} is {reward}: only a finite number can be trained on.")
    known = sound or "rollout_log_probs" not in batch
    if not known and not batch["rollout_log_probs"][position].isfinite().all():
        raise ValueError(f"rollout_log_probs of {name} holds NaN or inf: an engine returned a broken one.")
    if "rollout_top_p_token_ids" in batch:
        pair = batch["rollout_top_p_token_ids"][position], batch["rollout_top_p_token_offsets"][position]
        if wrong := top_p.wrong_with(*pair, tokens[total - length :].tolist()):
            raise ValueError(f"{name} has {wrong}.")
