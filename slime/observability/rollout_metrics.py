"""Rollout and evaluation metrics: pure functions from samples to a flat dict of numbers."""

import statistics
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import comb
from typing import Any

import numpy as np

from slime.arguments import PluginArgs
from slime.catalog.estimators import ESTIMATORS
from slime.catalog.loss_types import has_rewards
from slime.observability.tracer import sample_spans
from slime.utils.misc import group_by
from slime.utils.types import Sample, flatten_samples, version_number

# In Sample.metadata: why a response counts as wrong without a comparison (it was too large).
NOT_COMPARED_KEY = "answer_not_compared"
# In Sample.metadata: costs of an episode, by the names of `rollout/agent/<name>`.
AGENT_KEY = "agent"
LAGS = 5  # classes of token age in weight pushes; the last one includes all older tokens
_REPETITION_TAIL_CHARS = 10_000
_REPETITION_RATIO = 10.0
_EMPTY_BYTES = len(zlib.compress(b""))


def rollout_metrics(
    args: PluginArgs,
    samples: Sequence[Any],
    rollout_time: float,
    *,
    current_version: str | int | None = None,
) -> dict[str, float]:
    """Return `rollout/*`, `perf/*` and `passrate/*` of one rollout. Samples may be nested lists.

    `current_version` is the weight version the batch will train; with it, staleness is reported too.
    """
    flat = flatten_samples(samples)
    metrics = _with_prefix("rollout", sample_metrics(flat, args.log_reward_category))
    rewards = [s.get_reward_value(args) for s in flat if s.reward is not None]
    if has_rewards(vars(args)) and rewards and all(isinstance(reward, (int, float)) for reward in rewards):
        metrics["rollout/raw_reward"] = statistics.fmean(rewards)
        if not ESTIMATORS[args.advantage_estimator].needs_values:  # a critic compares with its own values
            metrics.update(_with_prefix("rollout", zero_std_counts(flat, args.reward_key)))
    metrics.update(_groups_of_one(flat))
    metrics.update(_reward_components(flat))
    metrics.update(_with_prefix("rollout", version_metrics(flat, current_version)))
    num_gpus = max(1, args.rollout_num_gpus or 1)
    metrics.update(_with_prefix("perf", perf_metrics(flat, rollout_time, num_gpus=num_gpus)))
    if args.log_multi_turn:
        metrics.update(_with_prefix("multi_turn", multi_turn_metrics(flat)))
    if args.log_correct_samples:
        lengths = [s.effective_response_length for s in flat if s.reward and s.get_reward_value(args) == 1]
        metrics["rollout/correct_samples"] = len(lengths)
        metrics |= _with_prefix("rollout/correct_response_len", distribution(lengths)) if lengths else {}
    if args.log_passrate:
        by_group = _rewards_by_group(flat, args.reward_key)
        metrics.update(_with_prefix("passrate", pass_rates(by_group)))
    return metrics


def multi_turn_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return lengths of whole responses and of observations (tokens that others wrote), and turns."""
    masks = [sample.loss_mask or [1] * sample.response_length for sample in samples]
    turns = [sum(now and not before for before, now in zip([0, *mask], mask, strict=False)) for mask in masks]
    foreign = [len(mask) - sum(mask) for mask in masks]
    metrics = _with_prefix("raw_response_length", distribution([len(mask) for mask in masks]))
    metrics |= _with_prefix("observation_length", distribution(foreign))
    return metrics | _with_prefix("round_number", distribution(turns))


def eval_metrics(args: PluginArgs, data: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return `eval/*` of all datasets: {name: {"rewards": [...], "truncated": [...], "samples": [...]}}.

    A reward that could not be computed is None: it is not in the mean, and counted in `eval/{name}-failed`.
    """
    metrics: dict[str, float] = {}
    for name, result in data.items():
        rewards = result["rewards"]
        scored = [reward for reward in rewards if reward is not None]
        if scored:
            metrics[f"eval/{name}"] = statistics.fmean(scored)
        metrics[f"eval/{name}-failed"] = len(rewards) - len(scored)
        metrics[f"eval/{name}-samples"] = len(scored)
        if result.get("truncated"):
            metrics[f"eval/{name}-truncated_ratio"] = statistics.fmean(map(float, result["truncated"]))
        samples = flatten_samples(result.get("samples") or [])
        metrics.update(_with_prefix(f"eval/{name}", sample_metrics(samples, args.log_reward_category)))
        if args.log_passrate and len(samples) == len(rewards):
            scores = [pair for pair in zip(samples, rewards, strict=True) if pair[1] is not None]
            by_group = group_by(scores, key=lambda pair: _group_key(pair[0]))
            rates = pass_rates([[reward for _, reward in pairs] for pairs in by_group.values()])
            metrics.update({f"eval/{name}-{key}": value for key, value in rates.items()})
    return metrics


