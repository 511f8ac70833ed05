"""Tests whether a packed attention kernel agrees with plain attention before a run relies on it.

Whether a fast kernel is correct depends on the versions of torch and packages and on the device, and some
were wrong in one pass only. A trial costs a second; a wrong gradient costs a run.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from slime.backends.attention.attention_operator import NotInstalled, Operator
from slime.utils.machine.accelerator import gpu

T = TypeVar("T")
logger = logging.getLogger(__name__)

# Lengths on both sides of the kernels' special cases, with the long document between others.
_LENGTHS = (40, 1100, 24, 1)
_HEADS = 32  # at least: with few heads a document of 1,100 tokens counts as short
_TOLERANCE = 0.02  # of the norm: 16-bit rounding is a tenth of it, a wrong mask or scale many times as much


def unobserved(try_out: Callable[[], T]) -> T:
    """Call `try_out` with gradients enabled on a thread of its own and return its result.

    The first pass of a model may be one whose layers are recomputed: their hooks count every tensor that is
    saved, and would miss those of a trial when the layer runs again.
    """

    def run() -> T:
        if device is None:
            return try_out()
        with gpu.device(device):
            return try_out()

    device = gpu.current_device() if gpu.is_available() else None
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def first_right(
    operators: dict[str, Operator], ratio: int, width: int, device: torch.device
) -> Operator | None:
    """Return the first operator that agrees with plain attention, for `ratio` query heads per key head."""
    for name, operator in operators.items():
        reason = why_wrong(operator, ratio, width, device)
        if reason is None:
            logger.info("Attention with heads of size %d uses %s", width, name)
            return operator
        if reason:
            logger.warning("Attention with heads of size %d does not use %s, because %s", width, name, reason)
    return None


def why_wrong(operator: Operator, ratio: int, width: int, device: torch.device) -> str | None:
    """Return why an operator must not be used: it fails on a small batch, or differs from the plain one.

    None if both passes agree; an empty reason if its package is not installed.
    """
    query, key, value = parts = _inputs(ratio, width, device)
    bounds = torch.tensor([0, *_LENGTHS]).cumsum(0)
    scale = 1.5 * width**-0.5  # an unusual scale: an operator that ignores it must be detected

    def found() -> Sequence[Tensor]:
        out, _ = operator(query, key, value, bounds.to(device, torch.int32), bounds, scale)
        return out, *torch.autograd.grad(out.float().square().sum(), parts)

    def expected() -> Sequence[Tensor]:
        documents = zip(*(torch.split(x, list(_LENGTHS)) for x in parts), strict=True)
        out = torch.cat([_plain(q, k, v, scale) for q, k, v in documents])
        return out, *torch.autograd.grad(out.float().square().sum(), parts)

    return why_apart(found, expected)


def why_apart(found: Callable[[], Sequence[Tensor]], expected: Callable[[], Sequence[Tensor]]) -> str | None:
    """Compare outputs and gradients of query, key and value; the results are those of `why_wrong`."""
    try:
        results = found()
    except NotInstalled:
        return ""
    except Exception as error:  # any exception of a package on an unsupported shape or device is the reason
        return f"it failed on a small batch ({type(error).__name__}: {error})"
    names = ("output", "gradient of the query", "gradient of the key", "gradient of the value")
    for name, a, b in zip(names, results, expected(), strict=True):
        apart = ((a.float() - b.float()).norm() / b.float().norm()).item()
        if not apart < _TOLERANCE:
            return f"its {name} is off by {apart:.2g} of the norm on a small batch"
    return None


def _inputs(ratio: int, width: int, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    groups = -(-_HEADS // ratio)
    shapes = [(sum(_LENGTHS), heads, width) for heads in (ratio * groups, groups, groups)]
    return [
        torch.randn(shape, generator=generator).to(device, torch.bfloat16).requires_grad_()
        for shape in shapes
    ]


def _plain(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    query, key, value = (x.float().transpose(0, 1) for x in (query, key, value))
    key, value = (x.repeat_interleave(query.shape[0] // x.shape[0], dim=0) for x in (key, value))
    mask = torch.ones(query.shape[1], query.shape[1], dtype=torch.bool, device=query.device).tril()
    scores = (query @ key.transpose(1, 2) * scale).masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(0, 1).bfloat16()
