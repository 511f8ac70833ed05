"""Samples -> `RolloutBatch`: rewards post-processed by group; masks, log-probs and versions as tensors."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from slime.algorithms.reward_shaping import GREEDY_REWARD_KEY, overlong_penalty, subtract_baselines
from slime.algorithms.turn_credit import Turn, compared_returns, on_all_tokens, on_last_tokens, whole_turns
from slime.arguments import Flags
from slime.arguments.groups.objectives import SUPERVISED_LOSSES
from slime.arguments.groups.trained_sampling import replays_nucleus
from slime.batch.validate import check_distinct, check_masks, check_reward, validate_batch
from slime.catalog.estimators import ESTIMATORS
from slime.utils import top_p
from slime.utils.misc import load_function
from slime.utils.packed_samples import values_of
from slime.utils.plugin_errors import plugin_call, wrong_return
from slime.utils.stored_arrays import StoredArray
from slime.utils.types import RolloutBatch, Sample, TokenKey, flatten_samples, version_number

# Key of Sample.metadata: the role of an agent, if several take part in one rollout.
ROLE_KEY = "agent_role"
_DTYPES = {
    "tokens": torch.int64,
    "loss_masks": torch.int32,
    "rollout_log_probs": torch.float32,
    "teacher_log_probs": torch.float32,
    "teacher_top_ids": torch.int32,
    "teacher_top_log_probs": torch.float32,
    "versions": torch.int32,
    "token_rewards": torch.float32,
    "rollout_top_p_token_ids": torch.int32,
    "rollout_top_p_token_offsets": torch.int32,
}
_NUMPY_TYPES = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}


def samples_to_batch(
    args: Flags, samples: Iterable[Any], *, engine_version: str | None = None
) -> RolloutBatch:
    """Return the train data of one rollout, checked; nested lists (groups, fan-out) are flattened in order.

    `engine_version`: what engines held when the rollout started, for tokens that name no version themselves.
    """
    flat = flatten_samples(samples)
    if not flat:
        raise ValueError("the rollout returned no samples: there is nothing to train on.")
    check_distinct(flat)
    if args.custom_convert_samples_to_train_data_path:
        path = args.custom_convert_samples_to_train_data_path
        source = f"--custom-convert-samples-to-train-data-path {path}"
        with plugin_call("--custom-convert-samples-to-train-data-path", path, lambda: f"{len(flat)} samples"):
            batch = _complete(load_function(path)(args, flat))
        if replays_nucleus(args) and "rollout_top_p_token_ids" not in batch:
            raise ValueError(
                f"{source} returned no rollout_top_p_token_ids and rollout_top_p_token_offsets, which "
                "--rollout-top-p and --rollout-top-k need: copy them from the samples, or accept "
                "log-probs of another distribution with --allow-sampling-mismatch."
            )
    else:
        batch = _convert(args, flat)
        source = "the rollout"
        if args.custom_generate_function_path is not None:
            source = f"--custom-generate-function-path {args.custom_generate_function_path}"
    if engine_version is not None:
        _fill_versions(batch, engine_version)
    validate_batch(batch, source=source)
    return batch


def fill_rollout_ids(samples: Sequence[Sample]) -> list[int]:
    """Return each sample's rollout id; a sample without one gets an unused number for itself alone."""
    unused = itertools.count(max((s.rollout_id for s in samples if s.rollout_id is not None), default=-1) + 1)
    return [next(unused) if s.rollout_id is None else s.rollout_id for s in samples]


def post_process_rewards(
    args: Flags, samples: Sequence[Sample], rollout_ids: Sequence[int]
) -> tuple[list[Any], list[float]]:
    """Return (raw rewards, rewards that become advantages): by the custom hook, or shaped and centred."""
    if args.custom_reward_post_process_path:
        return _custom_rewards(args.custom_reward_post_process_path, args, samples)
    raw = [_raw_reward(args, sample) for sample in samples]
    if args.loss_type in SUPERVISED_LOSSES or not args.compute_advantages_and_returns:
        return raw, list(raw)
    if ESTIMATORS[args.advantage_estimator].by_component and args.rewards_normalization:
        return raw, _compare_components(args, samples, rollout_ids)
    return raw, compare_in_groups(args, _shaped(args, samples, raw), samples, rollout_ids)


