"""What megatron-core 0.16.1 leaves undefined where TransformerEngine is not installed, on GPUs as on CPUs."""


def install() -> None:
    """The router of a mixture of experts asks whether a function is None that was never imported."""
    # After the CPU shims: megatron-core asks for the device while it is imported.
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
