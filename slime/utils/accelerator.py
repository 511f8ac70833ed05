"""What this machine computes with: the device, how many, and how ranks talk to each other."""

from __future__ import annotations

import torch


def device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_count() -> int:
    """Visible GPUs; 0 on a CPU machine."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def process_group_backend() -> str:
    """CPU tensors need gloo even on a GPU machine (checkpoints, small exchanges)."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def empty_cache() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
