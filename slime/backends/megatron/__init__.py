"""Trains HF causal LMs with megatron-core: tensor, pipeline, context, expert and data parallelism."""

import functools

import torch

from slime.arguments import Args
from slime.backends.base import TrainBackend


def create_backend(
    args: Args,
    *,
    rank: int,
    world_size: int,
    device: str | torch.device,
    total_steps: int | None = None,
    random_weights: bool = False,
) -> TrainBackend:
    """This rank's trainer with the weights of --hf-checkpoint, and the other models of its algorithm.

    torch.distributed must be initialised. `random_weights`: only the config is read, as speed tests do.
    """
    device = torch.device(device)
    try:
        import megatron.core  # noqa: F401 - an optional package
    except ImportError as error:
        raise ValueError(
            f"--train-backend megatron needs megatron-core ({error}): pip install 'slime[megatron]'."
        ) from error
    if device.type == "cpu":
        from slime.backends.megatron.fixes import cpu_shims  # patches torch: only where there is no CUDA

        cpu_shims.install()
    # After the shims: megatron-core asks for the device while it is imported.
    from slime.backends.megatron.backend import MegatronBackend
    from slime.backends.megatron.fixes import list_kernels, without_transformer_engine
    from slime.backends.megatron.teacher import critic_args

    without_transformer_engine.install()
    list_kernels.install()
    build = functools.partial(
        MegatronBackend, rank=rank, world_size=world_size, device=device, total_steps=total_steps
    )
    backend = build(args, random_weights=random_weights)

    def build_critic(settings: Args) -> MegatronBackend:
        if settings.hf_checkpoint != args.hf_checkpoint:
            settings = critic_args(settings)
        critic = build(settings, role="critic")
        sizes = critic.hf_config.vocab_size, backend.hf_config.vocab_size
        backend.check_vocabulary("--critic-load", settings.hf_checkpoint, *sizes)
        return critic

    backend.add_models(build_critic)
    return backend