def sample_metrics(samples: Sequence[Sample], reward_category: str | None = None) -> dict[str, float]:
    """Return lengths, truncation, repetition, cache hits and reward failures of any set of samples."""
    if not samples:
        return {}
    metrics = _with_prefix("response_len", distribution([s.effective_response_length for s in samples]))
    metrics["truncated_ratio"] = statistics.fmean(s.status == Sample.Status.TRUNCATED for s in samples)
    metrics["repetition_frac"] = statistics.fmean(has_repetition(s.response) for s in samples)
    if not_compared := sum(NOT_COMPARED_KEY in s.metadata for s in samples):
        metrics["answers_not_compared"] = not_compared
    failures = Counter(s.reward_failure.kind for s in samples if s.reward_failure is not None)
    metrics.update({f"reward_failure/{kind}": count for kind, count in failures.items()})
    if drafted := sum(s.spec_info.spec_draft_token_num for s in samples):
        metrics["spec_accept_rate"] = sum(s.spec_info.spec_accept_token_num for s in samples) / drafted
    if verified := sum(s.spec_info.spec_verify_ct for s in samples):
        metrics["spec_accept_length"] = sum(s.spec_info.completion_token_num for s in samples) / verified
    if prompt_tokens := sum(s.prefix_cache_info.total_prompt_tokens for s in samples):
        cached = sum(s.prefix_cache_info.cached_tokens for s in samples)
        metrics["prefix_cache_hit_rate"] = cached / prompt_tokens
        metrics["avg_cached_tokens_per_sample"] = cached / len(samples)
    if reward_category:
        metrics.update(_reward_categories(reward_category, samples))
    metrics.update(_kept_vocabulary(samples))
    metrics.update(_with_prefix("agent", agent_metrics(samples)))
    return metrics


def agent_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the mean costs of agent episodes; nothing where there are none."""
    episodes = [s.metadata[AGENT_KEY] for s in samples if isinstance(s.metadata.get(AGENT_KEY), Mapping)]
    if not episodes:
        return {}
    names = sorted({name for episode in episodes for name in episode})
    metrics = {name: sum(float(e.get(name, 0.0)) for e in episodes) / len(episodes) for name in names}
    seconds = metrics.get("env_seconds", 0.0) + metrics.get("engine_seconds", 0.0)
    if seconds:
        metrics["env_share"] = metrics.get("env_seconds", 0.0) / seconds
    sampled = sum(end - start for s in samples for _, start, end in s.version_spans)
    if sampled:
        metrics["trained_per_sampled"] = sum(s.effective_response_length for s in samples) / sampled
    return metrics


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return unbiased pass@k: the probability that k samples drawn without replacement hold a correct one."""
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def pass_rates(rewards_by_group: Iterable[Sequence[float]], largest: int | None = None) -> dict[str, float]:
    """Return pass@1, pass@2, pass@4, ... as means over the groups that are large enough; reward 1 is correct.

    `largest`: the last k; None: the size of the smallest group.
    """
    counts = [(len(group), sum(reward == 1 for reward in group)) for group in rewards_by_group if group]
    largest = min((size for size, _ in counts), default=0) if largest is None else largest
    rates: dict[str, float] = {}
    k = 1
    while k <= largest:
        estimates = [pass_at_k(size, correct, k) for size, correct in counts if size >= k]
        if estimates:
            rates[f"pass@{k}"] = statistics.fmean(estimates)
        k *= 2
    return rates


def has_repetition(text: str) -> bool:
    """Return whether the end of the text compresses more than tenfold: the model is looping."""
    tail = text[-_REPETITION_TAIL_CHARS:].encode(errors="replace")
    if len(tail) <= _EMPTY_BYTES * _REPETITION_RATIO:
        return False  # too short to compress that much
    return len(tail) / len(zlib.compress(tail)) > _REPETITION_RATIO


def distribution(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": statistics.fmean(values),
        "median": statistics.median(values),
        "max": max(values),
        "min": min(values),
    }


def version_metrics(samples: Sequence[Sample], current_version: str | int | None) -> dict[str, float]:
    """Return the weight versions of the tokens and their staleness: mean over tokens, and maximum."""
    weights: Counter[Any] = Counter()  # tokens by version
    versions: list[int] = []  # number of versions in each sample
    for sample in samples:
        for version, start, end in sample.version_spans:
            if end > start:
                weights[version] += end - start
        if sample.version_spans:
            versions.append(len({version_number(version) for version, _, _ in sample.version_spans}))
    weights = weights or Counter(version for sample in samples for version in sample.weight_versions)
    by_number: Counter[int] = Counter()
    for version, weight in weights.items():
        if (number := version_number(version)) is not None:
            by_number[number] += weight
    if not by_number:
        return {}
    metrics: dict[str, float] = {"weight_version/min": min(by_number), "weight_version/max": max(by_number)}
    current = version_number(current_version)
    if current is not None:
        total = sum(by_number.values())
        metrics["staleness/mean"] = sum((current - number) * n for number, n in by_number.items()) / total
        metrics["staleness/max"] = current - min(by_number)
        for number, weight in by_number.items():
            name = f"staleness/{lag_name(max(0, current - number))}"
            metrics[name] = metrics.get(name, 0.0) + weight / total
    if versions:
        metrics["versions_per_sample"] = statistics.fmean(versions)
    metrics["mixed_version_frac"] = sum(count > 1 for count in versions) / len(samples)
    return metrics


