"""Checks that engine and trainer agree on log-probs of the same tokens, by the age of the weights.

Tokens sampled by the trainer's own version are *fresh* and must agree; tokens of older versions differ by
the updates since. A token without a version counts as fresh: in a run with engines, every token has one.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from slime.arguments import Flags
from slime.arguments.groups.algorithm import LOGPROB_DIFF_THRESHOLDS
from slime.arguments.groups.off_policy import CORRECTIONS
from slime.backends.shared.trainer_base import TrainBackend
from slime.observability.rollout_metrics import LAGS, lag_name
from slime.step.difference_trend import DifferenceTrend
from slime.utils.errors import RunStopped
from slime.utils.types import RolloutBatch

logger = logging.getLogger(__name__)

SHOWN_TOKENS = 5
# Rounding scatters to both sides; a difference above FROM with more than SHARE on one side is not rounding.
ONE_SIDED_FROM = 0.02
ONE_SIDED_SHARE = 0.5
ONE_SIDED_TOKENS = 256  # with fewer tokens it may be chance

LogProbs = Mapping[int, Tensor]  # position in the rank's batch -> [R_i] of the trainer, on the CPU


@dataclass(frozen=True, slots=True)
class Difference:
    """Sums over the trained tokens of one optimizer step on all ranks; `lag` counts weight versions.

    Example: `Difference(version=7, counts=tensor([90., 10., 0., 0., 0.]), totals=tensor([0.9, 0.5, 0., 0.,
    0.]), ...)`: 90 fresh tokens differ by 0.01 on average, 10 of version 6 by 0.05.
    """

    version: int  # of the trainer
    counts: Tensor  # [LAGS] tokens
    totals: Tensor  # [LAGS] absolute differences
    lags: float  # sum of lags, without the limit LAGS
    signed: float  # trainer - engine, of fresh tokens
    shifted: tuple[float, float]  # mean difference to the engine's previous and next log-prob

    @property
    def num_fresh(self) -> int:
        return int(self.counts[0])

    @property
    def num_stale(self) -> int:
        return int(self.counts[1:].sum())

    @property
    def fresh(self) -> float:
        """Mean absolute difference of fresh tokens."""
        return (self.totals[0] / self.counts[0].clamp(min=1.0)).item()

    @property
    def stale(self) -> float:
        return (self.totals[1:].sum() / self.counts[1:].sum().clamp(min=1.0)).item()

    @property
    def mean_lag(self) -> float:
        """Mean age, in weight versions, of tokens that are not fresh."""
        return self.lags / max(self.num_stale, 1)

    def metrics(self) -> dict[str, float]:
        metrics = {}
        for lag in range(LAGS):
            if self.counts[lag] > 0:
                name = lag_name(lag)
                metrics[f"train/staleness/{name}"] = (self.counts[lag] / self.counts.sum()).item()
                metrics[f"train/logprob_abs_diff/{name}"] = (self.totals[lag] / self.counts[lag]).item()
        return metrics


class Hints:
    """Hints for the log of the run: what was measured, what it means and which flag helps; once per cause.

    All ranks find the same hints; the driver logs those of rank 0.
    """

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}  # the text by cause
        self._num_drained = 0

    def log_once(self, cause: str, text: str) -> None:
        """Log `text`, unless a hint about `cause` was logged before."""
        if cause not in self.texts:
            self.texts[cause] = text
            logger.warning("%s", text)

    def drain(self) -> list[str]:
        """Return the hints that were added since the last call."""
        drained = list(self.texts.values())[self._num_drained :]
        self._num_drained = len(self.texts)
        return drained


class Agreement:
    """The checks of one rank over a whole run. Sums are over all ranks, so that all conclude the same."""

    def __init__(self) -> None:
        self.hints = Hints()
        self._trend = DifferenceTrend()

    def check(
        self,
        backend: TrainBackend,
        args: Flags,
        batch: RolloutBatch,
        log_probs: LogProbs | None,
        version: int | None,
    ) -> dict[str, float]:
        """Compare the `log_probs` of the trainer, whose weights engines know as `version`, with the engines'.

        `log_probs` None: the loss is a user's own, which does not return them. `version` None: no
        engine knows the weights. Stops the run where fresh tokens differ by more than the threshold, warns
        about all else; returns metrics.
        """
        if log_probs is None or version is None or "rollout_log_probs" not in batch:
            if args.logprob_diff_threshold != 0:
                self.hints.log_once(
                    "agreement cannot run",
                    "log-probs of engine and trainer are not compared in this run "
                    f"(--logprob-diff-threshold): {_why_not(batch, version)}",
                )
            return {}
        difference = measure(backend, batch, log_probs, version)
        threshold = threshold_of(backend, args)
        if threshold:
            self._judge_fresh(args, batch, log_probs, difference, threshold)
            self._judge_stale(difference, threshold)
            self._judge_trend(args, difference, threshold)
        self._judge_correction(args, difference)
        return difference.metrics()

    def _judge_fresh(
        self, args: Flags, batch: RolloutBatch, log_probs: LogProbs, difference: Difference, threshold: float
    ) -> None:
        if not difference.num_fresh:
            return
        cause = _likely_cause(difference, args.rollout_temperature)
        if difference.fresh > threshold:
            raise RunStopped(
                _apart(batch, log_probs, difference, threshold, cause or _fp8_remedy(args.fp8_rounding))
            )
        if cause and difference.num_fresh >= ONE_SIDED_TOKENS:
            self.hints.log_once(
                "one-sided difference",
                f"log-probs of engine and trainer differ by {difference.fresh:.3g} on average over "
                f"{difference.num_fresh} tokens of version {difference.version}, below "
                f"--logprob-diff-threshold {threshold:g}, but not as rounding does.{cause}",
            )

    def _judge_stale(self, difference: Difference, threshold: float) -> None:
        if difference.num_stale and difference.stale > threshold:
            self.hints.log_once(
                "stale tokens apart",
                f"log-probs of engine and trainer differ by {difference.stale:.3g} on average over "
                f"{difference.num_stale} tokens that older weights sampled ({difference.mean_lag:.1f} "
                f"versions behind {difference.version}), more than --logprob-diff-threshold {threshold:g}: "
                "the policy has moved far since, or engines and trainer compute differently. A smaller "
                "--lr, more frequent pushes or a smaller --max-weight-staleness bring them together.",
            )

    def _judge_trend(self, args: Flags, difference: Difference, threshold: float) -> None:
        drift = self._trend.note(difference.version, difference.fresh, difference.num_fresh, threshold)
        if drift is None:
            return
        self.hints.log_once(
            "difference grows",
            f"log-probs of engine and trainer lie {drift.now:.3g} apart on fresh tokens, {drift.num_pushes} "
            f"weight pushes after they lay {drift.first:.3g} apart: a difference that grows with the pushes "
            "is a policy that the engines do not have, and samples of it teach less and less."
            f"{_fp8_remedy(args.fp8_rounding)} --check-weight-update-equal compares every tensor of the "
            "engines after each push.",
        )

    def _judge_correction(self, args: Flags, difference: Difference) -> None:
        is_corrected = args.loss_type != "policy_loss" or any(getattr(args, name) for name in CORRECTIONS)
        if is_corrected or not difference.num_stale:
            return
        share = difference.num_stale / (difference.num_stale + difference.num_fresh)
        self.hints.log_once(
            "stale tokens as on-policy",
            f"{share:.0%} of the trained tokens were sampled by older weights ({difference.mean_lag:.1f} "
            f"versions behind on average, log-probs {difference.stale:.3g} apart) and are trained as if the "
            "current weights had sampled them. --use-tis weights each token by the ratio of the two "
            "policies; docs/algorithms.md lists the other corrections.",
        )


def _why_not(batch: RolloutBatch, version: int | None) -> str:
    """Return why there is nothing to compare, the same on all ranks."""
    if "rollout_log_probs" not in batch:
        return (
            "the samples have no rollout_log_probs; ask the engine for them (return_logprob) and set one for "
            "each response token."
        )
    if version is None:
        return "no engines got the trainer's weights (--debug-train-only, or replayed samples)."
    return "--loss-type custom_loss runs no log-prob pass before it, except where advantages are computed."


def threshold_of(backend: TrainBackend, args: Flags) -> float:
    """Return --logprob-diff-threshold, or the default for the precision of trainer and engines."""
    if args.logprob_diff_threshold is not None:
        return args.logprob_diff_threshold
    alike = backend.compute_dtype == torch.float32
    return LOGPROB_DIFF_THRESHOLDS["float32" if alike else "bfloat16"]


def measure(backend: TrainBackend, batch: RolloutBatch, log_probs: LogProbs, version: int) -> Difference:
    """Measure the differences over all ranks: every rank calls this, also one without samples."""
    trainer, engine, mask, lag, sample = _joined(batch, log_probs, version)
    gap = trainer - engine
    bucket = lag.clamp(max=LAGS - 1)[mask]
    by_lag = torch.zeros(2, LAGS, dtype=torch.float64)
    by_lag[0].index_add_(0, bucket, torch.ones_like(gap[mask]))
    by_lag[1].index_add_(0, bucket, gap[mask].abs())
    fresh = mask & (lag == 0)
    pairs = fresh[1:] & fresh[:-1] & (sample[1:] == sample[:-1])
    # Lags, signed differences, then pairs and total of differences to the token before and after.
    others = [lag[mask].sum(), gap[fresh].sum(), pairs.sum()]
    others += [(trainer[1:] - engine[:-1])[pairs].abs().sum(), (trainer[:-1] - engine[1:])[pairs].abs().sum()]
    found = torch.stack([value.double() for value in others])
    summed = backend.sum_over_ranks(torch.cat([by_lag.flatten(), found])).cpu()
    counts, totals, found = summed.split([LAGS, LAGS, len(others)])
    lags, signed, count, before, after = found.tolist()
    return Difference(
        version, counts, totals, lags, signed, (before / max(count, 1.0), after / max(count, 1.0))
    )


def _joined(
    batch: RolloutBatch, log_probs: LogProbs, version: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return log-probs of trainer and engine, whether trained, versions behind, sample index; each [T].

    Joined, because a dozen operations on each of hundreds of samples take longer than a small model's step.
    """

    def joined(rows: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
        found = list(rows)
        return torch.cat(found).to(dtype) if found else torch.zeros(0, dtype=dtype)

    places = list(log_probs)
    lengths = torch.tensor([len(row) for row in log_probs.values()], dtype=torch.long)
    trainer = joined(log_probs.values(), torch.float64)
    engine = joined((batch["rollout_log_probs"][p] for p in places), torch.float64)
    mask = joined((batch["loss_masks"][p] for p in places), torch.long) != 0
    lag = torch.zeros(len(trainer), dtype=torch.long)
    if "versions" in batch:
        versions = joined((batch["versions"][p] for p in places), torch.long)
        lag = torch.where(versions >= 0, (version - versions).clamp(min=0), 0)
    return trainer, engine, mask, lag, torch.repeat_interleave(torch.arange(len(places)), lengths)


def _likely_cause(difference: Difference, temperature: float) -> str:
    """Return a sentence (after a blank) with the likely cause of a difference; empty: none is apparent."""
    if difference.fresh < ONE_SIDED_FROM:
        return ""
    before, after = difference.shifted
    if min(before, after) < difference.fresh * ONE_SIDED_SHARE:
        near, where = (before, "before") if before < after else (after, "after")
        return (
            f" The engine's log-prob of the token {where} is nearer ({near:.3g}): they are shifted by one. "
            "rollout_log_probs[t] belongs to response token t."
        )
    bias = difference.signed / max(difference.num_fresh, 1)
    if abs(bias) > difference.fresh * ONE_SIDED_SHARE:
        return (
            f" The trainer's are {'higher' if bias > 0 else 'lower'} by {abs(bias):.3g} on average: were "
            f"the samples drawn at another temperature than --rollout-temperature {temperature:g}?"
        )
    return ""


def _fp8_remedy(rounding: str) -> str:
    """Return a hint (after a blank) if engines in FP8 may have missed small updates; else ""."""
    if rounding != "nearest":
        return ""
    return (
        " Engines in FP8 miss updates that are smaller than half a step of FP8 where the trainer started "
        "from FP8 weights: use --fp8-rounding stochastic, or a 16-bit --hf-checkpoint with "
        "--rollout-quantization fp8."
    )


def _apart(
    batch: RolloutBatch, log_probs: LogProbs, difference: Difference, threshold: float, cause: str
) -> str:
    lines = [
        _describe(batch, position, t, log_probs[position][t].item())
        for position, t in _worst(batch, log_probs, difference.version)
    ]
    return (
        f"log-probs of engine and trainer differ by {difference.fresh:.4g} on average over "
        f"{difference.num_fresh} tokens of version {difference.version} (--logprob-diff-threshold "
        f"{threshold:g}): they hold different weights or compute differently.{cause} Largest differences on "
        "this rank:\n" + "\n".join(lines)
    )


def _worst(batch: RolloutBatch, log_probs: LogProbs, version: int) -> list[tuple[int, int]]:
    """Return the positions (in the batch, in the response) of the fresh tokens that differ most."""
    trainer, engine, mask, lag, sample = _joined(batch, log_probs, version)
    gaps = torch.where(mask & (lag == 0), (trainer - engine).abs(), -1.0)
    largest = gaps.topk(min(SHOWN_TOKENS, len(gaps)))
    chosen = largest.indices[largest.values >= 0].tolist()
    places = list(log_probs)
    return [(places[sample[i]], i - int((sample < sample[i]).sum())) for i in chosen]


def _describe(batch: RolloutBatch, position: int, t: int, trainer: float) -> str:
    prompt = len(batch["tokens"][position]) - batch["response_lengths"][position]
    version = int(batch["versions"][position][t]) if "versions" in batch else -1
    return (
        f"  sample {batch['sample_indices'][position]}, response position {t}: token "
        f"{batch['tokens'][position][prompt + t]} "
        f"of {f'version {version}' if version >= 0 else 'a version that was not recorded'}, engine "
        f"{batch['rollout_log_probs'][position][t]:.4f}, trainer {trainer:.4f}"
    )
