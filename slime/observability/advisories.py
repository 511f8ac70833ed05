"""Advice for runs that work but do not learn, or that waste their devices. Each cause is reported once.

An `Advisor` sees the metrics as they are logged. A check reads their history and returns the evidence and the
flag that helps, or None. Checks wait for a few steps, because one odd batch is not a pattern.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from slime.catalog.metrics import is_eval_score
from slime.utils.machine.own_command import as_typed

PATIENCE = 3  # consecutive rollouts that must show the problem


@dataclass(frozen=True, slots=True)
class Advisory:
    """One piece of advice.

    Example: Advisory("truncated", "75% of the responses of the last 3 rollouts were truncated at
    --rollout-max-response-len 512", "a truncated response is rarely right: raise it").
    """

    cause: str  # the name of the check
    evidence: str
    advice: str

    def __str__(self) -> str:
        return f"{self.evidence}; {self.advice}."


@dataclass(frozen=True, slots=True)
class Facts:
    """Settings that the advice depends on. Example: Facts(8, 512, True, False, True)."""

    samples_per_prompt: int
    max_response_len: int | None
    saves: bool
    overlapped: bool  # the next rollout is generated during training
    by_rewards: bool  # not by a supervised loss, and not only generating
    has_teacher: bool = False  # trains the policy even without a reward signal


@dataclass(slots=True)
class MetricHistory:
    """Values of each metric by step, in logging order."""

    values: dict[str, dict[int, float]] = field(default_factory=dict)

    def add(self, metrics: Mapping[str, object], step: int) -> None:
        for name, value in metrics.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                self.values.setdefault(name, {})[step] = float(value)

    def last(self, name: str) -> list[float]:
        """Return the last `PATIENCE` values, or fewer at the beginning of a run."""
        return list(self.values.get(name, {}).values())[-PATIENCE:]

    def grown(self, name: str) -> tuple[float, float] | None:
        """Return the means of the first and the last values; None: there are too few."""
        values = list(self.values.get(name, {}).values())
        if len(values) < 2 * PATIENCE:
            return None
        return sum(values[:PATIENCE]) / PATIENCE, sum(values[-PATIENCE:]) / PATIENCE

    def streak(self, name: str, holds: Callable[[float], bool]) -> bool:
        """Return whether the last values all satisfy a condition."""
        last = self.last(name)
        return len(last) == PATIENCE and all(map(holds, last))


Check = Callable[[MetricHistory, Facts], "tuple[str, str] | None"]
CHECKS: dict[str, Check] = {}


def _check(function: Check) -> Check:
    CHECKS[function.__name__.lstrip("_")] = function
    return function


class Advisor:
    """Reports each cause at most once in a run."""

    def __init__(self, facts: Facts):
        self._facts, self._history = facts, MetricHistory()
        self._reported: set[str] = set()

    def at_start(self) -> list[Advisory]:
        """Return the advice that follows from the settings alone."""
        if self._facts.saves or not self._facts.by_rewards:
            return []
        evidence = "neither --save nor --save-hf is given: the trained weights are lost when the run ends"
        advice = "give --save DIR --save-interval N for checkpoints, or --save-hf DIR for a model folder"
        return self._new({"no_save": (evidence, advice)})

    def observe(self, metrics: Mapping[str, object], step: int) -> list[Advisory]:
        """Return new advice after these metrics."""
        self._history.add(metrics, step)
        unreported = {name: check for name, check in CHECKS.items() if name not in self._reported}
        found = {name: check(self._history, self._facts) for name, check in unreported.items()}
        return self._new({name: answer for name, answer in found.items() if answer is not None})

    def _new(self, found: Mapping[str, tuple[str, str]]) -> list[Advisory]:
        self._reported |= found.keys()
        return [Advisory(name, *answer) for name, answer in found.items()]


def _zero_variance_share(history: MetricHistory) -> float | None:
    """Return the share of groups whose responses all have one reward; None: not known yet."""
    kept = history.values.get("rollout/groups/kept", {})
    steps = list(kept)[-PATIENCE:]
    if len(steps) < PATIENCE:
        return None
    equal = sum(
        values.get(step, 0.0)
        for name, values in history.values.items()
        if name.startswith("rollout/zero_std/count_")
        for step in steps
    )
    total = sum(kept[step] for step in steps)
    return equal / total if total else None


@_check
def _reward_never_moves(history: MetricHistory, facts: Facts) -> tuple[str, str] | None:
    rewards = history.last("rollout/raw_reward")
    share = _zero_variance_share(history)
    if len(rewards) < PATIENCE or share != 1.0 or max(rewards) != min(rewards) or facts.has_teacher:
        return None
    return (
        f"every response of the last {PATIENCE} rollouts got the reward {rewards[0]:g}",
        f"nothing can be learned from that: check `{as_typed('samples', 'RUN')}`, the reward function and "
        "the labels",
    )


@_check
def _groups_without_difference(history: MetricHistory, facts: Facts) -> tuple[str, str] | None:
    share = _zero_variance_share(history)
    if share is None or share < 0.8 or facts.samples_per_prompt < 2 or facts.has_teacher:
        return None
    return (
        f"in {share:.0%} of the groups of the last {PATIENCE} rollouts all responses have the same reward",
        "they train nothing: use prompts of suitable difficulty, more --n-samples-per-prompt, or "
        "--dynamic-sampling-filter-path "
        "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
    )


@_check
def _special_ending(history: MetricHistory, facts: Facts) -> tuple[str, str] | None:
    """A reward that compares text may find no response right because of special tokens at the end."""
    rewards = history.last("rollout/raw_reward")
    ends = history.streak("rollout/special_ending_ratio", lambda share: share >= 0.5)
    if not ends or len(rewards) < PATIENCE or max(rewards) > 0 or facts.has_teacher:
        return None
    share = history.last("rollout/special_ending_ratio")[-1]
    return (
        f"{share:.0%} of the responses end in a special token; {PATIENCE} rollouts had no reward above 0",
        "does the reward compare text? Use slime.rollout.rm_hub.response_text(args, sample), or set "
        "--rollout-skip-special-tokens",
    )


@_check
def _truncated_responses(history: MetricHistory, facts: Facts) -> tuple[str, str] | None:
    if not history.streak("rollout/truncated_ratio", lambda share: share >= 0.5):
        return None
    share = sum(history.last("rollout/truncated_ratio")) / PATIENCE
    return (
        f"{share:.0%} of the responses of the last {PATIENCE} rollouts were truncated at "
        f"--rollout-max-response-len {facts.max_response_len}",
        "a truncated response is rarely right: raise it, or ask for shorter responses",
    )


@_check
def _entropy_collapse(history: MetricHistory, facts: Facts) -> tuple[str, str] | None:
    before, now = history.grown("train/entropy_loss") or (0.0, 1.0)
    if now > 0.1 * before or now > 0.1 or not facts.by_rewards:
        return None
    return (
        f"the entropy of the policy fell from {before:.3g} to {now:.3g}",
        "its responses are nearly always the same, so it no longer explores: lower --lr, raise "
        "--entropy-coef or --eps-clip-high, or add --use-kl-loss",
    )


@_check
def _kl_runaway(history: MetricHistory, facts: Facts) -> tuple[str, str] | None:
    for name in ("train/kl_loss", "rollout/kl"):
        if history.streak(name, lambda kl: abs(kl) > 1.0):
            return (
                f"the KL to the reference was above 1 nat per token in the last {PATIENCE} steps ({name} is "
                f"{history.last(name)[-1]:.3g})",
                "the policy has left its reference: lower --lr, or raise --kl-loss-coef or --kl-coef",
            )
    return None


@_check
def _evaluation_falls(history: MetricHistory, facts: Facts) -> tuple[str, str] | None:
    for name, values in history.values.items():
        if not is_eval_score(name) or len(values) < 3:
            continue
        best, last = max(values.values()), list(values.values())[-2:]
        if best > 0 and max(last) < 0.8 * best and best - max(last) > 0.03:
            step = max(values, key=lambda at: values[at])
            return (
                f"{name} fell from {best:.3g} (step {step}) to {last[-1]:.3g}, twice in a row",
                "the training reward may be gamed, or the step is too large: compare "
                f"`{as_typed('samples', 'RUN', '--diff')}`, lower --lr",
            )
    return None


@_check
def _trainer_waits(history: MetricHistory, facts: Facts) -> tuple[str, str] | None:
    waits, steps = history.last("perf/train_wait_time"), history.last("perf/step_time")
    if min(len(waits), len(steps)) < PATIENCE or sum(waits) < 0.8 * sum(steps) or not facts.by_rewards:
        return None  # supervised runs have no engines to wait for
    share = min(sum(waits) / sum(steps), 1.0)
    return (
        f"the trainer waited for responses in {share:.0%} of the last {PATIENCE} steps",
        "use more engines (--rollout-num-gpus), shorter responses"
        + ("" if facts.overlapped else f", or `{as_typed('train-async')}`, which generates while it trains"),
    )
