"""One process, one tiny model: a trainer, and transformers' own forward to hold it against."""

import torch
from trainer_helpers import trainer_args

PACKINGS = {
    "one by one": dict(micro_batch_size=1),
    "three": dict(micro_batch_size=3),
    "all": dict(micro_batch_size=64),
    "by tokens": dict(use_dynamic_batch_size=True, max_tokens_per_gpu=60),
}
SGD = dict(optimizer="sgd", lr=1.0, weight_decay=0.0, clip_grad=0.0)


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
