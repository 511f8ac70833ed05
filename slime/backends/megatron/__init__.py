"""HF causal LMs trained by megatron-core: tensor, pipeline, context, expert and data parallelism, on CPU or GPU."""

from typing import Any

import torch


def create_backend(
    args: Any, *, rank: int, world_size: int, device: str | torch.device, total_steps: int | None = None
) -> Any:
    """The trainer of this rank with the weights of --hf-checkpoint, and the reference's if a KL needs one.

    torch.distributed must be initialised.
    """
    device = torch.device(device)
    try:
        import megatron.core  # noqa: F401 - an optional package
    except ImportError as error:
        raise ValueError(
            f"--train-backend megatron needs megatron-core ({error}): pip install 'slime[megatron]'."
        ) from error
    if device.type == "cpu":
        from slime.backends.megatron import cpu_shims  # patches torch: only where there is no CUDA

        cpu_shims.install()
    # After the shims: megatron-core asks for the device while it is imported.
    from slime.backends.megatron.backend import MegatronBackend

    backend = MegatronBackend(args, rank=rank, world_size=world_size, device=device, total_steps=total_steps)
    if args.loss_type == "policy_loss" and (args.use_kl_loss or args.kl_coef):
        backend.load_hf(args.ref_load or args.hf_checkpoint, weights="ref")
    return backend