def lag_name(lag: int) -> str:
    """Return the metric name of a token age in weight pushes; the last name includes all older ones."""
    return f"lag_{lag}" if lag < LAGS - 1 else f"lag_{LAGS - 1}_or_more"


def zero_std_counts(samples: Sequence[Sample], reward_key: str | None) -> dict[str, float]:
    """Count the groups in which all rewards are equal, by that reward."""
    counts: Counter[str] = Counter()
    for rewards in _rewards_by_group(samples, reward_key):
        if len(set(rewards)) == 1:
            counts[f"zero_std/count_{round(rewards[0], 1)}"] += 1
    return dict(counts)


def _groups_of_one(samples: Sequence[Sample]) -> dict[str, float]:
    """Count groups of one rollout: estimators that compare within a group give them advantage 0."""
    rollouts: dict[Any, set[int]] = {}
    for sample in samples:
        own = id(sample) if sample.rollout_id is None else sample.rollout_id
        rollouts.setdefault(_group_key(sample), set()).add(own)
    alone = sum(len(ids) == 1 for ids in rollouts.values())
    return {"rollout/groups/of_one": alone} if alone else {}


def _reward_components(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the mean of each number in dict rewards, over the samples that have it."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.reward.items() if isinstance(sample.reward, dict) else ():
            if isinstance(value, (int, float)):
                values.setdefault(f"rollout/reward/{name}", []).append(value)
    return {name: statistics.fmean(found) for name, found in values.items()}


def _rewards_by_group(samples: Sequence[Sample], key: str | None) -> list[list[float]]:
    scored = [s for s in samples if s.reward is not None]
    groups = group_by(scored, key=_group_key)
    return [[s.reward[key] if key else s.reward for s in group] for group in groups.values()]


def _group_key(sample: Sample) -> Any:
    return ("alone", id(sample)) if sample.group_index is None else sample.group_index


def perf_metrics(samples: Sequence[Sample], rollout_time: float, num_gpus: int) -> dict[str, float]:
    """Return tokens per second, time outside the engine and latencies of requests."""
    metrics: dict[str, float] = {"rollout_time": rollout_time}
    if not samples or rollout_time <= 0:
        return metrics
    lengths = {
        "": [s.response_length for s in samples],
        "effective_": [s.effective_response_length for s in samples],
    }
    for kind, values in lengths.items():
        metrics[f"{kind}tokens_per_gpu_per_sec"] = sum(values) / rollout_time / num_gpus
        metrics[f"longest_{kind}sample_tokens_per_sec"] = max(values) / rollout_time
    waits = [s.non_generation_time for s in samples]
    if any(waits):
        metrics.update(_with_prefix("non_generation_time", distribution(waits)))
    metrics.update(_request_metrics(samples))
    return metrics


def _request_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return latencies that engines reported in the spans of samples."""
    names = {
        "e2e_latency": "request/e2e_latency",
        "queue_time": "request/queue_time",
        "decode_throughput": "decode/throughput",
    }
    seen: dict[str, list[float]] = {}
    for sample in samples:
        for span in sample_spans(sample):
            for key, name in names.items():
                if isinstance(span["about"].get(key), (int, float)):
                    seen.setdefault(name, []).append(span["about"][key])
    each = (_with_prefix(name, distribution(values)) for name, values in seen.items())
    return {key: value for metrics in each for key, value in metrics.items()}


def _reward_categories(key: str, samples: Sequence[Sample]) -> dict[str, float]:
    counts = Counter(str(s.reward[key]) for s in samples if isinstance(s.reward, dict) and key in s.reward)
    return {f"error_cat/{category}": count / len(samples) for category, count in counts.items()}


def _kept_vocabulary(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the mean number of ids that a token was sampled from, where it is known."""
    offsets = [s.rollout_top_p_token_offsets for s in samples if s.rollout_top_p_token_offsets is not None]
    bounds = [np.asarray(of_sample) for of_sample in offsets]
    tokens = sum(int(np.count_nonzero(np.diff(b))) for b in bounds)
    return {"top_p_kept_vocab_per_token": sum(int(b[-1]) for b in bounds) / tokens} if tokens else {}


def _with_prefix(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{key}": value for key, value in values.items()}
