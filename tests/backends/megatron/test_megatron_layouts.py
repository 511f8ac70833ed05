"""Every layout computes what one process does: loss, gradient norm, weights after three GRPO steps.

The reference is the FSDP trainer on one process. Weights are compared after SGD, where a difference in a
gradient stays one; the distributed optimizer knows Adam only, whose weights are compared more loosely.
"""

import pytest
import torch

pytest.importorskip("megatron.core")

from devices import DEVICE, rounding
from megatron_helpers import in_processes, make_family, run_cases

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(1800)]

SGD = dict(optimizer="sgd")
# A large epsilon keeps Adam from turning the rounding of a tiny gradient into a full step.
ADAM = dict(optimizer="adam", lr=1e-3, adam_eps=1e-4)
DIST = dict(ADAM, distopt=True)

ONE = {
    "qwen3": SGD,
    "qwen3 adam": ADAM,
    "tied": SGD,
    "llama": SGD,
    "qwen2": SGD,
    "moe": SGD,
    "moe adam": ADAM,
}
TWO = {
    "qwen3 tp2": dict(SGD, tp=2),
    "qwen3 tp2 sp": dict(SGD, tp=2, sp=True),
    "qwen3 pp2": dict(SGD, pp=2),
    "qwen3 pp2 vpp2": dict(SGD, pp=2, vpp=2),
    "qwen3 cp2": dict(SGD, cp=2),
    "qwen3 dp2 distopt": DIST,
    "qwen3 dp2 distopt overlap": dict(DIST, overlap_grad_reduce=True, overlap_param_gather=True),
    "qwen3 cp2 distopt": dict(DIST, cp=2),
    "qwen3 tp2 sp recompute": dict(SGD, tp=2, sp=True, activation_checkpointing="full"),
    "qwen3 tp2 sp parts": dict(
        SGD,
        tp=2,
        sp=True,
        activation_checkpointing="selective",
        megatron_config={"recompute_modules": ["core_attn", "mlp", "layernorm"]},
    ),
    "qwen3 pp2 uneven": dict(SGD, pp=2, megatron_config={"num_layers_in_first_pipeline_stage": 1}),
    "qwen3 pp2 pattern": dict(SGD, pp=2, megatron_config={"pipeline_model_parallel_layout": "Ettt|tL"}),
    "tied tp2": dict(SGD, tp=2),
    "tied pp2 vpp2": dict(SGD, pp=2, vpp=2),
    "llama tp2 sp": dict(SGD, tp=2, sp=True),
    "llama pp2": dict(SGD, pp=2),
    "qwen2 tp2": dict(SGD, tp=2),
    "qwen2 pp2": dict(SGD, pp=2),
    "moe ep2": dict(SGD, ep=2),
    "moe ep2 allgather": dict(SGD, ep=2, moe_token_dispatcher_type="allgather"),
    "moe ep2 distopt": dict(DIST, ep=2),
    "moe ep2 cp2": dict(SGD, ep=2, cp=2),
    "moe tp2 sp": dict(SGD, tp=2, sp=True),
    "moe tp2 sp ep2": dict(SGD, tp=2, sp=True, ep=2),
    "moe pp2": dict(SGD, pp=2),
    "moe pp2 uneven": dict(SGD, pp=2, megatron_config={"num_layers_in_last_pipeline_stage": 1}),
    "moe ep2 parts": dict(
        SGD,
        ep=2,
        activation_checkpointing="selective",
        megatron_config={"recompute_modules": ["layernorm", "moe"]},
    ),
}
if DEVICE != "cpu":  # gloo cannot gather unequal numbers of tokens
    TWO["moe tp2 sp etp2"] = dict(SGD, tp=2, sp=True, expert_tensor_parallel_size=2)
