"""Megatron's GPT model as the trainer sees it: a packed stream in, log-probs of the response tokens out on the last stage."""

from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from slime.backends.base import TokenOutputs
from slime.backends.context_parallel import place_tokens
from slime.backends.megatron.stream import PackedStream
from slime.backends.megatron.vocab_parallel import gather_vocab, vocab_parallel_log_probs


class PackedGPTModel(GPTModel):
    """Computes log-probs from hidden states and the vocabulary's slice, so that whole logits exist only if asked for."""

    real_vocab_size: int  # set by the builder: without the rows that pad the vocabulary

    def forward(
        self,
        stream: PackedStream,
        *,
        temperature: float,
        chunk_size: int = -1,
        entropy: bool = False,
        logits: bool = False,
    ) -> Tensor | TokenOutputs:
        """Hidden states [T_local, 1, H] on all stages but the last; there TokenOutputs of all R response tokens."""
        decoder_input = self.embedding(stream.input_ids, stream.position_ids) if self.pre_process else None
        hidden = self.decoder(hidden_states=decoder_input, attention_mask=None, packed_seq_params=stream)
        if not self.post_process:
            return hidden
        return self._outputs(hidden, stream, temperature, chunk_size, entropy, logits)

    def _outputs(
        self, hidden: Tensor, stream: PackedStream, temperature: float, chunk_size: int, entropy: bool, logits: bool
    ) -> TokenOutputs:
        groups = self.pg_collection
        # Each rank computes the gradient of its slice of the vocabulary; both mappings sum it over the ranks.
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=groups.tp)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=groups.tp)
        hidden = hidden[:, 0]
        weight = self.output_weight()
        log_probs, entropies = vocab_parallel_log_probs(
            hidden.index_select(0, stream.logit_rows),
            weight,
            stream.targets,
            group=groups.tp,
            vocab_size=self.real_vocab_size,
            temperature=temperature,
            chunk_size=chunk_size,
            with_entropy=entropy,
        )
        if stream.plan is not None:
            log_probs = place_tokens(log_probs, stream.places, stream.num_targets, groups.cp)
            if entropies is not None:
                entropies = place_tokens(entropies, stream.places, stream.num_targets, groups.cp)
        full = None
        if logits:
            assert stream.plan is None, "whole logits are refused with context parallelism when the backend starts"
            local = hidden.index_select(0, stream.real) @ weight.T
            full = gather_vocab(local, groups.tp, self.real_vocab_size)[None].float() / temperature
        return TokenOutputs(log_probs=log_probs, entropy=entropies, logits=full)

    def output_weight(self) -> Any:
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight
