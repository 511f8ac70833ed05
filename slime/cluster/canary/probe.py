"""The canary's fixed texts, and the diagnosis of a difference from its pattern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slime.arguments import Args
from slime.utils.types import RolloutBatch

LogProbs = list[list[float]]  # one list for each text, one number for each token but its first

# Plain text of several kinds, so that no model finds all of it odd.
TEXTS = (
    "The capital of France is Paris, and the capital of Italy is Rome. Both are old cities on a river.",
    "To add 17 and 25, add the tens first: 10 + 20 = 30. Then 7 + 5 = 12, so the sum is 30 + 12 = 42.",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n    return total",
    "A farmer has 12 sheep. He sells five of them and buys three more. How many sheep does he have now?",
)
_MAX_TOKENS = 64
_SHARE = 0.6  # of the tokens that must differ for a pattern to be seen
_AGREE_FIRST = 3  # tokens that must agree before "from one position on" is said


def probe_tokens(tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of the texts; texts that are too short for a comparison are left out."""
    encoded = (tuple(tokenizer.encode(text, add_special_tokens=False)[:_MAX_TOKENS]) for text in TEXTS)
    return tuple(ids for ids in encoded if len(ids) > _AGREE_FIRST + 1)


def why_no_canary(args: Args) -> str | None:
    """Return why a run cannot have a canary; None: it can."""
    if not args.canary_interval:
        return "--canary-interval is 0"
    if args.use_routing_replay or args.use_rollout_routing_replay:
        return "experts are replayed, which a text that no engine sampled has none of"
    if args.custom_megatron_before_log_prob_hook_path:
        return "--custom-megatron-before-log-prob-hook-path would be called for it"
    return None


def batch_of(probe: Sequence[Sequence[int]]) -> RolloutBatch:
    """Return the probe as a batch: all but the first token of each text is a response."""
    lengths = [len(ids) - 1 for ids in probe]
    zeros, numbers = [0.0] * len(probe), list(range(len(probe)))
    return {
        "tokens": [torch.tensor(list(ids)) for ids in probe],
        "response_lengths": lengths,
        "loss_masks": [torch.ones(length, dtype=torch.int32) for length in lengths],
        "rewards": zeros,
        "raw_reward": list(zeros),
        "rollout_ids": numbers,
        "rollout_mask_sums": [float(length) for length in lengths],
        "sample_indices": list(numbers),
        "truncated": [0] * len(probe),
    }


@dataclass(frozen=True, slots=True)
class Reading:
    """Log-probs of one engine and of the trainer. `gaps`: trainer - engine, of each text and token.

    Example: Reading("engine-0", [[0.0, 0.01], [0.0, -0.02, 0.9]]): the last token of the second text differs.
    """

    engine: str
    gaps: LogProbs

    @property
    def flat(self) -> list[float]:
        return [abs(gap) for text in self.gaps for gap in text]

    @property
    def mean(self) -> float:
        return sum(self.flat) / max(len(self.flat), 1)

    @property
    def largest(self) -> float:
        return max(self.flat, default=0.0)


def compare(trainer: LogProbs, engines: Mapping[str, LogProbs]) -> list[Reading]:
    return [
        Reading(
            name, [[t - e for t, e in zip(*pair, strict=True)] for pair in zip(trainer, held, strict=True)]
        )
        for name, held in engines.items()
    ]


def pattern_of(reading: Reading, tolerance: float) -> str:
    """Return the likely cause of differences, judged by their places, as a sentence."""
    texts = [[not abs(gap) <= tolerance for gap in text] for text in reading.gaps]  # NaN is apart, too
    firsts = [(apart.index(True), apart) for apart in texts if any(apart)]
    if firsts and all(first >= _AGREE_FIRST and _share(apart[first:]) >= _SHARE for first, apart in firsts):
        where = min(first for first, _ in firsts) + 1
        return (
            f"they agree up to a token and differ from it on (from token {where} of a text at the earliest): "
            "the engine's cache, its positions, or a template that one side puts into the text"
        )
    share = _share([is_apart for apart in texts for is_apart in apart])
    if share >= _SHARE:
        return f"{share:.0%} of all tokens differ: other weights, or another precision"
    return f"{share:.0%} of the tokens differ, here and there: rounding that adds up, or a few tensors"


def _share(apart: Sequence[bool]) -> float:
    return sum(apart) / max(len(apart), 1)


def diagnose(
    reading: Reading, tolerance: float, version: int, last_good: int | None, others_agree: bool
) -> str:
    """Return a diagnosis from log-probs alone; only a comparison of tensors can say more."""
    since = (
        f"They agreed after push {last_good}: a push since then, at the latest {version}, did not bring what "
        "the trainer holds."
        if last_good is not None
        else "They have not agreed since this run began: look at how the engine loads and computes the model."
    )
    alone = (
        " The other engines agree with the trainer, so the fault is this engine's." if others_agree else ""
    )
    return (
        f"the canary: {reading.engine} and the trainer give a fixed text log-probs that differ by "
        f"{reading.mean:.3g} on average (largest {reading.largest:.3g}, tolerance {tolerance:g}) after push "
        f"{version}. Pattern: {pattern_of(reading, tolerance)}. {since}{alone}"
    )