def _compare_components(args: Flags, samples: Sequence[Sample], rollout_ids: Sequence[int]) -> list[float]:
    """Compare each component of the reward in its group; return their weighted sum, whitened (GDPO)."""
    totals = [0.0] * len(samples)
    for name, weight in (args.reward_weights or {}).items():
        numbers = compare_in_groups(args, [_component(s, name) for s in samples], samples, rollout_ids)
        totals = [total + weight * number for total, number in zip(totals, numbers, strict=True)]
    return subtract_baselines(totals, [0] * len(totals), rollout_ids, baseline="mean_std")


def _component(sample: Sample, name: str) -> float:
    if not isinstance(sample.reward, dict) or name not in sample.reward:
        raise ValueError(
            f"the reward of sample {sample.index} has no component {name!r} of --reward-weights, which "
            "--advantage-estimator gdpo compares by itself; return a dict with that entry for every sample."
        )
    return float(sample.reward[name])


def _shaped(args: Flags, samples: Sequence[Sample], raw: Sequence[float]) -> list[float]:
    """Return the raw rewards with the penalty for overlong responses."""
    longest, buffer = args.rollout_max_response_len, args.overlong_buffer_len
    if buffer is None:
        return list(raw)
    assert longest is not None, "parsing asks for --rollout-max-response-len with --overlong-buffer-len"
    pairs = zip(raw, samples, strict=True)
    return [reward + overlong_penalty(sample.response_length, longest, buffer) for reward, sample in pairs]


def compare_in_groups(
    args: Flags, rewards: Sequence[float], samples: Sequence[Sample], rollout_ids: Sequence[int]
) -> list[float]:
    """Return one number per sample: its reward, minus its group's baseline if the estimator has one.

    Samples of one rollout that played different roles (metadata["agent_role"]: the two sides of a game, a
    solver and its critic) are compared only with samples of the same role.
    """
    estimator = ESTIMATORS[args.advantage_estimator]
    if estimator.baseline is None or not args.rewards_normalization:
        return list(rewards)
    numbers: dict[tuple[int, Any], int] = {}  # of groups, and in them of roles
    groups = []
    for sample in samples:
        if sample.group_index is None:
            raise ValueError(
                f"sample {sample.index} has no group_index: {args.advantage_estimator} compares rewards of "
                "a group; set group_index in the rollout, or pass --disable-rewards-normalization."
            )
        key = sample.group_index, sample.metadata.get(ROLE_KEY)
        groups.append(numbers.setdefault(key, len(numbers)))
    lengths = [_sum_of(_mask_of(sample)) for sample in samples]
    scaled = estimator.scale_rewards and args.grpo_std_normalization
    return subtract_baselines(
        rewards,
        groups,
        rollout_ids,
        baseline="mean_std" if scaled else estimator.baseline,
        lengths=lengths if estimator.baseline == "length_weighted" else None,
        greedy_rewards=[sample.metadata.get(GREEDY_REWARD_KEY) for sample in samples],
    )


def _token_rewards(
    args: Flags, samples: Sequence[Sample], raw: Sequence[float], rollout_ids: Sequence[int]
) -> list[torch.Tensor] | None:
    """Return the reward of each token, from its turn (--turn-discount); None: rewards are per sample."""
    if args.turn_discount is None or all(sample.turn_rewards is None for sample in samples):
        return None
    shaped = zip(samples, _shaped(args, samples, raw), strict=True)
    turns = [whole_turns(s.turn_rewards, s.response_length, reward) for s, reward in shaped]
    _check_turns(samples, turns)
    if ESTIMATORS[args.advantage_estimator].uses_gamma:
        return [on_last_tokens(own, _loss_mask(s)) for s, own in zip(samples, turns, strict=True)]
    values = compared_returns(
        turns, args.turn_discount, lambda numbers: compare_in_groups(args, numbers, samples, rollout_ids)
    )
    rows = zip(samples, turns, values, strict=True)
    return [on_all_tokens(own, value, s.response_length) for s, own, value in rows]


