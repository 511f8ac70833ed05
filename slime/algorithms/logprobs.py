"""Log-probs and entropy of chosen tokens, from hidden states and the output matrix, a chunk of tokens at a time.

The full [tokens, vocabulary] logits never exist: the backward pass computes each chunk's logits again, in at least
fp32, from the saved log-sum-exp. Logits are divided by the sampling temperature, so that the numbers are those of the
distribution that the engine sampled from.
"""

import torch
from torch import Tensor

# Elements of one chunk of logits: 64 Mi x 4 bytes = 256 MiB in fp32.
MAX_CHUNK_ELEMENTS = 1 << 26


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _chunk_rows(num_tokens: int, vocab_size: int, chunk_size: int) -> int:
    if chunk_size > 0:
        return chunk_size
    return max(1, min(num_tokens, MAX_CHUNK_ELEMENTS // vocab_size))


class _ChunkedLogProbs(torch.autograd.Function):
    """Forward and hand-written backward of log-prob and entropy over chunks of tokens."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, chunk_rows, with_entropy):
        dtype = _compute_dtype(hidden.dtype)
        num_tokens = hidden.shape[0]
        log_probs = torch.empty(num_tokens, dtype=dtype, device=hidden.device)
        log_sums = torch.empty_like(log_probs)
        entropy = torch.empty_like(log_probs) if with_entropy else None
        for start in range(0, num_tokens, chunk_rows):
            rows = slice(start, start + chunk_rows)
            logits = (hidden[rows] @ weight.T).to(dtype).div_(temperature)
            log_sums[rows] = torch.logsumexp(logits, dim=-1)
            log_probs[rows] = logits.gather(1, targets[rows, None]).squeeze(1) - log_sums[rows]
            if with_entropy:
                probs = torch.exp(logits - log_sums[rows, None])
                entropy[rows] = log_sums[rows] - (probs * logits).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, log_sums, entropy)
        ctx.temperature, ctx.chunk_rows = temperature, chunk_rows
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy):
        hidden, weight, targets, log_sums, entropy = ctx.saved_tensors
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 6
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=log_sums.dtype, device=weight.device)
        for start in range(0, hidden.shape[0], ctx.chunk_rows):
            rows = slice(start, start + ctx.chunk_rows)
            log_dist = (hidden[rows] @ weight.T).to(log_sums.dtype).div_(ctx.temperature).sub_(log_sums[rows, None])
            probs = log_dist.exp()
            # d log p(target) / d logits = onehot - p;  d H / d logits = -p (log p + H)
            if grad_entropy is not None:
                grad = log_dist.add_(entropy[rows, None]).mul_(probs).mul_(-grad_entropy[rows, None])
                if grad_log_probs is not None:
                    grad.addcmul_(probs, grad_log_probs[rows, None], value=-1)
            else:
                grad = probs.mul_(-grad_log_probs[rows, None])
            if grad_log_probs is not None:
                grad.scatter_add_(1, targets[rows, None], grad_log_probs[rows, None])
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[rows] = grad @ weight
            grad_weight += grad.T @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = -1,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [T] of `targets` [T] and, if asked, entropies [T] of softmax(hidden @ weight.T / temperature).

    `hidden` is [T, H], `weight` [V, H]. Results are fp32 (fp64 for fp64 inputs) and differentiable in both.
    `chunk_size` counts tokens; -1 picks it so that one chunk of fp32 logits stays within 256 MiB.
    """
    if hidden.shape[0] == 0:
        # Keeps the graph connected: a rank without tokens still has to take part in the gradient reduction.
        zero = hidden.sum(-1).to(_compute_dtype(hidden.dtype)) + 0.0 * weight[0, 0]
        return zero, zero if with_entropy else None
    rows = _chunk_rows(hidden.shape[0], weight.shape[0], chunk_size)
    return _ChunkedLogProbs.apply(hidden, weight, targets, float(temperature), rows, with_entropy)


def calculate_log_probs_and_entropy(
    logits: Tensor,
    tokens: Tensor,
    tp_group=None,
    with_entropy: bool = False,
    chunk_size: int = -1,
    log_prob_keep_mask: Tensor | None = None,
    with_entropy_grad: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [T] and entropies [T] of `tokens` under existing `logits` [T, V].

    `log_prob_keep_mask` [T, V] renormalises the log-prob over the kept tokens (the sampled token is always kept); the
    entropy stays that of the full distribution. `tp_group` is accepted for callers that shard the vocabulary and must
    be None or of size one here.
    """
    if tp_group is not None and tp_group.size() > 1:
        raise ValueError(
            "calculate_log_probs_and_entropy: a vocabulary sharded over several ranks is not supported here."
        )
    rows = chunk_size if chunk_size > 0 else max(1, logits.shape[0])
    log_probs, entropies = [], []
    for start in range(0, logits.shape[0], rows):
        part = logits[start : start + rows].to(_compute_dtype(logits.dtype))
        target = tokens[start : start + rows, None]
        kept = part
        if log_prob_keep_mask is not None:
            keep = log_prob_keep_mask[start : start + rows].scatter(1, target, True)
            kept = part.masked_fill(~keep, float("-inf"))
        log_probs.append(kept.gather(1, target).squeeze(1) - torch.logsumexp(kept, dim=-1))
        if with_entropy:
            source = part if with_entropy_grad else part.detach()
            log_dist = torch.log_softmax(source, dim=-1)
            entropies.append(-(log_dist.exp() * log_dist).sum(-1))
    empty = logits.new_zeros(0, dtype=_compute_dtype(logits.dtype))
    entropy = (torch.cat(entropies) if entropies else empty) if with_entropy else None
    return (torch.cat(log_probs) if log_probs else empty), entropy
