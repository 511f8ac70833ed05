"""Sets up activation checkpointing and compilation of decoder layers."""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from slime.algorithms.attention_variants import note_kinds
from slime.backends.attention import packed_documents
from slime.utils.machine.accelerator import gpu

HFModel = Any  # a `PreTrainedModel` of transformers, which the type checker does not check

# Results of matrix products and attention are kept; all others are cheap to recompute.
_KEPT_OPERATORS = (
    "mm",
    "addmm",
    "bmm",
    "_grouped_mm",
    "_scaled_mm",
    "_flash_attention_forward",
    "_varlen_attn",
    "packed_attention",
    "prefix_attention",
    "flash4_attention",
    "gated_experts",
)
_KEPT_PREFIXES = ("_scaled_dot_product",)
# Compiled code is specialised to a bound on document lengths (a power of two), with and without gradients.
_RECOMPILE_LIMIT = 64
_WIDE = 2048


def prepare_layers(layers: list[nn.Module], config: Any, *, checkpointing: str, compiled: bool) -> None:
    """Replace each layer's forward; layers of one class share one function, so that it is compiled once."""
    if checkpointing == "none" and not compiled:
        return
    if compiled:
        packed_documents.prepare(*packed_documents.head_shape(config))
        _compile_for_any_length(config.get_text_config().hidden_size)
    functions: dict[type, Callable[..., Any]] = {}
    for layer in layers:
        kind = type(layer)
        if compiled:
            note_kinds(layer)
        if kind not in functions:
            function = _checkpointed(kind.forward, checkpointing)
            functions[kind] = torch.compile(function, dynamic=True) if compiled else function
        layer.forward = types.MethodType(functions[kind], layer)


def require_input_gradient(lm: HFModel) -> None:
    """Give the first layer an input with a gradient, as all others have, even if embeddings are frozen.

    Otherwise torch compiles the layer once more, in the middle of the first step.
    """

    def require(_embedding: nn.Module, _inputs: Any, hidden: Tensor) -> None:
        if torch.is_grad_enabled() and not hidden.requires_grad:
            hidden.requires_grad_()

    lm.get_input_embeddings().register_forward_hook(require)


def _compile_for_any_length(width: int) -> None:
    """Let torch compile a layer once for micro-batches of all sizes."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _RECOMPILE_LIMIT)
    if not gpu.is_available():
        return
    from torch._inductor import config  # seconds to import, and of kernels on a GPU

    # Sums over rows and over columns in one kernel, from some length on: below it the layer is compiled
    # again. A step of wide layers, most of which are products, is as fast without.
    if hasattr(config.triton, "mix_order_reduction"):
        config.triton.mix_order_reduction = width < _WIDE


def _checkpointed(forward: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """`full`: keep only a layer's input; `selective`: keep also results of matrix products and attention."""
    if mode == "none":
        return forward
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)

    def run(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(layer, *args, **kwargs)
        return checkpoint(forward, layer, *args, **options, **kwargs)

    return run


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    name = getattr(operator, "__name__", "").split(".")[0]
    kept = name in _KEPT_OPERATORS or name.startswith(_KEPT_PREFIXES)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
