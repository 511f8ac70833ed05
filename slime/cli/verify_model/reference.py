"""Computes the reference values with transformers itself, one document at a time."""

import warnings
from pathlib import Path

import torch
from torch import Tensor

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
    for tokens, response, weights in zip(
        batch["tokens"], batch["response_lengths"], batch["advantages"], strict=True
    ):
        logits = lm(input_ids=tokens[None], use_cache=False).logits[0]
        own, spread = token_values(logits, tokens, response)
        loss = (weights * own).sum()
        loss.backward()
        total += float(loss.detach())
        log_probs.append(own.detach())
        entropy.append(spread.detach())
    changed = [p for p in lm.parameters() if p.grad is not None]
    norm = float(torch.stack([p.grad.double().square().sum() for p in changed]).sum().sqrt())
    with torch.no_grad():
        for parameter in changed:
            parameter.sub_(parameter.grad, alpha=LEARNING_RATE)
    lm.save_pretrained(after)
    trained = dict(read_tensors(all_files(after)))
    return CaseOutcome(log_probs, entropy, total, norm, before, trained, buffers)


def token_values(logits: Tensor, tokens: Tensor, responses: int) -> tuple[Tensor, Tensor]:
    """Return log-prob and entropy of each response token, from the logits [T, V] of one document."""
    table = torch.log_softmax(logits[-responses - 1 : -1].float(), dim=-1)
    own = table.gather(1, tokens[-responses:, None])[:, 0]
    return own, -(table.exp() * table).sum(-1)
