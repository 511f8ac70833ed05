"""Wraps an HF causal LM for training under FSDP2: packed tokens in, log-probs of response tokens out."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from slime.algorithms.distillation import full_reverse_kl, log_probs_of
from slime.algorithms.logprobs import chunked_log_probs
from slime.algorithms.model_parts import decoder_layers
from slime.backends.attention.share import Share
from slime.backends.base import HeadFunction, MicroBatch
from slime.backends.fsdp import families
from slime.backends.fsdp.layer_execution import HFModel
from slime.backends.fsdp.vision import family_of, run_stream


def run_decoder(lm: HFModel, mb: MicroBatch, share: Share | None) -> Tensor:
    """Return hidden states [T, H] of the packed stream, or of its replacement."""
    if share is None:
        return families.run_whole(lm, mb)
    if family_of(lm.config) is not None:
        return run_stream(lm, share)
    return families.run_stream(lm, share.input_ids, share.position_ids, share.documents)


@dataclass(frozen=True, slots=True)
class WholeMatrix:
    """An output matrix with all rows of the vocabulary on this rank."""

    weight: Tensor  # [V, H]

    def reverse_kl(
        self,
        hidden: Tensor,
        teacher_hidden: Tensor,
        teacher: "WholeMatrix",
        *,
        temperature: float,
        chunk_size: int,
    ) -> Tensor:
        return full_reverse_kl(
            hidden,
            self.weight,
            teacher_hidden,
            teacher.weight,
            temperature=temperature,
            chunk_size=chunk_size,
        )

    def log_probs_of(self, hidden: Tensor, ids: Tensor, *, temperature: float, chunk_size: int) -> Tensor:
        return log_probs_of(hidden, self.weight, ids, temperature=temperature, chunk_size=chunk_size)


class PackedCausalLM(nn.Module):
    """Runs the decoder on a packed stream and the output matrix only where a response token is predicted.

    The output matrix is applied inside this forward, because only there FSDP has its full weight gathered.
    """

    lm: HFModel

    def __init__(self, lm: HFModel) -> None:
        super().__init__()
        self.lm = lm
        self.output = families.output_layer(lm)

    def forward(
        self,
        mb: MicroBatch,
        share: Share | None = None,
        *,
        temperature: float,
        chunk_size: int = -1,
        entropy: bool = False,
        logits: bool = False,
        at_head: HeadFunction | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Log-probs [R], entropy [R] or None, logits [1, T, V] or None, the result of `at_head` or None.

        A `share` replaces the micro-batch's own stream: samples share prefixes in it, or it is this rank's
        part, and the ranks' results are joined. The result is a tuple, so that FSDP finds the tensors.
        """
        hidden = run_decoder(self.lm, mb, share)
        hidden, weight = self._scaled(hidden)
        chosen = hidden.index_select(0, mb.logit_positions if share is None else share.rows)
        log_probs, entropies = chunked_log_probs(
            chosen,
            weight,
            mb.targets if share is None else mb.targets.index_select(0, share.places),
            temperature=temperature,
            chunk_size=chunk_size,
            with_entropy=entropy,
            nucleus=mb.nucleus if share is None else share.nucleus,
            softcap=self.output.softcap,
        )
        if share is not None:
            assert not logits, "a loss that needs logits gets the original stream"
            assert share.is_whole or at_head is None, "hidden states of all tokens are not on one rank"
            chosen = chosen if at_head is None else share.join(chosen)
            log_probs = share.join(log_probs)
            entropies = share.join(entropies) if entropies is not None else None
        full = self._whole_logits(hidden, weight) if logits else None
        extra = None
        if at_head is not None:
            if (
                self.output.softcap is not None
                or weight.shape[1] != self.lm.get_output_embeddings().in_features
            ):
                raise ValueError(
                    f"--opd-kl: the output layer of {type(self.lm).__name__} is no plain matrix; use "
                    "--opd-kl sampled."
                )
            extra = at_head(chosen, WholeMatrix(weight), mb)
        return log_probs, entropies, full, extra

    def _scaled(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states and a matrix whose product is the logits; a bias becomes one more column."""
        head, factor = self.lm.get_output_embeddings(), self.output.factor
        hidden, weight = (hidden if factor == 1.0 else hidden * factor), head.weight
        if head.bias is None:
            return hidden, weight
        one = hidden.new_full((hidden.shape[0], 1), factor)
        return torch.cat((hidden, one), dim=1), torch.cat((weight, head.bias[:, None]), dim=1)

    def _whole_logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        logits, cap = (hidden @ weight.T)[None].float(), self.output.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


def shard(model: Any, mesh: DeviceMesh, compute_dtype: torch.dtype, *, offload: bool = False) -> None:
    """Apply FSDP2 to layers and root: fp32 shards, computation in `compute_dtype`, reduction in fp32."""
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == torch.float32 else compute_dtype,
        reduce_dtype=None if compute_dtype == torch.float32 else torch.float32,
        cast_forward_inputs=False,
    )
    pinned = mesh.device_type != "cpu"
    place = CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy()
    for module in [*decoder_layers(model.lm), model]:
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=place)


def reshard(model: nn.Module) -> None:
    """Reshard the root: without a backward pass FSDP keeps it gathered and would miss later changes."""
    if isinstance(model, FSDPModule):
        model.reshard()


def gather_full(tensor: Tensor) -> Tensor:
    """Return the whole tensor on every rank; a collective when sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    whole: DTensor = tensor
    if whole.device.type != whole.device_mesh.device_type:
        # Offloaded shards: the group's collectives need tensors on its own device.
        whole = cast(DTensor, whole.to(whole.device_mesh.device_type))
    return whole.full_tensor()
