"""Compares the outcome of a trainer with the reference, finds the first difference, and prints the table."""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from slime.cli.verify_model.cases import LEARNING_RATE, CaseOutcome

COLUMNS = ("log-probs", "entropy", "loss", "grad norm", "gradients", "SGD step", "round trip")
EXACT = "round trip"
_BUFFER = "buffer "


@dataclass(frozen=True, slots=True)
class Verdict:
    """Relative errors by column, and what diverges first in the order of computation; None: nothing."""

    errors: dict[str, float]
    first: str | None


def compare(reference: CaseOutcome, found: CaseOutcome, tolerance: float) -> Verdict:
    """Compare all numbers within `tolerance`; weights that were only loaded must be bit-identical."""
    expected, own = _gradients(reference), _gradients(found)
    # A gradient that is zero in theory (bias of keys) is noise: it is compared with the largest one.
    floor = 1e-2 * max((float(tensor.abs().max()) for tensor in expected.values()), default=1.0)
    gradients = {
        name: _relative(gradient, own[name], floor, _rounding(reference.before[name]))
        for name, gradient in expected.items()
        if name in own
    }
    # A tied output matrix may be exported twice.
    names = [
        *reference.before,
        *(n for n in found.before if n not in reference.before and n != "lm_head.weight"),
    ]
    trip = {name: _differing(reference.before.get(name), found.before.get(name)) for name in names}
    if found.buffers:
        theirs = reference.buffers
        trip |= {_BUFFER + name: _differing(b, found.buffers.get(name)) for name, b in theirs.items()}
    after = (_relative(t, found.after[name]) for name, t in reference.after.items() if name in found.after)
    errors = {
        "log-probs": _largest(map(_relative, reference.log_probs, found.log_probs)),
        # The entropy of a nearly certain distribution is a difference of large numbers.
        "entropy": _largest(
            _relative(a, b, 0.1) for a, b in zip(reference.entropy, found.entropy, strict=True)
        ),
        "loss": abs(found.loss - reference.loss) / max(abs(reference.loss), 1.0),
        "grad norm": abs(found.grad_norm - reference.grad_norm) / reference.grad_norm,
        "gradients": _largest(gradients.values()),
        "SGD step": _largest(after),
        EXACT: float(sum(trip.values())),
    }
    wrong = [name for name, error in errors.items() if not error <= (0.0 if name == EXACT else tolerance)]
    if not wrong:
        return Verdict(errors, None)
    if EXACT in wrong:
        return Verdict(errors, _changed_tensor(reference, found, trip))
    if {"log-probs", "entropy"} & set(wrong):
        return Verdict(errors, f"the forward pass: its {wrong[0]} differ")
    wrong_gradients = [name for name, error in gradients.items() if not error <= tolerance]
    passes = f"{wrong[0]}: passes agree, the optimizer step does not"
    return Verdict(errors, f"gradient of {wrong_gradients[0]}" if wrong_gradients else passes)


def _changed_tensor(reference: CaseOutcome, found: CaseOutcome, trip: dict[str, int]) -> str:
    """Describe the first tensor that load and export changed."""
    name = next(name for name, differing in trip.items() if differing)
    if name.startswith(_BUFFER):
        return f"{name} does not have the values that transformers computes for it"
    if name not in found.before:
        return f"tensor {name} is missing from the trainer's export"
    if name not in reference.before:
        return f"tensor {name} does not belong to the model"
    total = reference.before[name].numel()
    return f"tensor {name}: {trip[name]} of {total} elements changed between load and export"


def _differing(expected: Tensor | None, found: Tensor | None) -> int:
    if expected is None or found is None or expected.shape != found.shape:
        return 1
    return int((expected != found.to(expected.dtype)).sum())


def _gradients(outcome: CaseOutcome) -> dict[str, Tensor]:
    """Compute the gradient of each weight from its change in one step of SGD."""
    return {name: (outcome.before[name] - after) / LEARNING_RATE for name, after in outcome.after.items()}


def _rounding(weight: Tensor) -> float:
    """Return the rounding error of an fp32 weight update, as a gradient."""
    return 2 * torch.finfo(torch.float32).eps * float(weight.abs().max()) / LEARNING_RATE


def _relative(expected: Tensor, found: Tensor, floor: float = 1e-3, slack: float = 0.0) -> float:
    """Return the largest difference divided by the largest value; NaN stays NaN."""
    if expected.shape != found.shape:
        return math.inf
    scale = max(float(expected.abs().max()), floor)
    apart = float((expected.double() - found.double()).abs().max())
    # torch's max keeps NaN; Python's max() would drop it.
    return apart / scale if not apart <= slack else 0.0


def _largest(values: Iterable[float]) -> float:
    listed = torch.tensor([*values], dtype=torch.float64)
    # max keeps NaN, which no tolerance admits.
    return float(listed.max()) if len(listed) else math.nan


class Table:
    """Prints one line per trainer as soon as it is known, and keeps problems for the end."""

    def __init__(self, tolerance: float) -> None:
        self.rows, self._tolerance = 0, tolerance
        self.problems: list[str] = []
        head = "".join(f"{name:>11}" for name in COLUMNS)
        print(f"\n{'trainer':<20}{'ranks':>6}{head}{'seconds':>9}  result", flush=True)

    def compared(
        self, name: str, ranks: int, started: float, expected: CaseOutcome, found: CaseOutcome
    ) -> None:
        verdict = compare(expected, found, self._tolerance)
        first = None if verdict.first is None else f"diverges first at {verdict.first}"
        self._add(name, ranks, started, verdict.errors, first)

    def failed(self, name: str, ranks: int, started: float, error: Exception) -> None:
        self._add(name, ranks, started, {}, f"did not finish: {error}")

    def _add(
        self, name: str, ranks: int, started: float, errors: dict[str, float], problem: str | None
    ) -> None:
        cells = {column: f"{error:.1e}" for column, error in errors.items()}
        if EXACT in errors:
            cells[EXACT] = f"{errors[EXACT]:.0f} differ" if errors[EXACT] else "exact"
        shown = "".join(f"{cells.get(column, '-'):>11}" for column in COLUMNS)
        result = "same" if problem is None else "DIVERGES" if errors else "FAILED"
        seconds = time.monotonic() - started
        print(f"{name:<20}{ranks:>6}{shown}{seconds:>9.1f}  {result}", flush=True)
        self.rows += 1
        if problem is not None:
            self.problems.append(f"{name} {problem}")
