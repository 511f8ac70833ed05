"""Trains HF causal LMs with megatron-core: tensor, pipeline, context, expert and data parallelism."""

from typing import Any

import torch

from slime.arguments import Args
from slime.backends.shared.trainer_base import TrainBackend


def create_backend(args: Args, *, device: str | torch.device, **options: Any) -> TrainBackend:
    """Build this rank's trainer; `options` are those of `TrainBackend.create`."""
    device = torch.device(device)
    try:
        import megatron.core  # noqa: F401 - an optional package
    except ImportError as error:
        raise ValueError(
            f"--train-backend megatron needs megatron-core ({error}): pip install 'slime-rl[megatron]'."
        ) from error
    if device.type == "cpu":
        from slime.backends.megatron.fixes import cpu_shims  # patches torch, so only without CUDA

        cpu_shims.install()
    # After the shims: megatron-core queries the device during its import.
    from slime.backends.megatron.backend import MegatronBackend
    from slime.backends.megatron.fixes import list_kernels, without_transformer_engine

    without_transformer_engine.install()
    list_kernels.install()
    return MegatronBackend.create(args, device=device, **options)
