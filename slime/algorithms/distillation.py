"""On-policy distillation: KL between student and teacher on sampled tokens, the vocabulary or its top."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Elements of one chunk of logits: 32 Mi x 4 bytes = 128 MiB in fp32, for student and teacher each.
MAX_CHUNK_ELEMENTS = 1 << 25
# Least probability of all ids outside the teacher's top ids: below it is the rounding of fp32 sums.
MIN_REST = 1e-6


def sampled_reverse_kl(student: Sequence[Tensor], teacher: Sequence[Tensor]) -> list[Tensor]:
    """Return [R_i] per sample: log-prob of student minus teacher, whose mean is KL(student || teacher)."""
    return [own - theirs for own, theirs in zip(student, teacher, strict=True)]


def subtract_reverse_kl(
    advantages: Sequence[Tensor], reverse_kl: Sequence[Tensor], coef: float
) -> list[Tensor]:
    """Move advantages [R_i] towards the teacher: A - coef x (student - teacher)."""
    return [advantage - coef * kl for advantage, kl in zip(advantages, reverse_kl, strict=True)]


def full_reverse_kl(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = -1,
) -> Tensor:
    """[T] KL(student || teacher) over the whole vocabulary at each position, differentiable in the student.

    `hidden` is [T, H], `weight` [V, H]; the teacher may have another width. The logits of a chunk of
    positions exist only while it is computed, and again in the backward pass.
    """

    def chunk(part: Tensor, matrix: Tensor, teacher_part: Tensor) -> Tensor:
        dtype = torch.float64 if part.dtype == torch.float64 else torch.float32
        student = torch.log_softmax((part @ matrix.T).to(dtype) / temperature, dim=-1)
        with torch.no_grad():
            logits = teacher_part.to(teacher_weight.dtype) @ teacher_weight.T
            teacher = torch.log_softmax(logits.to(dtype) / temperature, dim=-1)
        return (student.exp() * (student - teacher)).sum(-1)

    return _in_chunks(chunk, hidden, weight, teacher_hidden, chunk_size)


def log_probs_of(
    hidden: Tensor, weight: Tensor, ids: Tensor, *, temperature: float = 1.0, chunk_size: int = -1
) -> Tensor:
    """[T, K] log-probs of `ids` [T, K] under softmax(hidden @ weight.T / temperature), differentiable."""

    def chunk(part: Tensor, matrix: Tensor, chosen: Tensor) -> Tensor:
        dtype = torch.float64 if part.dtype == torch.float64 else torch.float32
        return torch.log_softmax((part @ matrix.T).to(dtype) / temperature, dim=-1).gather(1, chosen)

    return _in_chunks(chunk, hidden, weight, ids, chunk_size)


def top_kl(student: Tensor, teacher: Tensor, *, forward: bool) -> Tensor:
    """[T] KL between distributions of which the log-probs [T, K] of the same ids are known.

    All other ids count as one more outcome, so this is a KL: at least 0, exact for K = the vocabulary, and
    else at most the KL over the vocabulary. `forward`: KL(teacher || student), else KL(student || teacher).
    """
    p, q = _with_rest(student), _with_rest(teacher)
    return (q.exp() * (q - p) if forward else p.exp() * (p - q)).sum(-1)


def _with_rest(log_probs: Tensor) -> Tensor:
    rest = (1 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=MIN_REST)
    return torch.cat([log_probs, rest.log()], dim=-1)


def _in_chunks(
    function: Callable[[Tensor, Tensor, Tensor], Tensor],
    hidden: Tensor,
    weight: Tensor,
    other: Tensor,
    chunk_size: int,
) -> Tensor:
    """Call `function` on chunks of positions, whose logits exist only meanwhile and in the backward pass."""
    rows = chunk_size if chunk_size > 0 else max(1, MAX_CHUNK_ELEMENTS // weight.shape[0])
    parts = [
        checkpoint(function, hidden[s : s + rows], weight, other[s : s + rows], use_reentrant=False)
        for s in range(0, max(1, hidden.shape[0]), rows)
    ]
    return torch.cat(parts)
