"""Computes the reference values with transformers itself, one document at a time."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slime.backends.fsdp.layer_execution import decoder_layers
from slime.cli.verify_model import layer_capture
from slime.cli.verify_model.cases import LEARNING_RATE, Activations, CaseOutcome, buffers_of, documents
from slime.utils.files.safetensors_files import all_files, read_tensors


def be_quiet() -> None:
    """Switch off progress bars and warnings of libraries."""
    # Heavy import, only needed here.
    from transformers.utils import logging

    warnings.simplefilter("ignore")
    logging.disable_progress_bar()


def compute(model: Path, after: Path, vocabulary: int) -> CaseOutcome:
    """Compute log-probs, gradients and one step of SGD; save the new weights in `after`."""
    # Heavy import, only needed here.
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    batch = documents(vocabulary)
    before, buffers = read_weights(model), buffers_of(lm)
    activations: Activations = {}
    log_probs, entropy, total = [], [], 0.0
    for number, tokens in enumerate(batch["tokens"]):
        with _captured(lm, number, activations):
            logits = lm(input_ids=tokens[None], use_cache=False).logits[0]
        own, spread = token_values(logits, tokens, batch["response_lengths"][number])
        loss = (batch["advantages"][number] * own).sum()
        loss.backward()
        total += float(loss.detach())
        log_probs.append(own.detach())
        entropy.append(spread.detach())
    gradients = [p.grad for p in lm.parameters() if p.grad is not None]
    norm = float(torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt())
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=LEARNING_RATE)
    lm.save_pretrained(after)
    return CaseOutcome(log_probs, entropy, total, norm, before, read_weights(after), activations, buffers)


def token_values(logits: Tensor, tokens: Tensor, responses: int) -> tuple[Tensor, Tensor]:
    """Return log-prob and entropy of each response token, from the logits [T, V] of one document."""
    table = torch.log_softmax(logits[-responses - 1 : -1].float(), dim=-1)
    own = table.gather(1, tokens[-responses:, None])[:, 0]
    return own, -(table.exp() * table).sum(-1)


class _captured:
    """Captures activations during one pass over one document."""

    def __init__(self, lm: nn.Module, document: int, found: Activations) -> None:
        self._lm, self._document, self._found = lm, document, found

    def __enter__(self) -> None:
        self._handles = []
        for number, layer in enumerate(decoder_layers(self._lm)):
            modules = {
                layer_capture.OUTPUT: layer,
                **{part: getattr(layer, part, None) for part in layer_capture.PARTS},
            }
            for part, module in modules.items():
                if module is not None:
                    self._handles.append(module.register_forward_hook(self._keep(number, part)))

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _keep(self, layer: int, part: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            value = (output[0] if isinstance(output, tuple) else output).detach()
            self._found[self._document, layer, part] = value.reshape(-1, value.shape[-1]).float().clone()

        return hook


def read_weights(folder: Path) -> dict[str, Tensor]:
    return dict(read_tensors(all_files(folder)))
