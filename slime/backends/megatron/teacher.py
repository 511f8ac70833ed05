"""A frozen teacher of another size than the policy, sharded over the ranks in the same way."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.arguments import Args
from slime.backends.base import Layout, MicroBatch
from slime.backends.families import dims_of, family_of
from slime.backends.megatron.config import (
    architecture,
    check_layout,
    read_hf_config,
    rotary_embedding,
    transformer_config,
)
from slime.backends.megatron.modules.builder import build_chunks
from slime.backends.megatron.modules.model import ModelCall, PackedGPTModel
from slime.backends.megatron.modules.te_attention import choose_attention
from slime.backends.megatron.modules.vocab_parallel import VocabSlice
from slime.backends.megatron.passes import Passes
from slime.backends.megatron.weights import HubWeights


class TeacherModel:
    """A frozen model, in host memory between passes. All ranks call its methods together."""

    def __init__(
        self, args: Args, path: str | Path, layout: Layout, dtype: torch.dtype, device: torch.device
    ) -> None:
        hf_config = read_hf_config(str(path))
        args = _for_model(args, hf_config)
        check_layout(args, hf_config, world_size=torch.distributed.get_world_size(), device=device)
        config = transformer_config(args, hf_config, dtype, device)
        self.chunks = build_chunks(
            config, hf_config, device, attention=choose_attention(args, config, device)
        )
        tied = bool(hf_config.tie_word_embeddings)
        HubWeights(self.chunks, family_of(hf_config), dims_of(hf_config), tied=tied).load(path, hf_config)
        for chunk in self.chunks:
            chunk.requires_grad_(False).eval()
        self._device = device
        self._passes = Passes(self.chunks, config, rotary_embedding(hf_config).to(device), layout, device)
        self._move("cpu")

    @torch.no_grad()
    def forward(self, mbs: list[MicroBatch], call: ModelCall) -> list[dict[str, Tensor]] | None:
        self._move(self._device)
        try:
            return self._passes.forward(mbs, call)
        finally:
            self._move("cpu")

    def output_matrix(self) -> VocabSlice | None:
        return output_matrix_of(self.chunks, self._device)

    def _move(self, device: torch.device | str) -> None:
        for chunk in self.chunks:
            chunk.to(device)


def critic_args(args: Args) -> Args:
    """Return settings of a critic of another model, for which flags about the policy's model do not apply."""
    given = args.critic_overrides.get("megatron_config", {})
    args = _for_model(args, read_hf_config(args.hf_checkpoint))
    return args.replace(megatron_config={**args.megatron_config, **given})


def _for_model(args: Args, hf_config: Any) -> Args:
    """Return `args` without flags that describe the policy's architecture."""
    described = architecture(hf_config)
    fields = {name: value for name, value in args.megatron_config.items() if name not in described}
    if "num_moe_experts" in family_of(hf_config).settings(hf_config):
        return args.replace(megatron_config=fields)
    return args.replace(
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=1,
        use_routing_replay=False,
        use_rollout_routing_replay=False,
        megatron_config={name: value for name, value in fields.items() if not name.startswith("moe_")},
    )


@torch.no_grad()
def output_matrix_of(chunks: Sequence[PackedGPTModel], device: torch.device) -> VocabSlice | None:
    """Return this rank's rows of the output matrix on `device`; None on a stage without it."""
    last = chunks[-1]
    if not last.post_process:
        return None
    matrix = last.output_matrix()
    return VocabSlice(matrix.weight.detach().to(device, copy=True), matrix.group, matrix.vocab_size)
