"""Finds out from a causal LM of transformers how it can run on packed documents.

Most families compute attention by a registered function, and so run packed. Layers that carry a state from
token to token (gated delta nets, Mamba, short convolutions) receive documents as the rows of a batch, so that
no state passes from one document to the next. Families with attention code of their own run on one padded
batch of documents, which is slower but correct. Post-processing of logits is found by running the family's
own code with decoder and output matrix replaced.
"""

import contextlib
import inspect
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from slime.backends.attention.documents import PackedDocuments
from slime.backends.attention.packed_documents import (
    ATTENTION_NAME,
    DOCUMENTS,
    by_document,
    register,
)
from slime.backends.base import MicroBatch
from slime.backends.fsdp import vision
from slime.backends.fsdp.layer_execution import HFModel
from slime.batch.flops import EXPERT_COUNTS
from slime.catalog.vision import why_no_images

# Modules [B, T, H] -> [B, T, H] whose result for a token depends on earlier tokens and needs no mask.
_STATEFUL = re.compile(r"(GatedDeltaNet|DeltaAttention|Mamba2?Mixer|H1Mixer|ShortConv)$")
_STATES = frozenset(("linear_attention", "conv", "mamba", "hybrid"))  # kinds of layers that carry a state
_PACKED_LAYERS = _STATES | {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "attention",
    "mlp",
    "moe",
}


NO_DECODER = "is no decoder"
# Types that differ from transformers by `slime verify-model --families`, and why.
_WRONG = {
    "cpmant": "its attention sees padding",
    "zaya": "the gradient of its balancing biases differs",
}


class NotTrainable(ValueError):
    """A family that this trainer would compute wrongly; the message says why."""


def build(config: Any) -> HFModel:
    """Build the family's causal LM on the current torch device, in fp32, prepared for documents."""
    # Heavy import, only needed where a model is built.
    from transformers import AutoModelForCausalLM

    if vision.family_of(config) is not None:
        return vision.build(config)
    own = config.get_text_config()
    # Some causal families have the field but ignore it.
    reads = "self.is_decoder" in _source(AutoModelForCausalLM._model_mapping.get(type(config), type(config)))
    if getattr(own, "is_encoder_decoder", False) or (reads and getattr(own, "is_decoder", True) is False):
        raise NotTrainable(
            f"{own.model_type} {NO_DECODER} (its config says so): only causal language models are trained."
        )
    if own.model_type in _WRONG:
        raise NotTrainable(f"{own.model_type} would not train exactly: {_WRONG[own.model_type]}.")
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    lm.config.use_cache = False
    if _can_run_packed(lm):
        lm.config._attn_implementation = register()
        for module in stateful_modules(lm):
            module.forward = types.MethodType(_each_document_alone(type(module).forward), module)
    return lm


def _source(kind: type) -> str:
    """Return the source code of the file that defines a class."""
    return inspect.getsource(inspect.getmodule(kind) or kind)


def _can_run_packed(lm: HFModel) -> bool:
    """Return whether all layers mix tokens by a registered attention function or by a known state."""
    kinds = set(vars(lm.config.get_text_config()).get("layer_types") or ())
    if "ALL_ATTENTION_FUNCTIONS" not in _source(type(decoder(lm))) or kinds - _PACKED_LAYERS:
        return False
    convolving = [m for m in lm.modules() if any(isinstance(part, nn.Conv1d) for part in m.children())]
    has_state = bool(stateful_modules(lm))
    packs = has_state or (lm._supports_attention_backend and not kinds & _STATES)
    keywords = inspect.signature(decoder(lm).forward).parameters.values()
    takes_more = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in keywords)
    return packs and takes_more and all(is_stateful(module) for module in convolving)


def decoder(lm: HFModel) -> Any:
    """Return the causal LM without its output matrix; some families do not name theirs."""
    return lm.base_model if lm.base_model is not lm else lm.model


def runs_packed(lm: HFModel) -> bool:
    return bool(lm.config.get_text_config()._attn_implementation == ATTENTION_NAME)


def is_stateful(module: nn.Module) -> bool:
    return _STATEFUL.search(type(module).__name__) is not None


def stateful_modules(lm: HFModel) -> list[Any]:
    return [module for module in lm.modules() if is_stateful(module)]


def needs_whole_documents(lm: HFModel) -> bool:
    """Return whether a rank must have all tokens of a document: for a state or for foreign attention."""
    return not runs_packed(lm) or bool(stateful_modules(lm))


def has_experts(config: Any) -> bool:
    return any(vars(config).get(name) for name in EXPERT_COUNTS)


def _each_document_alone(forward: Any) -> Any:
    def run(module: nn.Module, hidden_states: Tensor, *_rest: Any, **_options: Any) -> Any:
        def on_rows(batch: Tensor) -> Tensor:
            output = forward(module, batch)
            result: Tensor = output[0] if isinstance(output, tuple) else output
            return result

        documents: PackedDocuments = getattr(module, DOCUMENTS)
        return by_document(documents, on_rows, hidden_states[0])[None]

    return run


