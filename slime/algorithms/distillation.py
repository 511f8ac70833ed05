"""On-policy distillation: KL between student and teacher, on sampled tokens or over the vocabulary."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Elements of one chunk of logits: 32 Mi x 4 bytes = 128 MiB in fp32, for student and teacher each.
MAX_CHUNK_ELEMENTS = 1 << 25


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
    if hidden.shape[0] == 0:
        return hidden.sum(-1).float() + 0.0 * weight[0, 0]
    rows = chunk_size if chunk_size > 0 else max(1, MAX_CHUNK_ELEMENTS // weight.shape[0])

    def chunk(part: Tensor, matrix: Tensor, teacher_part: Tensor) -> Tensor:
        dtype = torch.float64 if part.dtype == torch.float64 else torch.float32
        student = torch.log_softmax((part @ matrix.T).to(dtype) / temperature, dim=-1)
        with torch.no_grad():
            logits = teacher_part.to(teacher_weight.dtype) @ teacher_weight.T
            teacher = torch.log_softmax(logits.to(dtype) / temperature, dim=-1)
        return (student.exp() * (student - teacher)).sum(-1)

    parts = [
        checkpoint(chunk, hidden[s : s + rows], weight, teacher_hidden[s : s + rows], use_reentrant=False)
        for s in range(0, hidden.shape[0], rows)
    ]
    return torch.cat(parts)
