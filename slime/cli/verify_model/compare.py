"""Compares a trainer's outcome with the reference, finds what diverges first, and prints the table."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from slime.cli.verify_model import layer_capture
from slime.cli.verify_model.cases import LEARNING_RATE, CaseOutcome

COLUMNS = ("log-probs", "entropy", "loss", "grad norm", "gradients", "SGD step", "round trip")
EXACT = "round trip"
_BUFFER = "buffer"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Relative errors by column, and what diverges first in the order of computation; None: nothing."""

    errors: dict[str, float]
    first: str | None


def compare(reference: CaseOutcome, found: CaseOutcome, tolerance: float) -> Verdict:
    """Compare all numbers within `tolerance`; weights that were only loaded must be bit-identical."""
    expected = _gradients(reference)
    # A gradient that is zero in theory (bias of keys) is noise: compare it with the largest one.
    floor = 1e-2 * max((float(tensor.abs().max()) for tensor in expected.values()), default=1.0)
    gradients = _by_tensor(expected, _gradients(found), floor, lambda n: _rounding(reference.before[n]))
    weights = _by_tensor(reference.after, found.after)
    trip = {
        name: _differing(reference.before.get(name), found.before.get(name))
        for name in _names(reference, found)
    }
    if found.buffers:
        theirs = reference.buffers
        trip |= {f"{_BUFFER} {n}": _differing(b, found.buffers.get(n)) for n, b in theirs.items()}
    errors = {
        "log-probs": _of_documents(reference.log_probs, found.log_probs),
        # For a nearly certain distribution it is a difference of large numbers.
        "entropy": _of_documents(reference.entropy, found.entropy, floor=0.1),
        "loss": abs(found.loss - reference.loss) / max(abs(reference.loss), 1.0),
        "grad norm": abs(found.grad_norm - reference.grad_norm) / reference.grad_norm,
        "gradients": _largest(gradients.values()),
        "SGD step": _largest(weights.values()),
        EXACT: float(sum(trip.values())),
    }
    wrong = [name for name, error in errors.items() if not error <= (0.0 if name == EXACT else tolerance)]
    if not wrong:
        return Verdict(errors, None)
    return Verdict(errors, _first_divergence(reference, found, wrong, trip, gradients, tolerance))


def _first_divergence(
    reference: CaseOutcome,
    found: CaseOutcome,
    wrong: list[str],
    trip: dict[str, int],
    gradients: dict[str, float],
    tolerance: float,
) -> str:
    """Name the earliest cause: a wrongly loaded weight, else an activation, else a gradient."""
    if EXACT in wrong:
        tensor = next(name for name, differing in trip.items() if differing)
        if tensor.startswith(f"{_BUFFER} "):
            return f"{tensor} does not have the values that transformers computes for it"
        if tensor not in found.before:
            return f"tensor {tensor} is missing from the trainer's export"
        if tensor not in reference.before:
            return f"tensor {tensor} does not belong to the model"
        changed = f"{trip[tensor]} of {reference.before[tensor].numel()} elements"
        return f"tensor {tensor}: {changed} changed between load and export"
    if {"log-probs", "entropy"} & set(wrong):
        part = first_activation(reference, found, tolerance)
        return part or "the output layer: activations agree, log-probs do not"
    name = next((name for name, error in gradients.items() if not error <= tolerance), None)
    return f"gradient of {name}" if name else f"{wrong[0]}: passes agree, the optimizer step does not"


def first_activation(reference: CaseOutcome, found: CaseOutcome, tolerance: float) -> str | None:
    """Return the first layer whose output differs, and the first part of it that does."""
    layers = sorted({layer for _, layer, _ in reference.activations})
    for layer in layers:
        if not _differs(reference, found, layer, layer_capture.OUTPUT, tolerance):
            continue
        differing = (p for p in layer_capture.PARTS if _differs(reference, found, layer, p, tolerance))
        part = next(differing, layer_capture.OUTPUT)
        weights = [n for n in reference.before if f"layers.{layer}.{part}." in n]
        beside = f" (weights {', '.join(weights[:6])})" if weights else ""
        return f"layer {layer}, {part}{beside}"
    return None


