"""Adapters on Megatron take the steps that they take on FSDP and by hand, on every layout, and leave as peft
has them.
"""

import json
import re

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.dist_checkpointing import load_tensors_metadata
from megatron_families import make_checkpoint
from megatron_helpers import GRPO, in_processes, make_family, megatron_args
from megatron_lora import ATTENTION, LORA, adapters_of, lora_cases, obvious_steps, simple_steps
from trainer_helpers import init_process_group, random_samples

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(1800)]

ADAM = dict(optimizer="adam", lr=1e-3, adam_eps=1e-4)
PART = dict(lora_target_modules=["q_proj", "up_proj", "self_attn.o_proj"])
LATENT = dict(lora_target_modules=["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"])
DELTA = dict(lora_target_modules=["q_proj", "in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj", "o_proj"])
ONE = {
    "qwen3": dict(save="qwen3-hf"),
    "qwen3 part": PART,
    "qwen3 adam": ADAM,
    "tied": {},
    "glm4": {},
    "moe": dict(save="moe-hf"),
    "moe attention": ATTENTION,
    "deepseek_v3": {},
    "deepseek_v3 attention": LATENT,
    "minimax_m2": {},
    "glm_moe_dsa": {},
    "qwen3_5": DELTA,
}
# Where no adapter is on experts: there both trainers have the same layers.
ON_FSDP = [name for name in ONE if name not in ("moe", "deepseek_v3", "minimax_m2", "glm_moe_dsa")]
TWO = {
    "qwen3 tp2": dict(tp=2),
    "qwen3 tp2 sp": dict(tp=2, sp=True),
    "qwen3 pp2": dict(pp=2),
    "qwen3 pp2 vpp2": dict(pp=2, vpp=2),
    "qwen3 cp2": dict(cp=2),
    "qwen3 tp2 sp recompute": dict(tp=2, sp=True, activation_checkpointing="full"),
    "qwen3 part tp2": dict(PART, tp=2),
    "qwen3 adam dp2": dict(ADAM, distopt=True, overlap_grad_reduce=True, overlap_param_gather=True),
    "tied pp2": dict(pp=2),
    "glm4 tp2 sp": dict(tp=2, sp=True),
    "moe tp2 sp": dict(tp=2, sp=True),
    "moe tp2 sp ep2": dict(tp=2, sp=True, ep=2),
    "moe ep2": dict(ep=2),
    "moe pp2": dict(pp=2),
    "deepseek_v3 tp2 sp ep2": dict(tp=2, sp=True, ep=2),
    "deepseek_v3 attention tp2 sp": dict(LATENT, tp=2, sp=True),
    "minimax_m2 tp2 sp ep2": dict(tp=2, sp=True, ep=2),
    "glm_moe_dsa tp2 sp": dict(tp=2, sp=True),
    "qwen3_5 tp2 sp": dict(DELTA, tp=2, sp=True),
}
FOUR = {
    "qwen3 tp4": dict(tp=4, sp=True),  # more ranks than key-value heads
    "qwen3 tp2 sp pp2 vpp2": dict(tp=2, sp=True, pp=2, vpp=2),
    "qwen3 tp2 cp2": dict(tp=2, cp=2),
    "moe ep2 pp2": dict(ep=2, pp=2),
    "moe ep4 tp2 sp": dict(ep=4, tp=2, sp=True),
    "moe ep2 tp2 sp cp2": dict(ep=2, tp=2, sp=True, cp=2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def models(folder):
    return {
        "qwen3": make_family(folder / "qwen3", "qwen3"),
        "tied": make_family(folder / "tied", "qwen3", tie_word_embeddings=True),
        "moe": make_family(folder / "moe", "qwen3_moe"),
        "glm4": make_checkpoint(folder, "glm4")[1],
        **{name: make_checkpoint(folder, name)[1] for name in ("deepseek_v3", "minimax_m2", "glm_moe_dsa")},
        "qwen3_5": make_checkpoint(folder, "qwen3_5")[1],
    }


def run(folder, models, ranks, table, prefix="", **extra):
    cases = {prefix + name: (models[name.split()[0]], {**table[name], **extra}) for name in table}
    return in_processes(ranks, lora_cases, folder, cases, str(folder))


@pytest.fixture(scope="module")
def fsdp(folder, models):
    return run(folder, models, 1, {name: {**ONE[name], "save": None} for name in ON_FSDP}, fsdp=True)


@pytest.fixture(scope="module")
def one(folder, models):
    return run(folder, models, 1, ONE)


@pytest.fixture(scope="module")
def two(folder, models):
    return run(folder, models, 2, TWO)


@pytest.fixture(scope="module")
def four(folder, models):
    return run(folder, models, 4, FOUR)


def reference_of(one, name):
    return one[max((known for known in one if f"{name} ".startswith(f"{known} ")), key=len)]


def check(found, reference):
    for (loss, norm), (expected_loss, expected_norm) in zip(found["steps"], reference["steps"], strict=True):
        assert loss == pytest.approx(expected_loss, abs=2e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)
    assert found["config"]["target_modules"] == reference["config"]["target_modules"]
    assert {n: t for n, t in found["start"].items() if not torch.equal(t, reference["start"][n])} == {}
    for part in ("before", "adapters", "after"):
        torch.testing.assert_close(found[part], reference[part], rtol=0, atol=2e-6)
    moved: dict[str, float] = {}
    for name, factor in reference["adapters"].items():
        kind = re.sub(r"experts\.\d+", "experts", name)  # an expert without tokens stays as it is
        moved[kind] = max(moved.get(kind, 0.0), float(factor.abs().max()))
    assert min(moved.values()) > 1e-5, "every factor must move for this comparison to mean something"


@pytest.mark.parametrize("name", ON_FSDP)
def test_one_process_equals_fsdp(one, fsdp, name):
    check(one[name], fsdp[name])


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_equal_one(one, two, name):
    check(two[name], reference_of(one, name))


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_equal_one(one, four, name):
    check(four[name], reference_of(one, name))


@pytest.mark.parametrize("name", ["qwen3", "moe", "deepseek_v3"])
def test_steps_equal_the_obvious_ones(folder, models, name):
    found = in_processes(1, simple_steps, folder, models[name], {})
    expected = obvious_steps(models[name], found["start"])
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    torch.testing.assert_close(found["adapters"], expected["adapters"], rtol=1e-4, atol=1e-5)
    # An expert may get no token.
    still = [name for name in found["start"] if torch.equal(found["adapters"][name], found["start"][name])]
    assert all(".experts." in name for name in still) and len(still) < len(found["start"]) / 10


@pytest.mark.parametrize("name", ["qwen3", "moe"])
def test_peft_computes_the_merged_model_from_the_adapters(folder, models, one, name):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def load(path):
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    saved = folder / f"{name}-hf"
    assert json.loads((saved / "adapter" / "adapter_config.json").read_text()) == one[name]["config"]
    ids = torch.tensor([random_samples(1, 1, vocab=127, longest=40)[0].tokens])
    plain, merged = load(models[name])(ids).logits, load(saved)(ids).logits
    adapted = PeftModel.from_pretrained(load(models[name]), saved / "adapter")(ids).logits
    torch.testing.assert_close(adapted, merged, rtol=1e-4, atol=1e-4)
    assert (adapted - plain).abs().max() > 0.05


def test_the_reference_is_the_model_without_adapters(one):
    for name in ("qwen3", "moe"):
        first, *later = one[name]["kl"]
        assert first == pytest.approx(0.0, abs=1e-7) and min(later) > 1e-4
        assert one[name]["before"].keys() == one[name]["after"].keys()


def only_backend(model, **changes):
    from slime.backends.megatron import create_backend

    init_process_group()
    args = megatron_args(model, **(GRPO | LORA | changes))
    return create_backend(args, rank=0, world_size=1, device="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(lora_target_modules=["q_proj", "qkv"]),
            r"'qkv' is no linear layer .*; there are down_proj, ",
        ),
        (dict(lora_target_modules=["lm_head"]), "'lm_head' is no linear layer"),
        (dict(lora_sync="adapter"), "adapters on experts: engines take these merged"),
        (dict(megatron_config={"moe_shared_expert_overlap": True}), "moe_shared_expert_overlap"),
    ],
)
def test_what_has_no_adapter_is_refused_by_name(models, changes, message):
    with pytest.raises(ValueError, match=message):
        only_backend(models["moe"], **changes)


