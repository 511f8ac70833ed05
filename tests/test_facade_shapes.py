"""Old names give results of the shapes that users' code
was written against: a wrong one would broadcast silently.
"""

import importlib
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from slime import moved

N, V, B, T = 5, 7, 2, 6
LENGTHS = (3, 4)


def lists(*, mask: bool = False) -> list[Tensor]:
    return [torch.ones(n) if mask else torch.randn(n) for n in LENGTHS]


def flat(count: int = N) -> Tensor:
    return torch.randn(count)


def log_probs(f, tokens: int, **options):
    return f(torch.randn(tokens, V), torch.randint(0, V, (tokens,)), None, **options)


def packed():
    """Two samples one after another, as a loss of the user's own gets them; each has a prompt of 2 tokens."""
    totals = [n + 2 for n in LENGTHS]
    return {
        "logits": torch.randn(1, sum(totals), V),
        "args": SimpleNamespace(rollout_temperature=0.5),
        "unconcat_tokens": [torch.randint(0, V, (n,)) for n in totals],
        "total_lengths": totals,
        "response_lengths": list(LENGTHS),
    }


PER_SAMPLE = [(n,) for n in LENGTHS]

# They hold no functions of tensors.
OTHERS = {
    "slime.backends.megatron_utils",
    "slime.observability.tensorboard_utils",
    "slime.ray",
    "slime.ray.rollout",
    "slime.rollout.sglang_streaming_rollout",
    "slime.utils.external_utils",
    "slime.utils.metric_utils",
    "slime.utils.ray_utils",
    "slime.utils.tensorboard_utils",
    "slime.utils.wandb_utils",
}

# Module -> name -> (a call, the shapes of its result as recorded from
# THUDM/slime 0.3.1); None stands for None.
SHAPES = {
    "slime.backends.megatron_utils.cp_utils": {
        "all_gather_with_cp": (lambda f: f(flat(), 9, N), (N,)),
        "slice_log_prob_with_cp": (lambda f: f(flat(), 9, N), (N,)),
    },
    "slime.backends.megatron_utils.loss": {
        "icepop_function": (
            lambda f: f(
                SimpleNamespace(tis_clip_low=0.5, tis_clip=2.0),
                pg_loss=flat(sum(LENGTHS)),
                train_log_probs=lists(),
                rollout_log_probs=lists(),
                loss_masks=lists(mask=True),
            )[:2],
            ((sum(LENGTHS),), PER_SAMPLE),
        ),
        "get_responses": (lambda f: list(f(**packed())), [((n, V), (n,)) for n in LENGTHS]),
        "get_log_probs_and_entropy": (
            lambda f: [(empty, *out.values()) for empty, out in [f(**packed(), with_entropy=True)]],
            [((0,), PER_SAMPLE, PER_SAMPLE)],
        ),
        "get_rollout_top_p_logprob_kwargs": (
            lambda f: list(
                f(
                    SimpleNamespace(rollout_top_p=0.9),
                    {"rollout_top_p_token_ids": flat(), "rollout_top_p_token_offsets": flat(3)},
                ).values()
            ),
            [(N,), (3,)],
        ),
    },
    "slime.utils.ppo_utils": {
        "compute_approx_kl": (lambda f: f(flat(), flat(), "k3", importance_ratio=flat()), (N,)),
        "compute_policy_loss": (lambda f: f(flat(), flat(), 0.2, 0.28, 3.0), ((N,), (N,))),
        "compute_cispo_loss": (lambda f: f(flat(), flat(), flat(), 0.2, 0.28), ((N,), (N,))),
        "compute_gspo_kl": (lambda f: f(lists(), lists(), lists(), lists(mask=True)), (sum(LENGTHS),)),
        "compute_opsm_mask": (
            lambda f: f(SimpleNamespace(opsm_delta=1e-4), lists(), lists(), lists(), lists(mask=True)),
            ((sum(LENGTHS),), ()),
        ),
        "vanilla_gae": (lambda f: f(torch.randn(B, T), torch.randn(B, T), 0.9, 0.8), ((B, T), (B, T))),
        "chunked_gae": (lambda f: f(torch.randn(B, T), torch.randn(B, T), 0.9, 0.8, 4), ((B, T), (B, T))),
        "chunked_discounted_returns": (lambda f: f(torch.randn(B, T), discount=0.9, chunk_size=4), (B, T)),
        "get_advantages_and_returns_batch": (
            lambda f: f([9, 9], list(LENGTHS), lists(), lists(), 0.9, 0.8, chunked=False),
            (PER_SAMPLE, PER_SAMPLE),
        ),
        "get_grpo_returns": (lambda f: f(torch.ones(2), lists()), PER_SAMPLE),
        "get_reinforce_plus_plus_returns": (
            lambda f: f(torch.ones(2), lists(), lists(mask=True), list(LENGTHS), [9, 9], 0.1, 0.9),
            PER_SAMPLE,
        ),
        "get_reinforce_plus_plus_baseline_advantages": (
            lambda f: f(torch.ones(2), lists(), lists(mask=True), 0.1),
            PER_SAMPLE,
        ),
        "calculate_log_probs_and_entropy": (
            lambda f: [
                log_probs(f, N, with_entropy=True),
                log_probs(f, N, with_entropy=True, chunk_size=2),
                log_probs(f, N, log_prob_keep_mask=torch.ones(N, V, dtype=torch.bool)),
                log_probs(f, 0, with_entropy=True),
            ],
            [((N, 1), (N,)), ((N, 1), (N,)), ((N, 1), None), ((0, 1), (0,))],
        ),
        "compute_log_probs": (lambda f: log_probs(f, N), (N, 1)),
    },
}


def shapes_of(result):
    if isinstance(result, Tensor):
        return tuple(result.shape)
    return None if result is None else type(result)(shapes_of(part) for part in result)


def test_every_name_of_every_facade_has_its_shapes_here():
    exported = {old: {n for names in homes.values() for n in names} for old, homes in moved.FACADES.items()}
    assert exported.keys() >= OTHERS
    tensors = {old: names for old, names in exported.items() if old not in OTHERS}
    assert tensors == {old: set(names) for old, names in SHAPES.items()}


@pytest.mark.parametrize(("old", "name"), [(old, name) for old, names in SHAPES.items() for name in names])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_facade_keeps_the_shapes_of_its_results(old, name):
    call, expected = SHAPES[old][name]
    assert shapes_of(call(getattr(importlib.import_module(old), name))) == expected