def _check_turns(samples: Sequence[Sample], turns: Sequence[Sequence[Turn]]) -> None:
    for sample, own in zip(samples, turns, strict=True):
        covered = torch.zeros(sample.response_length, dtype=torch.int32)
        for start, end, reward in own:
            if not (0 <= start <= end <= sample.response_length and math.isfinite(reward)):
                raise ValueError(
                    f"turn_rewards of sample {sample.index} has ({start}, {end}, {reward}): a turn lies "
                    f"within the {sample.response_length} tokens of the response, and its reward is finite."
                )
            covered[start:end] += 1
        if ((covered != 1) & (_loss_mask(sample) != 0)).any():
            raise ValueError(
                f"turn_rewards of sample {sample.index}: each trained token must be in one turn; its "
                f"turns are {[(start, end) for start, end, _ in own][:8]}."
            )


def _custom_rewards(path: str, args: Flags, samples: Sequence[Sample]) -> tuple[list[Any], list[float]]:
    option, subject = "--custom-reward-post-process-path", f"{len(samples)} samples"
    with plugin_call(option, path, lambda: subject):
        made = load_function(path)(args, samples)
        if not isinstance(made, (tuple, list)) or len(made) != 2:
            complaint = f"returned {type(made).__name__}; return (raw_rewards, rewards)."
            wrong_return(option, path, complaint, subject)
        raw, rewards = list(made[0]), [float(reward) for reward in made[1]]
    if not len(raw) == len(rewards) == len(samples):
        complaint = (
            f"returned {len(raw)} raw rewards and {len(rewards)} rewards; return one of each per sample."
        )
        wrong_return(option, path, complaint, subject)
    return raw, rewards


def _raw_reward(args: Flags, sample: Sample) -> float:
    if sample.reward is None and sample.reward_failure is None and args.loss_type == "sft_loss":
        return 0.0  # supervised data has no rewards
    if isinstance(sample.reward, dict) and args.reward_key and args.reward_key not in sample.reward:
        raise ValueError(
            f"--reward-key {args.reward_key}: the reward of sample {sample.index} has only "
            f"{', '.join(sample.reward)}."
        )
    return check_reward(sample, None if sample.reward is None else sample.get_reward_value(args))


def mask_sums_by_rollout(mask_sums: Iterable[float], rollout_ids: Sequence[int]) -> list[float]:
    """Return for each sample the mask total of its whole rollout, from the total of each sample."""
    totals: dict[int, float] = defaultdict(float)
    for mask_sum, rollout_id in zip(mask_sums, rollout_ids, strict=True):
        totals[rollout_id] += mask_sum
    return [totals[rollout_id] for rollout_id in rollout_ids]


