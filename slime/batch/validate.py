"""Validates samples and train data, with a clear error for inconsistencies that would spoil training."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slime.utils import top_p
from slime.utils.types import RolloutBatch, Sample, TokenKey, is_score

PER_TOKEN_KEYS: tuple[TokenKey, ...] = (
    *("loss_masks", "rollout_log_probs", "teacher_log_probs", "versions", "token_rewards"),
    *("teacher_top_ids", "teacher_top_log_probs"),
)
REQUIRED_KEYS = ("tokens", "response_lengths", "loss_masks", "rewards", "rollout_ids", "rollout_mask_sums")


def check_reward(sample: Sample, value: Any) -> float:
    """Return the reward as a float; ValueError names a sample whose reward is not a finite number."""
    if is_score(value):
        return float(value)
    why = sample.reward_failure
    failure = f" ({why.kind}: {why.reason})" if why else ""
    hint = " It is a dict: choose its key with --reward-key." if isinstance(value, dict) else ""
    raise ValueError(
        f"the reward of sample {sample.index} (group {sample.group_index}) is {value!r}{failure}: only a "
        f"finite number can be trained on.{hint}"
    )


def check_masks(masks: Iterable[Sequence[float] | npt.NDArray[Any]]) -> None:
    """Raise ValueError for values other than 0 and 1; the conversion to integers would hide some."""
    for mask in masks:
        if isinstance(mask, np.ndarray) and ((mask == 0) | (mask == 1)).all():
            continue
        if not {0, 1}.issuperset(mask):
            other = next(value for value in mask if value not in (0, 1))
            raise ValueError(f"a loss_mask contains {other!r}: a token is trained (1) or not (0).")


def check_distinct(samples: Sequence[Sample]) -> None:
    """Raise ValueError if a batch has one Sample object several times: it would be trained that often."""
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
    lists: Mapping[str, Any] = batch
    for key in (*REQUIRED_KEYS, *PER_TOKEN_KEYS, "rollout_top_p_token_ids", "rollout_top_p_token_offsets"):
        if key in lists and len(lists[key]) != num_samples:
            raise ValueError(f"{key} of {source} has {len(lists[key])} entries for {num_samples} samples.")
    if ("rollout_top_p_token_ids" in batch) != ("rollout_top_p_token_offsets" in batch):
        raise ValueError(
            f"{source} has one of rollout_top_p_token_ids and rollout_top_p_token_offsets: it needs both."
        )
    for position, index in enumerate(batch.get("sample_indices", range(num_samples))):
        _check_sample(batch, position, f"sample {index} of {source}")


def _check_sample(batch: RolloutBatch, position: int, name: str) -> None:
    length, tokens = batch["response_lengths"][position], batch["tokens"][position]
    total, reward = tokens.shape[0], batch["rewards"][position]
    if not 0 <= length < total:
        raise ValueError(
            f"{name} has response length {length} but {total} tokens: at least one prompt token must come "
            "before the response."
        )
    for key in PER_TOKEN_KEYS:
        if key in batch and batch[key][position].shape[0] != length:
            raise ValueError(
                f"{key} has {len(batch[key][position])} entries for {length} response tokens in {name}."
            )
    if not math.isfinite(reward):
        raise ValueError(f"the reward of {name} is {reward}: only a finite number can be trained on.")
    if "rollout_log_probs" in batch and not batch["rollout_log_probs"][position].isfinite().all():
        raise ValueError(f"rollout_log_probs of {name} contains NaN or inf: an engine's error.")
    if "rollout_top_p_token_ids" in batch:
        pair = batch["rollout_top_p_token_ids"][position], batch["rollout_top_p_token_offsets"][position]
        if wrong := top_p.wrong_with(*pair, tokens[total - length :].tolist()):
            raise ValueError(f"{name} has {wrong}.")
