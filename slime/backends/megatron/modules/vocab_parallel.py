"""Log-probs, entropy and KL where each tensor-parallel rank holds a slice of the vocabulary.

The same mathematics as `slime.algorithms.logprobs`, a chunk of tokens at a time: full logits never exist, and
the backward pass computes each chunk's logits again from the saved log-sum-exp. Three numbers per token, and
never a logit, cross the ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.algorithms.logprobs import MAX_CHUNK_ELEMENTS, chunked_log_probs
from slime.algorithms.nucleus import Nucleus


def _logits(hidden: Tensor, weight: Tensor, temperature: float, real: int) -> Tensor:
    """Return this rank's slice of the logits; columns that only pad the vocabulary get -inf."""
    logits = (hidden @ weight.T).float().div_(temperature)
    if real < weight.shape[0]:
        logits[:, real:] = float("-inf")
    return logits


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        rows: int,
        with_entropy: bool,
        first: int,
        real: int,
        group: dist.ProcessGroup,
        nucleus: Nucleus | None,
    ) -> tuple[Tensor, Tensor | None]:
        count = hidden.shape[0]
        log_probs = torch.empty(count, dtype=torch.float32, device=hidden.device)
        log_sums = torch.empty_like(log_probs)
        entropy = torch.empty_like(log_probs) if with_entropy else None
        for start in range(0, count, rows):
            part = slice(start, start + rows)
            logits = _cut(_logits(hidden[part], weight, temperature, real), nucleus, targets, part, first)
            top = _top(logits, real, group)
            own = targets[part] - first
            mine = (own >= 0) & (own < real)
            shifted = logits.sub_(top[:, None])
            exps = shifted.exp()
            sums = [exps.sum(-1), _chosen(shifted, own, mine)]
            if with_entropy:
                sums.append((exps * shifted.masked_fill(exps == 0, 0.0)).sum(-1))
            total = torch.stack(sums)
            dist.all_reduce(total, group=group)
            log_total = total[0].log()
            log_sums[part] = top + log_total
            log_probs[part] = total[1] - log_total
            if entropy is not None:
                entropy[part] = log_total - total[2] / total[0]
        ctx.save_for_backward(hidden, weight, targets, log_sums, entropy)
        ctx.settings = temperature, rows, first, real, nucleus
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_sums, entropy = ctx.saved_tensors
        temperature, rows, first, real, nucleus = ctx.settings
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 10

        def grad_of(part: slice) -> Tensor:
            logits = _cut(_logits(hidden[part], weight, temperature, real), nucleus, targets, part, first)
            log_dist = logits.sub_(log_sums[part, None])
            probs = log_dist.exp()
            # d log p(target) / d logits = onehot - p;  d H / d logits = -p (log p + H)
            grad = torch.zeros_like(probs)
            if grad_entropy is not None:
                surprise = log_dist.masked_fill(probs == 0, 0.0).add_(entropy[part, None])
                grad.addcmul_(surprise.mul_(probs), grad_entropy[part, None], value=-1)
            if grad_log_probs is not None:
                grad.addcmul_(probs, grad_log_probs[part, None], value=-1)
                own = targets[part] - first
                mine = (own >= 0) & (own < real)
                grad.scatter_add_(
                    1, own.clamp(0, weight.shape[0] - 1)[:, None], (grad_log_probs[part] * mine)[:, None]
                )
            return grad

        return *_through_matrix(hidden, weight, temperature, rows, grad_of), *(None,) * 8


