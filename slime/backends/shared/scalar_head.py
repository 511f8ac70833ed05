"""The one row that a critic or a reward model has in place of an output matrix."""

import torch
from torch import Tensor

HEAD = "score.weight"  # its name in a folder of transformers' sequence classification


def draw_head(hidden_size: int, seed: int) -> Tensor:
    """Draw [1, H] fp32 on CPU: the same numbers on every rank and in every trainer."""
    return torch.empty(1, hidden_size).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(seed))