def _convert(args: Flags, samples: list[Sample]) -> RolloutBatch:
    rollout_ids = fill_rollout_ids(samples)
    raw_reward, rewards = post_process_rewards(args, samples, rollout_ids)
    masks = [_mask_of(sample) for sample in samples]
    check_masks(masks)
    batch: RolloutBatch = {
        "tokens": _rows([values_of(sample, "tokens") for sample in samples], torch.int64),
        "response_lengths": [sample.response_length for sample in samples],
        "loss_masks": _rows(masks, torch.int32),
        "rewards": rewards,
        # The reward that is shown to people (raw_reward) may differ from the one that is trained on.
        "raw_reward": [s.metadata.get("raw_reward", raw) for s, raw in zip(samples, raw_reward, strict=True)],
        "group_index": [-1 if sample.group_index is None else sample.group_index for sample in samples],
        "rollout_ids": rollout_ids,
        "rollout_mask_sums": mask_sums_by_rollout(map(_sum_of, masks), rollout_ids),
        "sample_indices": [position if s.index is None else s.index for position, s in enumerate(samples)],
        "truncated": [int(sample.status == Sample.Status.TRUNCATED) for sample in samples],
    }
    _add_optional(batch, samples)
    if not (args.custom_reward_post_process_path or args.loss_type in SUPERVISED_LOSSES):
        token_rewards = _token_rewards(args, samples, raw_reward, rollout_ids)
        if token_rewards is not None:
            batch["token_rewards"] = token_rewards
    if args.loss_type not in SUPERVISED_LOSSES:  # supervised losses use no sampled log-probs
        _add_nuclei(args, batch, samples)
    return batch


def _add_optional(batch: RolloutBatch, samples: list[Sample]) -> None:
    keys: tuple[TokenKey, ...] = (
        *("rollout_log_probs", "teacher_log_probs", "teacher_top_ids", "teacher_top_log_probs"),
    )
    for key in keys:
        if _all_or_none(samples, key):
            batch[key] = _rows([values_of(s, key) for s in samples], _DTYPES[key])
    if _all_or_none(samples, "rollout_routed_experts"):
        experts: list[Any] = [values_of(s, "rollout_routed_experts") for s in samples]
        # References stay: each trainer rank reads the arrays of its own samples.
        rows: list[Any] = [e if isinstance(e, StoredArray) else torch.tensor(e) for e in experts]
        batch["routed_experts"] = rows
    versions = [_token_versions(sample) for sample in samples]
    if any((row >= 0).any() for row in versions):
        batch["versions"] = _rows(versions, torch.int32)
    if any(sample.train_metadata is not None for sample in samples):
        batch["metadata"] = [sample.train_metadata for sample in samples]
    if any(sample.multimodal_train_inputs is not None for sample in samples):
        batch["multimodal_train_inputs"] = [sample.multimodal_train_inputs for sample in samples]
    if "round_number" in samples[0].metadata:
        batch["round_number"] = [sample.metadata["round_number"] for sample in samples]


def _all_or_none(samples: list[Sample], name: str) -> bool:
    missing = [s for s in samples if values_of(s, name) is None]
    if missing and len(missing) < len(samples):
        raise ValueError(
            f"{len(missing)} of {len(samples)} samples have no {name}, first sample {missing[0].index} "
            f"(group {missing[0].group_index}): record it for every sample of a rollout, or for none."
        )
    return not missing


def _add_nuclei(args: Flags, batch: RolloutBatch, samples: Sequence[Sample]) -> None:
    """Add the token ids that samples were drawn from; without any it was the whole vocabulary."""
    missing = [sample for sample in samples if sample.rollout_top_p_token_offsets is None]
    trained = [s for s in missing if _sum_of(_mask_of(s))] if replays_nucleus(args) else []
    if trained:
        raise ValueError(
            f"sample {trained[0].index} (group {trained[0].group_index}) does not carry the token ids that "
            f"it was drawn from (rollout_top_p_token_ids), which --rollout-top-p {args.rollout_top_p:g} "
            f"and --rollout-top-k {args.rollout_top_k} need: let the generate function send its "
            f"sampling_params as it gets them (custom_params has {top_p.REQUEST_FIELD!r}), to "
            "SGLang with return_sampling_mask: true beside them, and pass the answer's meta_info to "
            "sample.append_response_tokens; or accept log-probs of another "
            "distribution with --allow-sampling-mismatch."
        )
    if len(missing) < len(samples):
        pairs = [_nucleus(sample) for sample in samples]
        batch["rollout_top_p_token_ids"] = [ids for ids, _ in pairs]
        batch["rollout_top_p_token_offsets"] = [offsets for _, offsets in pairs]


