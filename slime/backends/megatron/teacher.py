"""A model beside the trained one that never trains: a teacher of another size, cut over the ranks in the same way."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slime.backends.base import Layout, MicroBatch
from slime.backends.megatron.builder import build_chunks
from slime.backends.megatron.config import check_layout, dims_of, read_hf_config, rotary_embedding, transformer_config
from slime.backends.megatron.families import family_of
from slime.backends.megatron.model import ModelCall, PackedGPTModel
from slime.backends.megatron.passes import Passes
from slime.backends.megatron.vocab_parallel import VocabSlice
from slime.backends.megatron.weights import HubWeights


class FrozenModel:
    """Weights without gradients and without an optimizer. Methods are called by all ranks together."""

    def __init__(self, args: Any, path: str | Path, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        hf_config = read_hf_config(str(path))
        check_layout(args, hf_config, world_size=torch.distributed.get_world_size(), device=device)
        config = transformer_config(args, hf_config, dtype, device)
        self.chunks = build_chunks(config, hf_config, device)
        tied = bool(hf_config.tie_word_embeddings)
        HubWeights(self.chunks, family_of(hf_config), dims_of(hf_config, config), tied=tied).load(path)
        for chunk in self.chunks:
            chunk.requires_grad_(False).eval()
        self._passes = Passes(self.chunks, config, rotary_embedding(hf_config).to(device), layout, device)

    @torch.no_grad()
    def forward(self, mbs: list[MicroBatch], call: ModelCall) -> list[dict[str, Tensor]] | None:
        return self._passes.forward(mbs, call)


@torch.no_grad()
def output_matrix_of(chunks: list[nn.Module]) -> VocabSlice | None:
    """A copy of this rank's rows of the output matrix; None on a pipeline stage without it."""
    last: PackedGPTModel = chunks[-1]
    if not last.post_process:
        return None
    matrix = last.output_matrix()
    return VocabSlice(matrix.weight.detach().clone(), matrix.group, matrix.vocab_size)
