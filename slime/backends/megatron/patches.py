"""Mends what megatron-core 0.16.1 gets wrong where TransformerEngine is not installed, on any device."""

from megatron.core.transformer import multi_latent_attention


def mend_latent_attention() -> None:
    """It takes TransformerEngine for installed because an import of its stand-in succeeded, and asks for its instances."""
    multi_latent_attention.HAVE_TE = isinstance(multi_latent_attention.TELinear, type)