def run_whole(lm: HFModel, mb: MicroBatch) -> Tensor:
    """Return hidden states [T, H] of a micro-batch that context parallelism does not split."""
    if vision.family_of(lm.config) is not None:
        return vision.run_stream(lm, mb)
    if mb.media:
        raise NotTrainable(f"samples have images, and {why_no_images(lm.config.model_type)}.")
    if not runs_packed(lm):
        return _run_padded(lm, mb)
    return run_stream(lm, mb.input_ids, mb.position_ids, mb.documents)


def can_share_prefixes(lm: HFModel) -> bool:
    """Return whether tokens see earlier ones by attention alone, so that a stream can be rearranged."""
    return runs_packed(lm) and not needs_whole_documents(lm) and vision.family_of(lm.config) is None


def run_stream(lm: HFModel, input_ids: Tensor, position_ids: Tensor, documents: Any) -> Tensor:
    """Hidden states [T, H] of a packed stream, or of a rank's share of one."""
    for module in lm.modules():
        # Not all families pass keyword arguments on to every layer.
        if is_stateful(module) or "Attention" in type(module).__name__:
            setattr(module, DOCUMENTS, documents)
    out = decoder(lm)(input_ids=input_ids, position_ids=position_ids, use_cache=False, documents=documents)
    hidden: Tensor = out.last_hidden_state[0]
    return hidden


def _run_padded(lm: HFModel, mb: MicroBatch) -> Tensor:
    """Run documents as rows of one batch, padded on the right, where causal layers do not see it."""
    lengths = torch.tensor(mb.documents.lengths, device=mb.input_ids.device)
    column = torch.arange(mb.documents.longest, device=lengths.device)
    real = column < lengths[:, None]
    starts = lengths.cumsum(0) - lengths
    rows = mb.input_ids[0][starts[:, None] + torch.where(real, column, 0)]
    out = decoder(lm)(input_ids=rows, attention_mask=real.long(), use_cache=False)
    hidden: Tensor = out.last_hidden_state[real]
    return hidden


# -- the output layer ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OutputLayer:
    """Logits: softcap x tanh(factor x hidden @ weight.T / softcap), or the product if there is no cap."""

    factor: float = 1.0
    softcap: float | None = None


def output_layer(lm: HFModel) -> OutputLayer:
    """Return how the family turns hidden states into logits, found by sending a few numbers through it."""
    head = lm.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise NotTrainable(
            f"{type(lm).__name__}: its output layer is not a matrix; no log-probs can be computed in blocks."
        )
    small = torch.tensor([1e-3, 0.5, 3.0, 40.0, 1e6])
    try:
        with torch.no_grad(), _only_the_head(lm, small) as options:
            found = lm(**options).logits.flatten().double()
    except Exception as error:  # a family's code may raise anything on such a model
        raise NotTrainable(
            f"{type(lm).__name__}: its change of the logits cannot be determined ({type(error).__name__})."
        ) from error
    factor = float(found[0] / small[0].double())
    capped = bool(found[-1] < factor * float(small[-1]) / 2)
    output = OutputLayer(factor, float(found[-1]) if capped else None)
    expected = output.factor * small.double()
    if output.softcap is not None:
        # The cap changes even the smallest number slightly.
        expected = output.softcap * torch.tanh(expected / output.softcap)
    if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-4):
        raise NotTrainable(f"{type(lm).__name__} changes its logits in a way that slime does not support.")
    return OutputLayer(1.0 if abs(factor - 1) < 1e-5 else factor, output.softcap)


class _DecoderOutput(tuple):
    """A decoder's output that contains only hidden states, under whatever name a family reads."""

    def __new__(cls, hidden: Tensor) -> "_DecoderOutput":
        return super().__new__(cls, (hidden,))

    def __getattr__(self, name: str) -> Any:
        return self[0] if name == "last_hidden_state" else None


@contextlib.contextmanager
def _only_the_head(lm: HFModel, values: Tensor) -> Iterator[dict[str, Any]]:
    """Return arguments with which the decoder gives `values` and the output matrix returns its input. Sizes
    are wrong for the model, but only its last lines run.
    """
    head, output = lm.get_output_embeddings(), _DecoderOutput(values[None, None])
    bodies = {id(body): body for body in (decoder(lm), lm.get_decoder()) if body is not lm}
    stand_ins = [(body, lambda *_args, **_options: output) for body in bodies.values()]
    with contextlib.ExitStack() as stack:
        for module, stand_in in [*stand_ins, (head, lambda hidden, *_args, **_options: hidden)]:
            stack.enter_context(mock.patch.object(module, "forward", stand_in))
        yield {"input_ids": torch.zeros(1, 1, dtype=torch.int64), "use_cache": False}
