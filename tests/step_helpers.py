"""One process, one tiny model: a trainer, and transformers' own forward to hold it against."""

import torch
from trainer_helpers import trainer_args

from slime.backends.fsdp import create_backend
from slime.backends.fsdp.model import gather_full
from slime.batch.convert import samples_to_batch
from slime.batch.split import split_for_ranks
from slime.step.training_step import TrainingStep

PACKINGS = {
    "one by one": dict(micro_batch_size=1),
    "three": dict(micro_batch_size=3),
    "all": dict(micro_batch_size=64),
    "by tokens": dict(use_dynamic_batch_size=True, max_tokens_per_gpu=60),
}
SGD = dict(optimizer="sgd", lr=1.0, weight_decay=0.0, clip_grad=0.0)


def backend_of(args):
    return create_backend(args, rank=0, world_size=1, device="cpu")


def train(backend, args, samples, rollout_id=0):
    batch = samples_to_batch(args, samples)
    return TrainingStep(backend, args, rollout_id, split_for_ranks(args, batch, 1)[0]).run().summary


def weights_of(backend):
    return {name: gather_full(p.data).clone() for name, p in backend.model.lm.named_parameters()}


def hf_model(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def plain_log_dist(lm, sample):
    """[R, V] log-probs that predict the response tokens, by transformers' own forward."""
    logits = lm(torch.tensor(sample.tokens)[None]).logits[0, :-1]
    return torch.log_softmax(logits, -1)[-sample.response_length :]


def plain_log_probs(lm, sample):
    response = torch.tensor(sample.tokens[-sample.response_length :])
    return plain_log_dist(lm, sample).gather(1, response[:, None]).squeeze(1)


def plain_hidden(lm, sample):
    return lm.base_model(torch.tensor(sample.tokens)[None]).last_hidden_state[0]


def ppo_args(model, **changes):
    return trainer_args(model, advantage_estimator="ppo", gamma=0.9, lambd=0.8, value_clip=0.05, **changes)
