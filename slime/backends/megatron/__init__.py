"""HF causal LMs trained by megatron-core: tensor, pipeline, context, expert and data parallelism, on CPU or GPU."""

from typing import Any

import torch


def create_backend(
    args: Any, *, rank: int, world_size: int, device: str | torch.device, total_steps: int | None = None
) -> Any:
    """The trainer of this rank with the weights of --hf-checkpoint, and those of a reference or teacher beside them.

    torch.distributed must be initialised. A teacher must be of the same architecture.
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
    from slime.backends.roles import needs_reference

    backend = MegatronBackend(args, rank=rank, world_size=world_size, device=device, total_steps=total_steps)
    if needs_reference(args):
        backend.load_hf(args.ref_load or args.hf_checkpoint, weights="ref")
    if args.use_opd and args.opd_type == "trainer":
        backend.load_hf(args.opd_teacher_load, weights="teacher")
    return backend