FOUR = {
    "qwen3 tp2 pp2": dict(SGD, tp=2, pp=2),
    "qwen3 tp2 sp pp2 vpp2": dict(SGD, tp=2, sp=True, pp=2, vpp=2),
    "qwen3 pp2 cp2": dict(SGD, pp=2, cp=2),
    "qwen3 tp2 sp cp2": dict(SGD, tp=2, sp=True, cp=2),
    "qwen3 pp2 dp2 distopt": dict(DIST, pp=2),
    "qwen3 tp4": dict(SGD, tp=4, sp=True),
    "tied tp2 pp2": dict(SGD, tp=2, pp=2),
    "moe ep2 pp2": dict(SGD, ep=2, pp=2),
    "moe ep4 tp2 sp": dict(SGD, ep=4, tp=2, sp=True),
    "moe ep2 dp2 distopt": dict(DIST, ep=2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def models(folder):
    return {
        "qwen3": make_family(folder / "qwen3", "qwen3"),
        "tied": make_family(folder / "tied", "qwen3", tie_word_embeddings=True),
        "llama": make_family(folder / "llama", "llama"),
        "qwen2": make_family(folder / "qwen2", "qwen2"),
        "moe": make_family(folder / "moe", "qwen3_moe"),
    }


def cases_of(models, table, prefix="", **extra):
    return {
        prefix + name: (models[name.split()[0]], {**settings, **extra}) for name, settings in table.items()
    }


@pytest.fixture(scope="module")
def one(folder, models):
    cases = cases_of(models, ONE, "fsdp ", fsdp=True) | cases_of(models, ONE)
    return in_processes(1, run_cases, folder, cases)


@pytest.fixture(scope="module")
def two(folder, models):
    return in_processes(2, run_cases, folder, cases_of(models, TWO))


@pytest.fixture(scope="module")
def four(folder, models):
    return in_processes(4, run_cases, folder, cases_of(models, FOUR))


def reference_of(one, name, table):
    adam = " adam" if table[name]["optimizer"] == "adam" else ""
    return one["fsdp " + name.split()[0] + adam]


def check(found, reference, *, adam):
    for (loss, norm), (expected_loss, expected_norm) in zip(found["steps"], reference["steps"], strict=True):
        assert loss == pytest.approx(expected_loss, abs=rounding(2e-5, 2e-4))
        assert norm == pytest.approx(expected_norm, rel=rounding(1e-4, 1e-3))
    assert found["entropy"] == pytest.approx(reference["entropy"], abs=rounding(1e-5, 1e-4))
    assert found["before"].keys() == reference["before"].keys() == found["after"].keys()
    for name, tensor in reference["before"].items():
        assert torch.equal(found["before"][name], tensor), f"export differs from import: {name}"
    limit = rounding(1e-5 if adam else 1e-6, 1e-4)
    for name, tensor in reference["after"].items():
        torch.testing.assert_close(
            found["after"][name], tensor, rtol=0, atol=limit, msg=lambda m, n=name: f"{n}: {m}"
        )
    moved = max((reference["after"][n] - reference["before"][n]).abs().max() for n in reference["after"])
    assert moved > 1e-3, "the steps must change the weights for this comparison to mean something"


@pytest.mark.parametrize("name", ONE)
def test_one_process_equals_fsdp(one, name):
    check(one[name], one["fsdp " + name], adam="adam" in name)


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_equal_one(one, two, name):
    check(two[name], reference_of(one, name, TWO), adam=TWO[name]["optimizer"] == "adam")


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_equal_one(one, four, name):
    check(four[name], reference_of(one, name, FOUR), adam=FOUR[name]["optimizer"] == "adam")


def test_a_perturbed_weight_is_noticed(one):
    """The comparison can fail: one element of one norm, changed by a hundredth."""
    changed = dict(one["qwen3"])
    name = "model.layers.2.self_attn.k_norm.weight"
    changed["after"] = {**changed["after"], name: changed["after"][name] + torch.eye(16)[0] * 1e-2}
    with pytest.raises(AssertionError, match=r"k_norm"):
        check(changed, one["fsdp qwen3"], adam=False)
