"""Megatron's GPT model for packed samples: a stream in, log-probs (or values) of response tokens out."""

from dataclasses import dataclass, replace

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from slime.backends.attention.share import PlaceTokens
from slime.backends.base import HeadFunction, MicroBatch, TokenOutputs
from slime.backends.megatron.modules.mtp import AlsoTrain, mtp_loss
from slime.backends.megatron.modules.vocab_parallel import VocabSlice, gather_vocab, vocab_parallel_log_probs
from slime.backends.megatron.stream import PackedStream


@dataclass(frozen=True, slots=True)
class ModelCall:
    """The computation that the last pipeline stage performs."""

    temperature: float
    chunk_size: int = -1
    entropy: bool = False
    logits: bool = False
    at_head: HeadFunction | None = None
    mtp_scale: float = 0.0  # weight of each token's loss under the MTP heads; 0: they do not run


class ScalarHead(MegatronModule):
    """One row in place of the output matrix, whole on every TP rank: a critic's value, a reward's score."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.weight = nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))


class PackedGPTModel(GPTModel):
    """Computes log-probs from slices of the vocabulary; whole logits exist only if a loss needs them."""

    real_vocab_size: int  # set by the builder: without the rows that pad the vocabulary
    padding_id: int | None = None  # set by the builder: the token whose embedding is not trained, if any
    mtp_losses: list[Tensor]  # set by the builder: sums over micro-batches, until the trainer drains them

    def forward(self, stream: PackedStream, call: ModelCall, mb: MicroBatch) -> Tensor | TokenOutputs:
        """Return hidden states [T_local, 1, H]; on the last stage, outputs of all R response tokens."""
        decoder_input = None
        if self.pre_process:
            decoder_input = self._embed(stream)
            if torch.is_grad_enabled() and not decoder_input.requires_grad:
                # A frozen embedding: the schedules run a backward pass through every stage, trained or not.
                decoder_input.requires_grad_()
        hidden = self.decoder(hidden_states=decoder_input, attention_mask=None, packed_seq_params=stream)
        if not self.post_process:
            return hidden
        if isinstance(self.output_layer, ScalarHead):
            return self._values(hidden, stream)
        outputs = self._outputs(hidden, stream, call, mb)
        if not call.mtp_scale:
            return outputs
        loss = mtp_loss(self, hidden, stream, self.output_matrix(), mb)
        self.mtp_losses.append(loss.detach())
        return replace(outputs, log_probs=AlsoTrain.apply(outputs.log_probs, call.mtp_scale * loss))

    def _embed(self, stream: PackedStream) -> Tensor:
        """Return [T_local, 1, H]. The padding token's embedding is not trained, as in transformers. Its row
        is zero, where the gradient of a norm is in the thousands: one such token in a response would dominate
        the gradient norm, and clipping would shrink the step of all other weights.
        """
        embedded = self.embedding(stream.input_ids, stream.position_ids)
        if self.padding_id is None or not embedded.requires_grad:
            return embedded
        padding = stream.input_ids[0] == self.padding_id
        if self.config.sequence_parallel:
            tp = self.pg_collection.tp
            padding = padding.chunk(tp.size())[tp.rank()]
        return torch.where(padding[:, None, None], embedded.detach(), embedded)

    def _values(self, hidden: Tensor, stream: PackedStream) -> TokenOutputs:
        """Return values of a scalar head; each TP rank computes all, so that no gradient must be summed."""
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        rows = hidden[:, 0].index_select(0, stream.logit_rows)
        values = (rows @ self.output_layer.weight.T).squeeze(-1).float()
        return TokenOutputs.of_scalar_head(self._joined(values, stream))

    def _outputs(self, hidden: Tensor, stream: PackedStream, call: ModelCall, mb: MicroBatch) -> TokenOutputs:
        groups = self.pg_collection
        # Each rank computes the gradient of its slice of the vocabulary; both mappings sum it over the ranks.
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=groups.tp
            )
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=groups.tp)
        hidden = hidden[:, 0]
        matrix = self.output_matrix()
        rows = hidden.index_select(0, stream.logit_rows)
        log_probs, entropies = vocab_parallel_log_probs(
            rows,
            matrix.weight,
            stream.targets,
            group=groups.tp,
            vocab_size=self.real_vocab_size,
            temperature=call.temperature,
            chunk_size=call.chunk_size,
            with_entropy=call.entropy,
            nucleus=stream.nucleus,
        )
        log_probs = self._joined(log_probs, stream)
        if entropies is not None:
            entropies = self._joined(entropies, stream)
        full = extra = None
        if call.logits or call.at_head is not None:
            assert stream.tree is None, "context parallelism is refused for what needs whole samples here"
        if call.logits:
            local = hidden.index_select(0, stream.real) @ matrix.weight.T
            full = gather_vocab(local, groups.tp, self.real_vocab_size)[None].float()
        if call.at_head is not None:
            extra = call.at_head(rows, matrix, mb)
        return TokenOutputs(log_probs=log_probs, entropy=entropies, logits=full, extra=extra)

    def _joined(self, values: Tensor, stream: PackedStream) -> Tensor:
        """Return [R] values of all response tokens from the ones that this context-parallel rank predicts."""
        if stream.tree is None:
            return values
        return PlaceTokens.apply(values, stream.places, stream.num_targets, self.pg_collection.cp)

    def output_matrix(self) -> VocabSlice:
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return VocabSlice(weight, self.pg_collection.tp, self.real_vocab_size)
