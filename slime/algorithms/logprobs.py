"""Log-probs and entropy of chosen tokens from hidden states and output matrix, a block of logits at a time.

The full [tokens, vocabulary] logits never exist, unless memory is given to keep them. Forward goes over
blocks of tokens and keeps three numbers per token. Backward goes over blocks of the vocabulary, so that each
block's part of the weight gradient is finished in one matrix product with full-precision accumulation, and
computes that block's logits again; kept logits save that product and become their own gradient in place. On
CUDA, Triton kernels do this; elsewhere plain torch, in at least fp32. Logits are restricted to the nucleus
and divided by the temperature that the engine sampled with.
"""

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from slime.algorithms.nucleus import Nucleus

# Elements of one block of logits: 128 Mi x 2 bytes = 256 MiB in bf16, and half as many in fp32.
MAX_CHUNK_ELEMENTS = 1 << 26
_FUSED_ELEMENTS = 1 << 27
_CACHED_ELEMENTS = 1 << 20  # size of a block that stays in a CPU's cache


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _block_size(count: int, other: int, chunk_size: int, fused: bool) -> int:
    """Return the rows (or columns) of a block, for logits of `count` rows (columns) by `other`."""
    if chunk_size > 0:
        return min(count, chunk_size)
    size = max(1, min(count, (_FUSED_ELEMENTS if fused else MAX_CHUNK_ELEMENTS) // max(other, 1)))
    # A matrix product likes sizes that are multiples of its tile.
    return size if size == count or size < 256 else size // 256 * 256


@functools.cache
def _kernels() -> ModuleType | None:
    """Return the Triton kernels, or None on a machine without Triton."""
    try:
        # Triton exists only where torch was built for an accelerator.
        from slime.algorithms import logprob_kernels
    except ImportError:
        return None
    return logprob_kernels


def _kernels_for(tensor: Tensor) -> ModuleType | None:
    return _kernels() if tensor.is_cuda and tensor.dtype != torch.float64 else None


def _statistics(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    log_sums: Tensor,
    chosen: Tensor,
    entropy: Tensor | None,
) -> None:
    """Plain torch version of the kernel `row_statistics`; the logits stay as they are."""
    for rows in _cached_rows(logits):
        part = logits[rows].to(log_sums.dtype)
        part = part if temperature == 1.0 else part / temperature
        top = part.amax(dim=-1, keepdim=True)
        lower = part - top
        masses = lower.exp()
        total = masses.sum(dim=-1)
        logs = total.log()
        log_sums[rows] = logs + top[:, 0]
        chosen[rows] = lower.gather(1, targets[rows, None]).squeeze(1) - logs
        if entropy is not None:
            entropy[rows] = logs - torch.linalg.vecdot(masses, lower) / total


def _cached_rows(logits: Tensor) -> list[slice]:
    """Return the rows that stay in a CPU's cache over several operations; on other devices all of them."""
    size = max(1, _CACHED_ELEMENTS // max(1, logits.shape[1])) if logits.device.type == "cpu" else len(logits)
    return [slice(first, first + size) for first in range(0, len(logits), size)]


def _gradient(
    logits: Tensor,
    targets: Tensor,
    first: int,
    temperature: float,
    log_sums: Tensor,
    grad_chosen: Tensor,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Plain torch version of the kernel `logit_gradient_`: the logits become their gradient."""
    own = targets - first
    inside = grad_chosen * ((own >= 0) & (own < logits.shape[1]))
    own = own.clamp(0, logits.shape[1] - 1)
    for rows in _cached_rows(logits):
        log_dist = logits[rows].to(log_sums.dtype)
        log_dist = log_dist if temperature == 1.0 else log_dist / temperature
        log_dist = log_dist - log_sums[rows, None]
        # d log p(target) / d logits = onehot - p;  d H / d logits = -p (log p + H)
        if grad_entropy is not None and entropy is not None:
            probs = log_dist.exp()
            grad = log_dist.add_(entropy[rows, None]).mul_(probs).mul_(-grad_entropy[rows, None])
            grad.addcmul_(probs, grad_chosen[rows, None], value=-1)
        else:
            grad = log_dist.exp_().mul_(-grad_chosen[rows, None])
        grad.scatter_add_(1, own[rows, None], inside[rows, None])
        logits[rows] = grad if temperature == 1.0 else grad.div_(temperature)
    return logits


@functools.cache
def _adds_in_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether this torch multiplies 16-bit matrices into an fp32 sum on the device."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    a = torch.ones(16, 16, device=device, dtype=dtype)
    try:
        total = torch.addmm(torch.ones(16, 16, device=device), a, a, out_dtype=torch.float32)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return total.dtype == torch.float32 and total[0, 0].item() == 17.0


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return total + a @ b with `total` in fp32 (fp64), in place where possible."""
    if a.dtype == total.dtype:
        return total.addmm_(a, b)
    if _adds_in_fp32(a.device, a.dtype):
        return torch.addmm(total, a, b, out_dtype=total.dtype)
    return total.add_(a @ b)


class _ChunkedLogProbs(torch.autograd.Function):
    """Forward and hand-written backward of log-prob and entropy over blocks of logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        with_entropy: bool,
        keep: bool,
        nucleus: Nucleus | None,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor | None]:
        kernels = _kernels_for(hidden)
        num_tokens, dtype = hidden.shape[0], _compute_dtype(hidden.dtype)
        log_probs = torch.empty(num_tokens, dtype=dtype, device=hidden.device)
        log_sums = torch.empty_like(log_probs)
        entropy = torch.empty_like(log_probs) if with_entropy else None
        size = _block_size(num_tokens, weight.shape[0], chunk_size, kernels is not None)
        kept = hidden.new_empty(num_tokens, weight.shape[0]) if keep else None
        for start in range(0, num_tokens, size):
            rows = slice(start, start + size)
            logits = torch.mm(hidden[rows], weight.T, out=None if kept is None else kept[rows])
            if softcap is not None:
                logits.div_(softcap).tanh_().mul_(softcap)
            if nucleus is not None:
                nucleus.rows(start, min(start + size, num_tokens)).cut_(logits, targets[rows])
            statistics = _statistics if kernels is None else kernels.row_statistics
            outputs = log_sums[rows], log_probs[rows], None if entropy is None else entropy[rows]
            statistics(logits, targets[rows], temperature, *outputs)
        ctx.save_for_backward(hidden, weight, targets, log_sums, entropy)
        ctx.temperature, ctx.chunk_size, ctx.nucleus, ctx.softcap = temperature, chunk_size, nucleus, softcap
        ctx.kept = kept  # not a saved tensor: backward overwrites and releases it
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_sums, entropy = ctx.saved_tensors
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 9
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_sums)
        kernels = _kernels_for(hidden)
        gradient = kernels.logit_gradient_ if kernels is not None else _gradient
        grad_entropy = None if grad_entropy is None else grad_entropy.contiguous()
        grads = grad_log_probs.contiguous(), entropy, grad_entropy
        if ctx.kept is not None:
            logits, ctx.kept = ctx.kept, None
            grad = gradient(logits, targets, 0, ctx.temperature, log_sums, *grads)
            return grad @ weight, grad.T @ hidden if ctx.needs_input_grad[1] else None, *(None,) * 7
        grad_hidden = torch.zeros(hidden.shape, dtype=log_sums.dtype, device=hidden.device)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        vocab = weight.shape[0]
        size = _block_size(vocab, hidden.shape[0], -1, kernels is not None)
        if ctx.chunk_size > 0:
            size = max(1, min(size, ctx.chunk_size * vocab // hidden.shape[0]))
        for first in range(0, vocab, size):
            part = weight[first : first + size]
            logits = hidden @ part.T
            slope = None
            if ctx.softcap is not None:
                share = logits.div_(ctx.softcap).tanh_()
                slope = 1 - share.to(log_sums.dtype).square()
                logits = share.mul_(ctx.softcap)
            if ctx.nucleus is not None:
                ctx.nucleus.cut_(logits, targets, first)
            grad = gradient(logits, targets, first, ctx.temperature, log_sums, *grads)
            grad = grad if slope is None else grad * slope.to(grad.dtype)
            grad_hidden = _add_product(grad_hidden, grad, part)
            if grad_weight is not None:
                torch.mm(grad.T, hidden, out=grad_weight[first : first + size])
        return grad_hidden.to(hidden.dtype), grad_weight, *(None,) * 7


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = -1,
    with_entropy: bool = False,
    memory_gib: float = 0.0,
    nucleus: Nucleus | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [T] of `targets` [T] and maybe entropies [T] of softmax(hidden @ weight.T / temperature).

    `hidden` is [T, H], `weight` [V, H]. Results are fp32 (fp64 for fp64 inputs) and differentiable in both.
    `chunk_size` counts tokens; -1 picks it so that one block of logits stays within 256 MiB. Logits that fit
    into `memory_gib` are kept for the backward pass. `nucleus`: the ids of each softmax, for T rows; None:
    all ids. `softcap`: logits are capped by it before they are divided by the temperature.
    """
    if hidden.shape[0] == 0:
        # Keeps the graph connected: a rank without tokens still has to take part in the gradient reduction.
        zero = hidden.sum(-1).to(_compute_dtype(hidden.dtype)) + 0.0 * weight[0, 0]
        return zero, zero if with_entropy else None
    size = hidden.shape[0] * weight.shape[0]
    # On a CPU, backward needs memory for one block anyway, so a single block is kept from forward.
    is_block = not hidden.is_cuda and chunk_size <= 0 and size <= MAX_CHUNK_ELEMENTS
    keep = (
        (is_block or size * hidden.element_size() <= memory_gib * 2**30)
        and softcap is None  # its slope would have to be kept, too
        and torch.is_grad_enabled()
        and (hidden.requires_grad or weight.requires_grad)
    )
    return _ChunkedLogProbs.apply(
        hidden, weight, targets, float(temperature), chunk_size, with_entropy, keep, nucleus, softcap
    )


def calculate_log_probs_and_entropy(
    logits: Tensor,
    tokens: Tensor,
    tp_group: Any = None,
    with_entropy: bool = False,
    chunk_size: int = -1,
    log_prob_keep_mask: Tensor | None = None,
    with_entropy_grad: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [T, 1] and entropies [T] of `tokens` under existing `logits` [T, V]; shapes of THUDM/slime.

    `log_prob_keep_mask` [T, V] renormalises the log-prob over the kept tokens (the sampled token is always
    kept); the entropy stays that of the full distribution. `tp_group` must be None or of size one here.
    """
    if tp_group is not None and tp_group.size() > 1:
        raise ValueError("calculate_log_probs_and_entropy: a vocabulary sharded over ranks is not supported.")
    rows = chunk_size if chunk_size > 0 else max(1, logits.shape[0])
    empty = logits.new_zeros(0, dtype=_compute_dtype(logits.dtype))
    log_probs, entropies = [empty[:, None]], [empty]
    for start in range(0, logits.shape[0], rows):
        part = logits[start : start + rows].to(empty.dtype)
        target = tokens[start : start + rows, None]
        kept = part
        if log_prob_keep_mask is not None:
            keep = log_prob_keep_mask[start : start + rows].scatter(1, target, True)
            kept = part.masked_fill(~keep, float("-inf"))
        log_probs.append(kept.gather(1, target) - torch.logsumexp(kept, dim=-1, keepdim=True))
        if with_entropy:
            log_dist = torch.log_softmax(part if with_entropy_grad else part.detach(), dim=-1)
            entropies.append(-(log_dist.exp() * log_dist).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies) if with_entropy else None


def compute_log_probs(logits: Tensor, tokens: Tensor, process_group: Any = None) -> Tensor:
    """Log-probs [T, 1] of `tokens` under `logits` [T, V], as losses of slime's users call it."""
    return calculate_log_probs_and_entropy(logits, tokens, process_group)[0]
