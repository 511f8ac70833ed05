"""Collects per-token terms of a training step, for checks and for the report of a non-finite step."""

import math
from pathlib import Path

import torch
from torch import Tensor

from slime.backends.base import MicroBatch, NonFiniteStepError, StepStats
from slime.backends.shared.microbatch import split_by_sample
from slime.backends.shared.trainer_base import TrainBackend
from slime.record.additions import BINS
from slime.utils.errors import RunStopped
from slime.utils.types import RolloutBatch

ON_POLICY_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-3}


class TokenWatch:
    """Per-token terms of one optimizer step's micro-batches, detached, on the device that computed them."""

    def __init__(self) -> None:
        self._records: list[tuple[MicroBatch, dict[str, Tensor]]] = []

    def record(self, mb: MicroBatch, terms: dict[str, Tensor]) -> None:
        """Remember terms [R] of the micro-batch's response tokens."""
        self._records.append((mb, {name: value.detach() for name, value in terms.items()}))

    def histograms(self) -> dict[str, list[int]]:
        """Return the number of trained tokens in each bin of `BINS`; values beyond them count at the ends."""
        found = {}
        records = [(mb.loss_mask != 0, terms) for mb, terms in self._records if mb.positions]
        for name, (low, high, count) in BINS.items() if records else ():
            term = "ppo_kl" if name == "ratio" else name
            values = torch.cat([terms[term][trained] for trained, terms in records]).float()
            values = torch.exp(-values) if name == "ratio" else values
            places = ((values.nan_to_num(low) - low) * (count / (high - low))).clamp(0, count - 1).long()
            found[name] = torch.bincount(places, minlength=count).tolist()
        return found

    def by_sample(self, *only: str) -> dict[int, dict[str, Tensor]]:
        """Return position in the rank's batch -> its terms (only those in `only`), each [R_i] on the CPU."""
        samples: dict[int, dict[str, Tensor]] = {}
        for mb, terms in self._records:
            for name in only or terms:
                # zip stops at once for a micro-batch of weight zero: it has no positions.
                parts = split_by_sample(terms[name].cpu(), mb)
                for position, part in zip(mb.positions, parts, strict=False):
                    samples.setdefault(position, {})[name] = part
        return samples

    def log_probs(self) -> dict[int, Tensor]:
        """Return position in the rank's batch -> the trainer's log-probs [R_i] on the CPU."""
        return {position: terms["log_probs"] for position, terms in self.by_sample("log_probs").items()}


def check_on_policy(backend: TrainBackend, stats: StepStats, num_tokens: float) -> None:
    """Check that all ratios are 1 in the first step, on the weights that recorded the old log-probs."""
    counted = stats.metrics["_counted"]
    if not counted:
        return
    metrics = {name: stats.metrics[name] / counted for name in ("ppo_kl", "ppo_kl_abs", "ois")}
    limit = ON_POLICY_LIMITS.get(backend.compute_dtype, 1e-3)
    name = "ppo_kl_abs"
    if backend.compute_dtype != torch.float32:
        # Two passes may differ in the last bits of a token: only the mean must be 1.
        name = "ppo_kl"
        limit += 3.0 * metrics["ppo_kl_abs"] / math.sqrt(max(num_tokens, 1.0))
    if abs(metrics[name]) > limit or abs(metrics["ois"] - 1.0) > 10 * limit:
        raise RunStopped(
            f"the first optimizer step on new samples has {name} {metrics[name]:.3g} and a mean ratio of "
            f"{metrics['ois']:.6f}, although the policy has not changed since its log-probs were recorded "
            f"(limit {limit:g}). The two passes disagree: dropout, another precision, or kernels that depend "
            "on the batch. --skip-on-policy-check trains on regardless."
        )


def save_nonfinite(
    backend: TrainBackend,
    folder: Path,
    name: str,
    batch: RolloutBatch,
    positions: list[int],
    watch: TokenWatch,
    error: NonFiniteStepError,
) -> str:
    """Save the samples that broke a step with their terms; returns a sentence that names them and the file.

    `name` is that of the step, in the file's name; `positions` are the step's samples in the batch. If no
    rank has a term that is not finite (the gradient overflowed later, or the loss is a user's own), each rank
    saves all its samples.
    """
    samples: dict[int, dict[str, Tensor]] = {position: {} for position in positions} | watch.by_sample()
    broken: dict[int, list[str]] = {}
    for position, terms in samples.items():
        mask = batch["loss_masks"][position]
        sums = {term: values[mask != 0].double().sum().item() for term, values in terms.items()}
        names = [term for term, total in sums.items() if not math.isfinite(total)]
        if names:
            broken[position] = names
    anywhere = int(backend.sum_over_ranks(torch.tensor([len(broken)], dtype=torch.float64)))
    if anywhere and not broken:
        return f"{anywhere} samples of other ranks have such terms; these ranks saved them in {folder}."
    chosen = broken or {position: [] for position in samples}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}_rank_{backend.layout.dp_rank}.pt"
    rows = [
        {
            "sample_index": batch["sample_indices"][p],
            "nonfinite": names,
            "tokens": batch["tokens"][p],
            "loss_mask": batch["loss_masks"][p],
            "reward": batch["rewards"][p],
            "terms": samples[p],
        }
        for p, names in chosen.items()
    ]
    torch.save({"step": name, "error": str(error), "samples": rows}, path)
    if not broken:
        held = f"the {len(rows)} samples of this rank are in {path}."
        return f"All recorded per-token terms are finite; {held}"
    shown = list(broken.items())[:8]
    named = ", ".join(f"{batch['sample_indices'][p]} ({', '.join(names)})" for p, names in shown)
    return f"Samples with such terms: {named}{' ...' if len(rows) > 8 else ''}; saved in {path}."