def _nucleus(sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids, offsets) of one sample."""
    ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    if ids is None or offsets is None:
        ids, offsets = [], [0] * (sample.response_length + 1) if offsets is None else offsets
    ids, offsets = (torch.as_tensor(values, dtype=torch.int32).reshape(-1) for values in (ids, offsets))
    return ids, offsets


def _loss_mask(sample: Sample) -> torch.Tensor:
    return torch.as_tensor(_mask_of(sample), dtype=torch.int32)


def _mask_of(sample: Sample) -> Sequence[int] | npt.NDArray[Any]:
    if sample.remove_sample:
        return [0] * sample.response_length
    mask: Sequence[int] | npt.NDArray[Any] | None = values_of(sample, "loss_mask")
    return [1] * sample.response_length if mask is None else mask


def _sum_of(mask: Sequence[int] | npt.NDArray[Any]) -> float:
    return float(mask.sum() if isinstance(mask, np.ndarray) else sum(mask))


def _rows(values: Sequence[Any], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return a tensor for each list of numbers; numpy reads all lists at once, ten times as fast as torch."""
    if any(isinstance(value, np.ndarray) for value in values):  # samples of rollout workers
        return [torch.as_tensor(np.asarray(value), dtype=dtype) for value in values]
    if not all(type(value) in (list, tuple) for value in values):
        return [torch.as_tensor(value, dtype=dtype) for value in values]
    sizes = [len(value) for value in values]
    joined = np.fromiter(itertools.chain.from_iterable(values), _NUMPY_TYPES[dtype], sum(sizes))
    return list(torch.from_numpy(joined).split(sizes))


def _token_versions(sample: Sample) -> npt.NDArray[Any]:
    """[R] weight version number of each response token; -1: no version that is a number. If only versions of
    whole responses were recorded, the oldest is used for all tokens.
    """
    answers = [] if sample.version_spans else map(version_number, sample.weight_versions)
    oldest = min((number for number in answers if number is not None), default=-1)
    versions = np.full(sample.response_length, oldest, np.int32)
    for version, start, end in sample.version_spans:
        number = version_number(version)
        if number is not None:
            versions[start:end] = number
    return versions


def _fill_versions(batch: RolloutBatch, engine_version: str) -> None:
    number = version_number(engine_version)
    if number is None:
        return
    unknown = [torch.full((length,), -1, dtype=torch.int32) for length in batch["response_lengths"]]
    rows = batch.get("versions", unknown)
    if not (torch.cat(rows) < 0).any():
        return  # every token names its version
    pairs = zip(rows, batch["loss_masks"], strict=True)
    batch["versions"] = [
        torch.where((versions < 0) & (mask != 0), number, versions) for versions, mask in pairs
    ]


def _complete(made: dict[str, Any]) -> RolloutBatch:
    """Convert plain lists of a custom converter to tensors, and add the keys that can be derived."""
    missing = [key for key in ("tokens", "response_lengths", "rewards") if key not in made]
    if missing:
        raise ValueError(f"--custom-convert-samples-to-train-data-path returned no {', '.join(missing)}.")
    batch = dict(made)
    num_samples = len(batch["tokens"])
    batch.setdefault("loss_masks", [[1] * length for length in batch["response_lengths"]])
    check_masks([torch.as_tensor(mask).tolist() for mask in batch["loss_masks"]])
    for key, dtype in _DTYPES.items():
        if key in batch:
            batch[key] = _rows(batch[key], dtype)
    batch.setdefault("raw_reward", list(batch["rewards"]))
    batch.setdefault("truncated", [0] * num_samples)
    batch.setdefault("sample_indices", list(range(num_samples)))
    batch.setdefault("rollout_ids", list(range(num_samples)))
    sums = [float(mask.sum()) for mask in batch["loss_masks"]]
    batch.setdefault("rollout_mask_sums", mask_sums_by_rollout(sums, batch["rollout_ids"]))
    return cast(RolloutBatch, batch)  # `validate_batch` checks the converter's result
