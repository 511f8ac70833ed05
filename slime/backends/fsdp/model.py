"""An HF causal LM as the trainer sees it: packed tokens in, log-probs of the response tokens out; sharded by FSDP2."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from slime.algorithms.logprobs import chunked_log_probs
from slime.backends.attention import refuse_unsupported, register
from slime.backends.base import HeadFunction, MicroBatch


class PackedCausalLM(nn.Module):
    """Runs the decoder on a packed stream and the output matrix only where a response token is predicted.

    The output matrix is applied inside this forward, because only there FSDP has its full weight gathered.
    """

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm
        head = lm.get_output_embeddings()
        if not isinstance(head, nn.Linear) or head.bias is not None:
            raise ValueError(
                f"{type(lm).__name__}: the output layer is not a plain matrix; packed training needs one."
            )

    def forward(
        self,
        mb: MicroBatch,
        *,
        temperature: float,
        chunk_size: int = -1,
        entropy: bool = False,
        logits: bool = False,
        at_head: HeadFunction | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Log-probs [R], entropy [R] or None, logits [1, T, V] or None, the result of `at_head` or None.

        A tuple, so that FSDP finds the tensors."""
        decoder = self.lm.base_model
        hidden = decoder(
            input_ids=mb.input_ids, position_ids=mb.position_ids, use_cache=False, documents=mb.documents
        ).last_hidden_state[0]
        weight = self.lm.get_output_embeddings().weight
        chosen = hidden.index_select(0, mb.logit_positions)
        log_probs, entropies = chunked_log_probs(
            chosen,
            weight,
            mb.targets,
            temperature=temperature,
            chunk_size=chunk_size,
            with_entropy=entropy,
        )
        full = (hidden @ weight.T)[None].float() / temperature if logits else None
        return log_probs, entropies, full, at_head(chosen, weight, mb) if at_head is not None else None


def load_pretrained(path: str | Path) -> nn.Module:
    """The HF model in fp32 (the master weights) on CPU, on the packed attention."""
    # Heavy import, only needed where a model is built.
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (Path(path) / "config.json").is_file() and Path(path).exists():
        raise ValueError(f"--hf-checkpoint {path}: no config.json there, so it is not a Hugging Face model folder.")
    refuse_unsupported(AutoConfig.from_pretrained(path))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=register())
    model.config.use_cache = False
    return model


def shard(model: PackedCausalLM, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """FSDP2 over the decoder layers and the root: fp32 shards, computation in `compute_dtype`, reduction in fp32."""
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == torch.float32 else compute_dtype,
        reduce_dtype=None if compute_dtype == torch.float32 else torch.float32,
        cast_forward_inputs=False,
    )
    layer_names = set(model.lm._no_split_modules or ())
    for module in list(model.lm.modules()):
        if type(module).__name__ in layer_names:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def local(tensor: Any) -> Tensor:
    """This rank's part of a (possibly sharded) tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def gather_full(tensor: Any) -> Tensor:
    """The whole tensor on every rank; a collective when sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
