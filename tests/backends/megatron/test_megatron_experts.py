"""Mixtures of experts: balance losses, load statistics and replayed experts, on every layout.

The reference is one process; what one process computes is compared with the FSDP trainer (load) and with a
forward pass of transformers whose router losses are written out (balance).
"""

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core")

from devices import DEVICE
from megatron_helpers import (
    GRPO,
    end_groups,
    exported,
    in_processes,
    make_family,
    megatron_args,
    training_step,
)
from trainer_helpers import random_samples

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(1800)]

# One sample per micro-batch: sets that are balanced over are the same however samples are spread over ranks.
BASE = dict(GRPO, optimizer="sgd", weight_decay=0.0, use_dynamic_batch_size=False, max_tokens_per_gpu=None)
LOSSES = dict(megatron_config={"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.01})
BY_SAMPLE = dict(
    megatron_config={"moe_aux_loss_coeff": 0.5, "moe_router_load_balancing_type": "seq_aux_loss"},
    micro_batch_size=5,
)
ENGINE = dict(use_rollout_routing_replay=True)
OLD = dict(use_routing_replay=True)
SETTINGS = {"plain": {}, "losses": LOSSES, "by sample": BY_SAMPLE, "engine": ENGINE, "old": OLD}
TWO = {
    "ep2": dict(ep=2),
    "ep2 allgather": dict(ep=2, moe_token_dispatcher_type="allgather"),
    "tp2 sp": dict(tp=2, sp=True),
    "tp2 sp recompute": dict(tp=2, sp=True, activation_checkpointing="full"),
    "pp2": dict(pp=2),
    "pp2 recompute": dict(pp=2, activation_checkpointing="full"),
    "cp2": dict(cp=2),
}
CASES = [(name, layout) for layout in TWO for name in SETTINGS]


def routed_samples():
    """Samples with random experts, two different ones per token and layer: no router's own choice."""
    samples = random_samples(5, 3, vocab=127)
    generator = np.random.default_rng(0)
    for sample in samples:
        draws = [generator.permutation(4)[:2] for _ in range((len(sample.tokens) - 1) * 4)]
        sample.rollout_routed_experts = np.array(draws, dtype=np.int32).reshape(-1, 4, 2)
    return samples


def train_case(rank, world_size, model, settings, create):
    args = megatron_args(model, **(BASE | settings))
    end_groups()
    backend = create(args, rank=rank, world_size=world_size, device=DEVICE)
    steps = training_step(backend, args, routed_samples()).run().steps
    names = (
        "train/loss",
        "train/grad_norm",
        "train/moe_aux_loss",
        "train/moe_z_loss",
        "train/moe_load_max_over_mean",
    )
    return {"steps": [{n: s[n] for n in names if n in s} for s in steps], "after": exported(backend)}


def run_all(rank, world_size, model, cases):
    from slime.backends import fsdp, megatron

    kinds = {"fsdp": fsdp, "megatron": megatron}
    return {
        name: train_case(rank, world_size, model, settings, kinds[kind].create_backend)
        for name, (settings, kind) in cases.items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module")
def model(folder):
    return make_family(folder / "moe", "qwen3_moe")


@pytest.fixture(scope="module")
def one(folder, model):
    # FSDP first: the patches that let megatron-core run without CUDA stay in the process.
    cases = {"fsdp": ({}, "fsdp")} | {name: (settings, "megatron") for name, settings in SETTINGS.items()}
    return in_processes(1, run_all, folder, model, cases)


@pytest.fixture(scope="module")
def two(folder, model):
    cases = {(name, layout): ({**SETTINGS[name], **TWO[layout]}, "megatron") for name, layout in CASES}
    return in_processes(2, run_all, folder, model, cases)


def check(found, reference):
    assert len(found["steps"]) == len(reference["steps"]) == 3
    for step, expected in zip(found["steps"], reference["steps"], strict=True):
        assert step.keys() == expected.keys()
        for name, value in expected.items():
            assert step[name] == pytest.approx(value, rel=1e-4, abs=2e-5), name
    for name, tensor in reference["after"].items():
        torch.testing.assert_close(
            found["after"][name], tensor, rtol=0, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(("name", "layout"), CASES, ids=lambda value: value.replace(" ", "-"))
def test_layouts_agree_on_losses_and_replayed_experts(one, two, name, layout):
    check(two[name, layout], one[name])


def test_load_of_experts_is_that_of_fsdp(one):
    check(one["plain"], one["fsdp"])
    assert one["plain"]["steps"][0]["train/moe_load_max_over_mean"] > 1.0


def test_each_setting_changes_what_is_learned(one):
    norms = {
        name: one[name]["steps"][0]["train/grad_norm"] for name in ("plain", "losses", "by sample", "engine")
    }
    assert len({round(norm, 4) for norm in norms.values()}) == 4
    # The first step of a replayed old policy is the policy itself; later steps keep to its experts.
    assert one["old"]["steps"][0]["train/grad_norm"] == pytest.approx(norms["plain"], rel=1e-6)


def balance_by_hand(rank, world_size, model):
    """Gradients of the router losses alone, here and by transformers with the formulas written out."""
    samples = random_samples(2, 2, vocab=127)
    by_hand = formulas(
        model, samples
    )  # first: the patches that let megatron-core run without CUDA stay in the process

    from slime.backends.base import Denominators, Loss
    from slime.backends.megatron import create_backend
    from slime.backends.shared.microbatch import build_micro_batches
    from slime.batch.convert import samples_to_batch

    args = megatron_args(model, **(BASE | LOSSES), clip_grad=0.0)
    backend = create_backend(args, rank=rank, world_size=world_size, device=DEVICE)
    mbs = build_micro_batches(samples_to_batch(args, samples), [[0, 1], [2, 3]])
    before = exported(backend)
    stats = backend.train_step(mbs, Loss(lambda out, mb: (0.0 * out.log_probs.sum(), {})), Denominators(1, 1))
    after = exported(backend)
    gate = "model.layers.1.mlp.gate.weight"
    return {"moved": (before[gate] - after[gate]) / args.lr, "metrics": stats.metrics, **by_hand}


def formulas(model, samples):
    """Both losses over micro-batches of two samples, and the gradient of one router."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    total = sum(len(sample.tokens) for sample in samples)
    loss = balance = z = 0.0
    for pair in (samples[:2], samples[2:]):
        logits = [
            lm(torch.tensor(sample.tokens)[None], output_router_logits=True).router_logits for sample in pair
        ]
        for layer in range(4):
            scores = torch.cat([per_sample[layer] for per_sample in logits])
            count = len(scores)
            ones = torch.ones(2 * count)
            share = torch.zeros(4).index_add_(0, scores.topk(2).indices.flatten(), ones) / (2 * count)
            here = 4 * (share * scores.softmax(-1).mean(0)).sum() * count / total
            there = scores.logsumexp(-1).square().sum() / total
            loss, balance, z = loss + 0.5 * here + 0.01 * there, balance + here.item(), z + there.item()
    loss.backward()
    grads = dict(lm.named_parameters())
    return {"grad": grads["model.layers.1.mlp.gate.weight"].grad, "balance": balance / 4, "z": z / 4}


def test_balance_losses_are_the_formulas(folder, model):
    found = in_processes(1, balance_by_hand, folder, model)
    assert found["metrics"]["moe_aux_loss"] == pytest.approx(found["balance"], rel=1e-5)
    assert found["metrics"]["moe_z_loss"] == pytest.approx(found["z"], rel=1e-5)
    assert found["grad"].abs().max() > 1e-4
    torch.testing.assert_close(found["moved"], found["grad"], rtol=1e-3, atol=2e-6)


def bad_choices(rank, world_size, model):
    from slime.backends.megatron import create_backend
    from slime.backends.shared.microbatch import build_micro_batches
    from slime.batch.convert import samples_to_batch

    args = megatron_args(model, **(BASE | ENGINE))
    backend = create_backend(args, rank=rank, world_size=world_size, device=DEVICE)

    def message(change):
        samples = routed_samples()[:2]
        for sample in samples:
            change(sample)
        try:
            batch = samples_to_batch(args, samples)
            backend.log_probs(build_micro_batches(batch, [[0, 1]], replay=True))
        except ValueError as error:
            return str(error)
        return "nothing was refused"

    def routed(change):
        return lambda sample: setattr(sample, "rollout_routed_experts", change(sample.rollout_routed_experts))

    return {
        "none": message(routed(lambda experts: None)),
        "rows": message(routed(lambda experts: experts[1:])),
        "layers": message(routed(lambda experts: experts[:, :3])),
        "number": message(routed(lambda experts: experts + 4)),
    }


def test_experts_that_do_not_fit_are_refused(folder, model):
    found = in_processes(1, bad_choices, folder, model)
    assert "the samples carry no rollout_routed_experts" in found["none"]
    assert "an engine records all but the last" in found["rows"]
    assert "Engines and trainer must run the same model" in found["layers"]
    assert "with expert 7 among them" in found["number"]