def _differs(reference: CaseOutcome, found: CaseOutcome, layer: int, part: str, tolerance: float) -> bool:
    keys = [key for key in reference.activations if key[1:] == (layer, part) and key in found.activations]
    return any(not _relative(reference.activations[key], found.activations[key]) <= tolerance for key in keys)


def _names(reference: CaseOutcome, found: CaseOutcome) -> list[str]:
    """Return all tensor names in the reference's order; a tied output matrix may be exported twice."""
    extra = [name for name in found.before if name not in reference.before and name != "lm_head.weight"]
    return [*reference.before, *extra]


def _differing(expected: Tensor | None, found: Tensor | None) -> int:
    if expected is None or found is None or expected.shape != found.shape:
        return 1
    return int((expected != found.to(expected.dtype)).sum())


def _gradients(outcome: CaseOutcome) -> dict[str, Tensor]:
    """Compute the gradient of each weight from its change in one step of SGD."""
    return {name: (outcome.before[name] - after) / LEARNING_RATE for name, after in outcome.after.items()}


def _of_documents(expected: list[Tensor], found: list[Tensor], floor: float = 1e-3) -> float:
    return _largest(_relative(a, b, floor) for a, b in zip(expected, found, strict=True))


def _rounding(weight: Tensor) -> float:
    """Return the rounding error of an fp32 weight update, as a gradient."""
    return 2 * torch.finfo(torch.float32).eps * float(weight.abs().max()) / LEARNING_RATE


def _by_tensor(
    expected: dict[str, Tensor],
    found: dict[str, Tensor],
    floor: float = 1e-3,
    slack: Callable[[str], float] = lambda _name: 0.0,
) -> dict[str, float]:
    return {n: _relative(t, found[n], floor, slack(n)) for n, t in expected.items() if n in found}


def _relative(expected: Tensor, found: Tensor, floor: float = 1e-3, slack: float = 0.0) -> float:
    """Return the largest difference divided by the largest value; NaN stays NaN."""
    if expected.shape != found.shape:
        return math.inf
    scale = max(float(expected.abs().max()), floor)
    apart = float((expected.double() - found.double()).abs().max())
    # Not max(): it would drop NaN.
    return apart / scale if not apart <= slack else 0.0


def _largest(values: Iterable[float]) -> float:
    listed = torch.tensor([*values], dtype=torch.float64)
    # max keeps NaN, which no tolerance admits.
    return float(listed.max()) if len(listed) else math.nan


_NAME, _WIDTH = 20, 11


class Table:
    """Prints one line per trainer as soon as it is known, and keeps problems for the end."""

    def __init__(self) -> None:
        self.rows = 0
        self.problems: list[tuple[str, str]] = []  # (trainer and layout, reason)
        head = "".join(f"{name:>{_WIDTH}}" for name in COLUMNS)
        print(f"\n{'trainer':<{_NAME}}{'ranks':>6}{head}{'seconds':>9}  result", flush=True)

    def compared(self, name: str, ranks: int, seconds: float, verdict: Verdict) -> None:
        cells = [_exact(verdict.errors[c]) if c == EXACT else f"{verdict.errors[c]:.1e}" for c in COLUMNS]
        self._line(name, ranks, cells, seconds, "same" if verdict.first is None else "DIVERGES")
        if verdict.first is not None:
            self.problems.append((name, verdict.first))

    def served(self, name: str, seconds: float, worst: float, tolerance: float) -> None:
        good = worst <= tolerance
        cells = [f"{worst:.1e}", *["-"] * (len(COLUMNS) - 1)]
        self._line(name, 1, cells, seconds, "same" if good else "DIVERGES")
        if not good:
            self.problems.append((name, f"the log-probs of tokens it drew: off by {worst:.2g}"))

    def failed(self, name: str, ranks: int, seconds: float, reason: str) -> None:
        self._line(name, ranks, ["-"] * len(COLUMNS), seconds, "FAILED")
        self.problems.append((name, f"did not finish: {reason}"))

    def _line(self, name: str, ranks: int, cells: list[str], seconds: float, result: str) -> None:
        self.rows += 1
        shown = "".join(f"{cell:>{_WIDTH}}" for cell in cells)
        print(f"{name:<{_NAME}}{ranks:>6}{shown}{seconds:>9.1f}  {result}", flush=True)


def _exact(differing: float) -> str:
    return "exact" if not differing else f"{int(differing)} differ"
