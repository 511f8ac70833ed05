"""Compares a trainer's outcome with the reference: errors by kind, and what diverges first."""

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
    """Relative errors by column, and the first thing that diverges in the order of computation, if any."""

    errors: dict[str, float]
    first: str | None


def compare(reference: CaseOutcome, found: CaseOutcome, tolerance: float) -> Verdict:
    """Everything that must agree within `tolerance`; weights that were only read must be the same bits."""
    expected = _gradients(reference)
    # A gradient that is zero by mathematics, such as of a bias of keys, is noise: held against the others.
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
        # Of a distribution that is nearly certain it is a difference of large numbers.
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
    """Names the earliest cause: a weight that came in wrong, else an activation, else a gradient."""
    if EXACT in wrong:
        tensor = next(name for name, differing in trip.items() if differing)
        if tensor.startswith(f"{_BUFFER} "):
            return f"{tensor} does not have the values that transformers computes for it"
        if tensor not in found.before:
            return f"tensor {tensor} is missing from the trainer's export"
        if tensor not in reference.before:
            return f"tensor {tensor} is no tensor of the model"
        changed = f"{trip[tensor]} of {reference.before[tensor].numel()} elements"
        return f"tensor {tensor}: {changed} changed between load and export"
    if {"log-probs", "entropy"} & set(wrong):
        part = first_activation(reference, found, tolerance)
        return part or "the output layer: activations agree, log-probs do not"
    name = next((name for name, error in gradients.items() if not error <= tolerance), None)
    return f"gradient of {name}" if name else f"{wrong[0]}: passes agree, the optimizer step does not"


def first_activation(reference: CaseOutcome, found: CaseOutcome, tolerance: float) -> str | None:
    """The first layer whose output differs, and the first part inside it that does."""
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
    """The names in the reference's order; a tied output matrix may be exported once more."""
    extra = [name for name in found.before if name not in reference.before and name != "lm_head.weight"]
    return [*reference.before, *extra]


def _differing(expected: Tensor | None, found: Tensor | None) -> int:
    if expected is None or found is None or expected.shape != found.shape:
        return 1
    return int((expected != found.to(expected.dtype)).sum())


def _gradients(outcome: CaseOutcome) -> dict[str, Tensor]:
    """The gradient of each weight: what one step of SGD took off it, divided by the rate."""
    return {name: (outcome.before[name] - after) / LEARNING_RATE for name, after in outcome.after.items()}


def _of_documents(expected: list[Tensor], found: list[Tensor], floor: float = 1e-3) -> float:
    return _largest(_relative(a, b, floor) for a, b in zip(expected, found, strict=True))


def _rounding(weight: Tensor) -> float:
    """What a step in fp32 may round off a weight, as a gradient: small ones of large weights are lost."""
    return 2 * torch.finfo(torch.float32).eps * float(weight.abs().max()) / LEARNING_RATE


def _by_tensor(
    expected: dict[str, Tensor],
    found: dict[str, Tensor],
    floor: float = 1e-3,
    slack: Callable[[str], float] = lambda _name: 0.0,
) -> dict[str, float]:
    return {n: _relative(t, found[n], floor, slack(n)) for n, t in expected.items() if n in found}


def _relative(expected: Tensor, found: Tensor, floor: float = 1e-3, slack: float = 0.0) -> float:
    """The largest difference divided by the largest value; NaN where a value is missing."""
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
