"""Computes the reference values with transformers itself, one document at a time."""

import warnings
from pathlib import Path

import torch
from torch import Tensor

from slime.backends.fsdp.layer_execution import decoder_layers
from slime.backends.shared.microbatch import build_micro_batch
from slime.cli.verify_model import layer_capture
from slime.cli.verify_model.cases import LEARNING_RATE, CaseOutcome, buffers_of, documents
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
    before, buffers = dict(read_tensors(all_files(model))), buffers_of(lm)
    log_probs, entropy, total = [], [], 0.0
    numbers = range(len(batch["tokens"]))
    mbs = [build_micro_batch(batch, [number]) for number in numbers]
    layers = list(enumerate(decoder_layers(lm)))
    with layer_capture.recording(layers, mbs, numbers, layer_capture.whole_stream) as pieces:
        for number, mb in enumerate(mbs):
            logits = lm(input_ids=mb.input_ids, use_cache=False).logits[0]
            own, spread = token_values(logits, mb.input_ids[0], batch["response_lengths"][number])
            loss = (batch["advantages"][number] * own).sum()
            loss.backward()
            total += float(loss.detach())
            log_probs.append(own.detach())
            entropy.append(spread.detach())
    activations = {(piece.documents[0], piece.layer, piece.part): piece.values for piece in pieces}
    changed = [p for p in lm.parameters() if p.grad is not None]
    norm = float(torch.stack([p.grad.double().square().sum() for p in changed]).sum().sqrt())
    with torch.no_grad():
        for parameter in changed:
            parameter.sub_(parameter.grad, alpha=LEARNING_RATE)
    lm.save_pretrained(after)
    trained = dict(read_tensors(all_files(after)))
    return CaseOutcome(log_probs, entropy, total, norm, before, trained, activations, buffers)


def token_values(logits: Tensor, tokens: Tensor, responses: int) -> tuple[Tensor, Tensor]:
    """Return log-prob and entropy of each response token, from the logits [T, V] of one document."""
    table = torch.log_softmax(logits[-responses - 1 : -1].float(), dim=-1)
    own = table.gather(1, tokens[-responses:, None])[:, 0]
    return own, -(table.exp() * table).sum(-1)