def _through_matrix(
    hidden: Tensor, weight: Tensor, temperature: float, rows: int, grad_of: Callable[[slice], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of both factors of the logits, from those of chunks of logits / temperature."""
    grad_hidden = torch.empty_like(hidden)
    grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    for start in range(0, hidden.shape[0], rows):
        part = slice(start, start + rows)
        grad = grad_of(part).div_(temperature).to(hidden.dtype)
        grad_hidden[part] = grad @ weight
        grad_weight += grad.T @ hidden[part]
    return grad_hidden, grad_weight.to(weight.dtype)


def _cut(logits: Tensor, nucleus: Nucleus | None, targets: Tensor, part: slice, first: int) -> Tensor:
    """Restrict the rows `part` of a slice that starts at vocabulary entry `first` to their nucleus."""
    if nucleus is None:
        return logits
    return nucleus.rows(part.start, part.start + logits.shape[0]).cut_(logits, targets[part], first)


def _chosen(logits: Tensor, own: Tensor, mine: Tensor) -> Tensor:
    """Return the logit of each token's target if this rank holds it, else 0."""
    picked = logits.gather(1, own.clamp(0, logits.shape[1] - 1)[:, None]).squeeze(1)
    return picked.masked_fill(~mine, 0.0)


def vocab_parallel_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    group: dist.ProcessGroup,
    vocab_size: int,
    temperature: float = 1.0,
    chunk_size: int = -1,
    with_entropy: bool = False,
    nucleus: Nucleus | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs and entropies [T], the same on all ranks of `group`; `weight` [V / size, H] is a
    slice.

    The gradient of `hidden` is this rank's part: the caller sums it over the ranks. Rows at or above
    `vocab_size` pad. `nucleus`: the ids of each softmax, for T rows; None: all ids.
    """
    if group.size() == 1 and weight.shape[0] == vocab_size:
        return chunked_log_probs(
            hidden,
            weight,
            targets,
            temperature=temperature,
            chunk_size=chunk_size,
            with_entropy=with_entropy,
            nucleus=nucleus,
        )
    if hidden.shape[0] == 0:
        zero = hidden.sum(-1).float() + 0.0 * weight[0, 0]
        return zero, zero if with_entropy else None
    first = group.rank() * weight.shape[0]
    real = min(max(vocab_size - first, 0), weight.shape[0])
    rows = (
        chunk_size if chunk_size > 0 else max(1, min(hidden.shape[0], MAX_CHUNK_ELEMENTS // weight.shape[0]))
    )
    return _VocabParallelLogProbs.apply(
        hidden, weight, targets, float(temperature), rows, with_entropy, first, real, group, nucleus
    )


class _GatherVocab(torch.autograd.Function):
    """Slices of the logits -> whole logits on every rank; each rank's gradient is its own slice."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.start, ctx.size = group.rank() * local.shape[-1], local.shape[-1]
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[..., ctx.start : ctx.start + ctx.size].contiguous(), None


def gather_vocab(local: Tensor, group: dist.ProcessGroup, vocab_size: int) -> Tensor:
    """Return whole logits [T, V] from slices [T, V / size]."""
    whole = _GatherVocab.apply(local, group) if group.size() > 1 else local
    return whole[..., :vocab_size]


class _VocabParallelReverseKL(torch.autograd.Function):
    """KL(own || teacher) from slices of both output matrices; d KL / d logits = p (log p - log q - KL)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        temperature: float,
        rows: int,
        real: int,
        group: dist.ProcessGroup,
    ) -> Tensor:
        kl = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        log_sums = torch.empty(2, hidden.shape[0], dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            own = _logits(hidden[part], weight, temperature, real)
            theirs = _logits(teacher_hidden[part], teacher_weight, temperature, real)
            log_sums[0, part], log_sums[1, part] = _log_sum(own, real, group), _log_sum(theirs, real, group)
            log_p, log_q = own - log_sums[0, part, None], theirs - log_sums[1, part, None]
            p = log_p.exp()
            total = (p * (log_p - log_q).masked_fill(p == 0, 0.0)).sum(-1)
            dist.all_reduce(total, group=group)
            kl[part] = total
        ctx.save_for_backward(hidden, weight, teacher_hidden, teacher_weight, log_sums, kl)
        ctx.settings = temperature, rows, real
        return kl

    @staticmethod
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, teacher_hidden, teacher_weight, log_sums, kl = ctx.saved_tensors
        temperature, rows, real = ctx.settings

        def grad_of(part: slice) -> Tensor:
            log_p = _logits(hidden[part], weight, temperature, real) - log_sums[0, part, None]
            log_q = _logits(teacher_hidden[part], teacher_weight, temperature, real) - log_sums[1, part, None]
            p = log_p.exp()
            return p * ((log_p - log_q).masked_fill(p == 0, 0.0) - kl[part, None]) * grad_kl[part, None]

        return *_through_matrix(hidden, weight, temperature, rows, grad_of), *(None,) * 6


class _VocabParallelLogProbsOf(torch.autograd.Function):
    """Log-probs [T, K] of several ids per token from slices of the output matrix."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        temperature: float,
        rows: int,
        first: int,
        real: int,
        group: dist.ProcessGroup,
    ) -> Tensor:
        found = torch.empty(ids.shape, dtype=torch.float32, device=hidden.device)
        log_sums = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        own = ids - first
        mine = (own >= 0) & (own < real)
        own = own.clamp(0, weight.shape[0] - 1)
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            logits = _logits(hidden[part], weight, temperature, real)
            log_sums[part] = _log_sum(logits, real, group)
            chosen = logits.gather(1, own[part]).masked_fill(~mine[part], 0.0)
            dist.all_reduce(chosen, group=group)
            found[part] = chosen - log_sums[part, None]
        ctx.save_for_backward(hidden, weight, own, mine, log_sums)
        ctx.settings = temperature, rows, real
        return found

    @staticmethod
    def backward(ctx: Any, grad_found: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, own, mine, log_sums = ctx.saved_tensors
        temperature, rows, real = ctx.settings

        def grad_of(part: slice) -> Tensor:
            probs = (_logits(hidden[part], weight, temperature, real) - log_sums[part, None]).exp()
            grad = probs.mul_(-grad_found[part].sum(-1, keepdim=True))
            return grad.scatter_add_(1, own[part], grad_found[part] * mine[part])

        return *_through_matrix(hidden, weight, temperature, rows, grad_of), *(None,) * 6


def _top(logits: Tensor, real: int, group: dist.ProcessGroup) -> Tensor:
    """Return the largest logit [T] over all ranks' slices; `real`: columns of this rank that are tokens."""
    top = logits.max(dim=-1).values if real else logits.new_full((logits.shape[0],), float("-inf"))
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    return top


def _log_sum(logits: Tensor, real: int, group: dist.ProcessGroup) -> Tensor:
    """Return log-sum-exp [T] over all ranks' slices."""
    top = _top(logits, real, group)
    total = (logits - top[:, None]).exp().sum(-1)
    dist.all_reduce(total, group=group)
    return top + total.log()


@dataclass(frozen=True, slots=True)
class VocabSlice:
    """An output matrix of which this rank holds some rows of the vocabulary, padded to equal parts."""

    weight: Tensor  # [V / size, H]
    group: dist.ProcessGroup
    vocab_size: int  # without padding

    @property
    def first(self) -> int:
        return self.group.rank() * self.weight.shape[0]

    @property
    def real(self) -> int:
        """The number of this rank's rows that are tokens."""
        return min(max(self.vocab_size - self.first, 0), self.weight.shape[0])

    def reverse_kl(
        self,
        hidden: Tensor,
        teacher_hidden: Tensor,
        teacher: "VocabSlice",
        *,
        temperature: float,
        chunk_size: int,
    ) -> Tensor:
        """Return KL [R] in fp32, the same on all ranks; the caller sums the gradient of `hidden`."""
        rows = chunk_size if chunk_size > 0 else max(1, MAX_CHUNK_ELEMENTS // self.weight.shape[0])
        theirs = teacher_hidden.to(teacher.weight.dtype)
        return _VocabParallelReverseKL.apply(
            hidden, self.weight, theirs, teacher.weight, float(temperature), rows, self.real, self.group
        )

    def log_probs_of(self, hidden: Tensor, ids: Tensor, *, temperature: float, chunk_size: int) -> Tensor:
        """Return [R, K] in fp32, the same on all ranks; the caller sums the gradient of `hidden`."""
        rows = chunk_size if chunk_size > 0 else max(1, MAX_CHUNK_ELEMENTS // self.weight.shape[0])
        return _VocabParallelLogProbsOf.apply(
            hidden, self.weight, ids, float(temperature), rows, self.first, self.real, self.group
        )
