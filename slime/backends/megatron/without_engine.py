"""What megatron-core 0.16.1 leaves undefined where TransformerEngine is not installed, on GPUs as on CPUs."""


def install() -> None:
    """Once per process, before a model is built."""
    # After the CPU shims: megatron-core asks for the device while it is imported.
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    # Latent attention takes the stand-in of a missing module for a class, and asks for its instances.
    multi_latent_attention.HAVE_TE = isinstance(multi_latent_attention.TELinear, type)
    # The router of a mixture of experts asks whether a function is None that was never imported.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
