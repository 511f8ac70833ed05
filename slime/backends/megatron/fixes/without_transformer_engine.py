"""Lets megatron-core 0.16.1 run without TransformerEngine, and disables TransformerEngine's optimizers."""

from contextlib import nullcontext
from types import SimpleNamespace


def install() -> None:
    """Let Megatron build models without TransformerEngine: once per process, before a model is built."""
    # After the CPU shims: megatron-core asks for the device while it is imported.
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils
    from torch.optim import SGD

    # MLA uses the stand-in of a missing module as a class, in `isinstance`.
    multi_latent_attention.HAVE_TE = isinstance(multi_latent_attention.TELinear, type)
    # The router of a mixture of experts compares a function with None that was never imported.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # Recomputed norms are always treated as FP8, which calls the missing package.
    if not hasattr(random, "FP8GlobalStateManager"):
        random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
        random.activation_recompute_forward = random.fp8_autocast = lambda **options: nullcontext()
    # Torch's Adam also where TransformerEngine or Apex is installed: theirs counts its steps elsewhere, and
    # checkpoints are written and read for torch's.
    optimizer.USING_PYTORCH_OPTIMIZER, optimizer.SGD = True, SGD
    distrib_optimizer.HAVE_APEX_OR_TE = False
    distrib_optimizer.USING_TE_OPTIMIZER = distrib_optimizer.USING_APEX_OPTIMIZER = False