def test_frozen_weights_leave_the_device_too(models):
    backend = only_backend(models["qwen3"], **ADAM, distopt=True)
    before = {n: p.detach().clone() for chunk in backend.model for n, p in chunk.named_parameters()}
    backend._move_parameters(torch.device("cpu"))
    held = [p.untyped_storage().nbytes() for chunk in backend.model for p in chunk.parameters()]
    assert sum(held) == 0
    backend._move_parameters(torch.device("cuda"))  # only its kind is read: storage returns where it was
    after = {n: p.detach() for chunk in backend.model for n, p in chunk.named_parameters()}
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def resumed(rank, world_size, model, folder, saves, loads):
    """Three steps and a checkpoint as `saves`, three more; the last three again from it as `loads`."""
    from megatron_helpers import training_step

    from slime.backends.megatron import create_backend

    def go_on(backend, args):
        steps = training_step(backend, args, random_samples(5, 3, vocab=127, seed=1), 1).run().steps
        return [(s["train/loss"], s["train/grad_norm"]) for s in steps], adapters_of(backend)

    place, results = dict(rank=rank, world_size=world_size, device="cpu"), {}
    if saves is not None:
        args = megatron_args(model, **(GRPO | LORA | ADAM | saves))
        backend = create_backend(args, **place)
        training_step(backend, args, random_samples(5, 3, vocab=127)).run()
        backend.save(folder)
        results["went on"] = go_on(backend, args)
    for name, changes in loads.items():
        args = megatron_args(model, **(GRPO | LORA | ADAM | changes))
        backend = create_backend(args, **place)
        backend.load(folder)
        results[name] = go_on(backend, args)
    return results


@pytest.mark.parametrize("name", ["qwen3", "moe"])
def test_a_checkpoint_holds_adapters_alone_and_resumes_exactly_on_any_layout(tmp_path, models, name):
    saves = dict(tp=2, sp=True, distopt=True) if name == "qwen3" else dict(ep=2, tp=2, sp=True, distopt=True)
    loads = {"same": saves, "pp2": dict(pp=2, distopt=True)}
    path = tmp_path / "checkpoint"
    found = in_processes(2, resumed, tmp_path, models[name], str(path), saves, loads)
    steps, adapters = found["went on"]
    assert found["same"][0] == steps
    torch.testing.assert_close(found["same"][1], adapters, rtol=0, atol=0)
    one = in_processes(1, resumed, tmp_path, models[name], str(path), None, {"one": dict(distopt=True)})
    for other in (found["pp2"], one["one"]):
        torch.testing.assert_close(torch.tensor(other[0]), torch.tensor(steps), rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(other[1], adapters, rtol=0, atol=1e-5)
    written = {part.key for part in load_tensors_metadata(str(path / "dist")).values()}
    assert written and all(".adapter.lora_" in key for key in written)
    with pytest.raises(ValueError, match=r"than --hf-checkpoint: lora_rank is 3 in it and 2 here"):
        only_backend(models[name], **ADAM, distopt=True, lora_rank=2).load(path)
