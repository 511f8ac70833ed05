"""Training backends (FSDP, Megatron) with a common base class, `shared.trainer_base.TrainBackend`."""

import torch

from slime.arguments import Args
from slime.backends.shared.trainer_base import TrainBackend
from slime.catalog.backends import BACKENDS
from slime.utils.misc import load_function


def create_backend(
    args: Args, *, rank: int, world_size: int, device: torch.device, random_weights: bool = False
) -> TrainBackend:
    """Create the trainer that `--train-backend` names, on this rank. `random_weights`: only the config is
    read.
    """
    create = load_function(BACKENDS[args.train_backend].create)
    backend: TrainBackend = create(
        args, rank=rank, world_size=world_size, device=device, random_weights=random_weights
    )
    return backend
