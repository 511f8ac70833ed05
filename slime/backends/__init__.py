"""Trainers behind one protocol, `base.TrainBackend`."""

import torch

from slime.arguments import Args
from slime.backends.base import TrainBackend
from slime.utils.misc import load_function

# Paths, not imports: a backend may need packages that are not installed where another one runs.
BACKENDS = {
    "fsdp": "slime.backends.fsdp.create_backend",
    "megatron": "slime.backends.megatron.create_backend",
}


def create_backend(args: Args, *, rank: int, world_size: int, device: torch.device) -> TrainBackend:
    """The trainer that `--train-backend` names, on this rank."""
    create = load_function(BACKENDS[args.train_backend])
    backend: TrainBackend = create(args, rank=rank, world_size=world_size, device=device)
    return backend
