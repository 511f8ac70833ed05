"""Uses TransformerEngine's attention in Megatron's layers, if it agrees with slime's own.

The choice is `--attention-backend`. Before a model is built, both compute the same small packed batch; if
an output or a gradient differs on any rank, TransformerEngine's is not used. Queries and keys arrive rotated.

Context parallelism is refused, because TransformerEngine would communicate in its own way.
"""

import copy
import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from slime.arguments import Args
from slime.backends.attention.documents import PackedDocuments
from slime.backends.attention.trial import why_apart
from slime.backends.megatron.modules.compiled import should_compile
from slime.backends.megatron.modules.layers import PackedCoreAttention
from slime.backends.megatron.modules.mla import MLACoreAttention
from slime.backends.megatron.stream import PackedStream

logger = logging.getLogger(__name__)

# Documents of the trial: shorter and longer than the kernels' blocks.
_TRIAL_LENGTHS = (33, 1, 129, 7, 64)


class TransformerEngineAttention(PackedCoreAttention):
    """Our core attention with the kernel of TransformerEngine."""

    kernel: type[nn.Module]  # set by `with_te_kernel`; built and called like TEDotProductAttention

    def __init__(
        self, *, k_channels: int | None = None, v_channels: int | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        width = k_channels or self.config.kv_channels
        options["softmax_scale"] = width**-0.5 if self.scale is None else self.scale
        if k_channels is not None:
            options |= {"k_channels": k_channels, "v_channels": v_channels}
        # Inside a tuple it is not a submodule, whose entries would change checkpoints.
        self._kernel = (self.kernel(**options),)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, stream: PackedStream) -> Tensor:
        out = self._kernel[0](
            *(part.contiguous() for part in (query, key, value)),
            None,
            AttnMaskType.causal,
            packed_seq_params=_boundaries(stream.documents),
        )
        return out.view(out.shape[0], query.shape[1], -1)


def _boundaries(documents: PackedDocuments) -> PackedSeqParams:
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=documents.cu_seqlens,
        cu_seqlens_kv=documents.cu_seqlens,
        max_seqlen_q=documents.longest,
        max_seqlen_kv=documents.longest,
    )


def with_te_kernel(ours: type[PackedCoreAttention], kernel: type[nn.Module]) -> type[PackedCoreAttention]:
    """Return `ours` with the kernel `kernel`: a class, because Megatron builds its attention from one."""
    return type(f"TransformerEngine{ours.__name__}", (TransformerEngineAttention, ours), {"kernel": kernel})


def installed_te_attention() -> type[nn.Module] | None:
    """Return megatron-core's TransformerEngine attention; None: the package is missing."""
    # Queries the device during its import.
    from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention

    return TEDotProductAttention if HAVE_TE else None


def choose_attention(
    args: Args, config: TransformerConfig, device: torch.device, kernel: type[nn.Module] | None = None
) -> type[PackedCoreAttention]:
    """Choose the model's core attention, on all ranks together. `kernel`: not the installed one."""
    ours = MLACoreAttention if config.multi_latent_attention else PackedCoreAttention
    choice = args.attention_backend
    if choice == "local":
        return ours
    reason = why_unfit(args, config, device)
    if reason is None:
        kernel = kernel or installed_te_attention()
        reason = _first_of_all_ranks(why_refused(ours, kernel, config, device))
    if reason is None and kernel is not None:
        _log_once("attention: TransformerEngine's, which agreed with slime's on a small batch")
        return with_te_kernel(ours, kernel)
    if choice == "auto":
        _log_once(f"attention: slime's own, because {reason}")
        return ours
    problem = f"--attention-backend is {choice}, a kernel of TransformerEngine's, but {reason}"
    if args.strict:
        raise ValueError(f"{problem}; use auto or local. (--strict)")
    _log_once(f"{problem}: slime's own attention is used, which computes the same", logging.WARNING)
    return ours


def why_unfit(args: Args, config: TransformerConfig, device: torch.device) -> str | None:
    """Return why TransformerEngine cannot be tried; the same on all ranks."""
    if device.type != "cuda":
        return "it runs on GPUs only"
    if config.params_dtype not in (torch.bfloat16, torch.float16):
        return f"--dtype {args.dtype} is none of its 16-bit types"
    if config.context_parallel_size > 1:
        return "with --context-parallel-size above 1 slime's own attention exchanges the keys"
    dense = config.num_moe_experts is None and not config.multi_latent_attention
    if dense and should_compile(args, config, device) and (args.compile or args.attention_backend == "auto"):
        return "layers are compiled as a whole, which needs slime's own attention (see --no-compile)"
    return None


def why_refused(
    ours: type[PackedCoreAttention],
    kernel: type[nn.Module] | None,
    config: TransformerConfig,
    device: torch.device,
) -> str | None:
    """Run both attentions; return why this rank cannot use `kernel`; None: outputs and gradients agree."""
    if kernel is None:
        return "the package transformer_engine is not installed"
    inputs = _trial_inputs(config, device)
    theirs = with_te_kernel(ours, kernel)
    return why_apart(lambda: _run(theirs, config, *inputs), lambda: _run(ours, config, *inputs))


def _trial_inputs(
    config: TransformerConfig, device: torch.device
) -> tuple[list[Tensor], Tensor, PackedStream]:
    """Return query, key and value of one rank's heads, a gradient of the output, and packed documents."""
    tp, width = config.tensor_model_parallel_size, config.kv_channels
    heads, groups = config.num_attention_heads // tp, max(config.num_query_groups // tp, 1)
    value_width = config.v_head_dim if config.multi_latent_attention else width
    total = sum(_TRIAL_LENGTHS)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, config.params_dtype)

    parts = [draw(total, heads, width), draw(total, groups, width), draw(total, groups, value_width)]
    angles = torch.rand(total, 1, width // 2, generator=generator).to(device).repeat(1, 1, 2) * 6
    documents = PackedDocuments.from_lengths(_TRIAL_LENGTHS).to(device)
    unread = torch.empty(0)  # attention reads only the boundaries and the angles
    stream = PackedStream(
        qkv_format="thd",
        documents=documents,
        cos=angles.cos(),
        sin=angles.sin(),
        input_ids=unread,
        position_ids=unread,
        logit_rows=unread,
        places=unread,
        targets=unread,
        num_targets=0,
        real=unread,
    )
    return parts, draw(total, heads * value_width), stream


def _run(
    kind: type[PackedCoreAttention],
    config: TransformerConfig,
    parts: list[Tensor],
    grad: Tensor,
    stream: PackedStream,
) -> Sequence[Tensor]:
    """Return output and gradients of one core attention."""
    # As in Megatron's attention with more ranks than key-value groups.
    config = copy.copy(config)
    config.num_query_groups = max(config.num_query_groups, config.tensor_model_parallel_size)
    options = {
        "config": config,
        "layer_number": 1,
        "attn_mask_type": AttnMaskType.causal,
        "attention_type": "self",
    }
    scale = parts[0].shape[-1] ** -0.5
    if config.multi_latent_attention:
        options |= {"k_channels": parts[0].shape[-1], "v_channels": parts[2].shape[-1]}
    # An unusual scale: a kernel that ignores it must be detected.
    attention = kind(**options, softmax_scale=1.5 * scale)
    leaves = [part.clone().requires_grad_() for part in parts]
    out = attention(*leaves, packed_seq_params=stream)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def _first_of_all_ranks(reason: str | None) -> str | None:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return reason
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return next((found for found in reasons if found is not None), None)


def _log_once(text: str, level: int = logging.INFO) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.log(level, text)
