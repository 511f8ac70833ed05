"""Every model family computes what transformers computes, trains like FSDP, exports what it read."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core")

from devices import rounding
from megatron_families import (
    COMMON,
    FAMILIES,
    MTP,
    families_of,
    family_cases,
    make_checkpoint,
    samples_of_tests,
)
from megatron_helpers import in_processes, megatron_args, save_and_resume

from slime.backends.megatron.config import check_layout, read_hf_config, transformer_config

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(1800)]

LIMIT = rounding(1e-5, 2e-4)
DENSE = {"tp2": dict(tp=2), "tp2 sp": dict(tp=2, sp=True), "pp2": dict(pp=2), "cp2": dict(cp=2)}
SPARSE = {"tp2 sp": dict(tp=2, sp=True), "pp2": dict(pp=2), "cp2": dict(cp=2), "ep2": dict(ep=2)}
# The sparse attention of a long document needs all its keys on one rank.
SELECTING = {name: SPARSE[name] for name in ("tp2 sp", "pp2", "ep2")}
SELECTING |= {"tp2 sp recompute": dict(tp=2, sp=True, activation_checkpointing="full")}
ROWS = {
    "glm4": DENSE,
    "mimo": DENSE,
    "qwen3_5": DENSE,
    "glm_moe_dsa": SELECTING,
    "glm_moe_dsa_short": {"cp2": dict(cp=2, rollout_max_context_len=64)},
    "deepseek_v32": {"tp2 sp": SPARSE["tp2 sp"], "pp2 vpp2": dict(pp=2, vpp=2)},
}
OTHERS = ("llama", "qwen2", "qwen3", "qwen3_moe")  # their layouts are in test_megatron_layouts
LAYOUTS = {name: {} if name in OTHERS else ROWS.get(name, SPARSE) for name in FAMILIES}
LAYOUTS["qwen3_next"] = SPARSE | {"vpp2": dict(pp=2, vpp=2)}  # stages with and without attention
ONE = list(FAMILIES)
TWO = [f"{name} {layout}" for name in FAMILIES for layout in LAYOUTS[name]]


def hf_log_probs(lm) -> list[torch.Tensor]:
    """The obvious version: one sample at a time, whole logits."""
    result = []
    for sample in samples_of_tests():
        ids = torch.tensor(sample.tokens)
        with torch.no_grad():
            rows = torch.log_softmax(lm(ids[None]).logits[0, :-1].float(), -1)
        result.append(rows[torch.arange(len(ids) - 1), ids[1:]][-sample.response_length :])
    return result


def load_hf(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def difference(found, expected) -> float:
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def models(request, folder):
    return {name: make_checkpoint(folder, name) for name in families_of(request, FAMILIES)}


@pytest.fixture(scope="module")
def one(folder, models):
    # The other trainer last: what lets Megatron run without CUDA stays in the
    # process, and must not change what it computes.
    cases = {name: (model, {}) for name, (model, _) in models.items()}
    cases |= {f"{name} fsdp": (reference, dict(fsdp=True)) for name, (_, reference) in models.items()}
    return in_processes(1, family_cases, folder, cases, str(folder))


@pytest.fixture(scope="module")
def two(folder, models):
    # Each family has processes of its own: trainers of mixtures that were built in a process leave threads.
    results = {}
    for name in models:
        checkpoint, layouts = models[name][0], LAYOUTS[name]
        cases = {f"{name} {layout}": (checkpoint, settings) for layout, settings in layouts.items()}
        results |= in_processes(2, family_cases, folder, cases, str(folder)) if cases else {}
    return results


@pytest.mark.parametrize("name", ONE)
def test_log_probs_equal_the_hub_models(models, one, name):
    assert difference(one[name]["log_probs"], hf_log_probs(load_hf(models[name][1]))) < LIMIT


@pytest.mark.parametrize("name", TWO)
def test_log_probs_equal_the_hub_models_on_two_ranks(models, two, name):
    assert difference(two[name]["log_probs"], hf_log_probs(load_hf(models[name.split()[0]][1]))) < LIMIT


@pytest.mark.parametrize("name", ONE)
def test_a_change_of_any_tensor_would_be_noticed(models, one, name):
    """The comparison can fail: one element of each tensor changes, of all experts at once."""
    lm = load_hf(models[name][1])
    token = samples_of_tests()[0].tokens[0]
    unnoticed = []
    for key, tensor in (*lm.named_parameters(), *lm.named_buffers()):
        if "inv_freq" in key or ("indexer" in key and name == "glm_moe_dsa_short"):
            continue
        kept = tensor.data.clone()
        if "correction_bias" in key:
            tensor.data += torch.linspace(-2, 2, len(tensor))
        elif "indexer" in key:
            tensor.data += torch.randn_like(tensor)
        elif "mlp.gate.weight" in key:
            tensor.data[:, 0] += torch.linspace(-0.5, 0.5, len(tensor))
        elif tensor.ndim == 3:
            tensor.data[:, 0, 0] += 0.05
        else:
            # How fast one head of a delta net forgets is felt least.
            change = 1.0 if key.endswith(("in_proj_a.weight", "dt_bias", "A_log")) else 0.05
            tensor.data[token if "embed_tokens" in key else 0].view(-1)[0] += change
        if difference(one[name]["log_probs"], hf_log_probs(lm)) < 2 * LIMIT:
            unnoticed.append(key)
        tensor.data.copy_(kept)
    assert not unnoticed


@pytest.mark.parametrize(("name", "count"), [("qwen3", 4), ("mimo", 4), ("glm4", 0), ("deepseek_v3", 0)])
def test_layers_with_further_parts_are_not_compiled_as_plain_ones(one, name, count):
    assert one[name]["plain"] == count


def check_training(found, reference):
    for (loss, norm), (expected_loss, expected_norm) in zip(found["steps"], reference["steps"], strict=True):
        assert loss == pytest.approx(expected_loss, abs=rounding(2e-5, 2e-4))
        assert norm == pytest.approx(expected_norm, rel=rounding(1e-4, 1e-3))
    assert found["after"].keys() == reference["after"].keys()
    for key, tensor in reference["after"].items():
        torch.testing.assert_close(
            found["after"][key], tensor, rtol=0, atol=rounding(2e-6, 1e-4), msg=lambda m, k=key: f"{k}: {m}"
        )
    moved = max((reference["after"][k] - reference["before"][k]).abs().max() for k in reference["after"])
    assert moved > 1e-3, "the steps must change the weights for this comparison to mean something"


@pytest.mark.parametrize("name", ONE)
def test_three_steps_equal_those_of_fsdp(one, name):
    check_training(one[name], one[f"{name} fsdp"])


@pytest.mark.parametrize("name", TWO)
def test_three_steps_on_two_ranks_equal_those_of_fsdp(one, two, name):
    check_training(two[name], one[f"{name.split()[0]} fsdp"])


@pytest.mark.parametrize("name", ONE + TWO)
def test_export_equals_import_bit_for_bit(folder, models, one, two, name):
    """Also the MTP heads, which only a saved folder holds."""
    from safetensors.torch import load_file

    family = name.split()[0]
    hub = load_file(Path(models[family][0]) / "model.safetensors")
    exported = (one | two)[name]["before"]
    saved = folder / "saved" / name.replace(" ", "-")
    files = {key: tensor for file in saved.glob("*.safetensors") for key, tensor in load_file(file).items()}
    heads = {key for key in hub if family in MTP and key.startswith(MTP[family][0])}
    heads |= {key for key in hub if ".visual." in key}
    assert exported.keys() == hub.keys() - heads and files.keys() == hub.keys()
    assert all(torch.equal(tensor, hub[key]) for key, tensor in (*exported.items(), *files.items()))
    config = json.loads((saved / "config.json").read_text())
    assert (
        config["model_type"]
        == json.loads((Path(models[family][0]) / "config.json").read_text())["model_type"]
    )


def biases(rank, world_size, model, other, folder):
    """What happens to the routers' biases beside the live model, and which checkpoints are refused."""
    from megatron_helpers import exported
    from safetensors.torch import load_file, save_file

    from slime.backends.megatron import create_backend
    from slime.backends.shared.microbatch import build_micro_batches
    from slime.batch.convert import samples_to_batch

    backend = create_backend(megatron_args(model), rank=rank, world_size=world_size, device="cpu")
    mbs = build_micro_batches(samples_to_batch(backend.args, samples_of_tests()), [[0, 3, 4], [1, 2], [5]])
    found = {"before": backend.log_probs(mbs).log_probs}
    backend.load_hf(other, weights="ref")
    found["live"], found["ref"] = (
        backend.log_probs(mbs).log_probs,
        backend.log_probs(mbs, weights="ref").log_probs,
    )
    found["16 bit"] = {name: tensor.dtype for name, tensor in exported(backend, dtype=torch.bfloat16).items()}

    def refusal(change):
        path = Path(folder) / "broken"
        path.mkdir(exist_ok=True)
        tensors = load_file(Path(model) / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")
        try:
            backend.load_hf(path)
        except ValueError as error:
            return str(error)
        return "nothing was refused"

    key = "model.layers.2.self_attn.kv_b_proj.weight"
    found["missing"] = refusal(lambda t: t.pop("model.layers.1.mlp.gate.e_score_correction_bias"))
    found["beyond"] = refusal(lambda t: t.update({"model.layers.5.enorm.weight": torch.zeros(1)}))
    found["shape"] = refusal(lambda t: t.update({key: torch.zeros(3, 16)}))
    return found


@pytest.fixture(scope="module")
def beside(folder, models):
    other = folder / "other"
    lm = load_hf(models["deepseek_v3"][1])
    with torch.no_grad():
        for key, tensor in lm.named_buffers():
            if "correction_bias" in key:
                tensor.copy_(torch.randn_like(tensor))
    lm.save_pretrained(other)
    found = in_processes(1, biases, folder, models["deepseek_v3"][0], str(other), str(folder))
    return found | {"expected ref": hf_log_probs(lm)}


def test_a_reference_routes_by_its_own_biases(beside):
    assert difference(beside["ref"], beside["expected ref"]) < LIMIT
    assert difference(beside["ref"], beside["before"]) > 1e-3


def test_live_biases_stay_when_a_reference_is_read(beside):
    assert difference(beside["live"], beside["before"]) == 0


def test_biases_are_exported_in_32_bit(beside):
    kinds = {dtype for name, dtype in beside["16 bit"].items() if "correction_bias" in name}
    assert kinds == {torch.float32}
    assert {d for name, d in beside["16 bit"].items() if "correction_bias" not in name} == {torch.bfloat16}


def test_checkpoints_that_do_not_fit_are_named(beside):
    assert "1 tensors are missing: model.layers.1.mlp.gate.e_score_correction_bias" in beside["missing"]
    assert "1 tensors are not in the model: model.layers.5.enorm.weight" in beside["beyond"]
    assert "model.layers.2.self_attn.kv_b_proj.weight [3, 16]" in beside["shape"]


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next"])
def test_a_family_resumes_under_another_layout(folder, models, name):
    layouts = dict(tp=2, sp=True, distopt=True), dict(pp=2, ep=1, distopt=True)
    place = str(folder / f"ckpt-{name}")
    found = in_processes(2, save_and_resume, folder, models[name][0], place, *layouts)
    for step, expected in zip(found["resumed"]["steps"], found["went on"]["steps"], strict=True):
        assert step == pytest.approx(expected, abs=1e-4)
    for name, tensor in found["went on"]["weights"].items():
        torch.testing.assert_close(found["resumed"]["weights"][name], tensor, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "field", "value", "said"),
    [
        ("glm4", "rotary_interleaved", False, "True"),
        ("glm4_moe", "moe_router_topk_scaling_factor", 1.0, "1.7"),
        ("deepseek_v3", "kv_lora_rank", 512, "16"),
    ],
)
def test_flag_that_contradicts_the_checkpoint_names_both(models, name, field, value, said):
    args = megatron_args(models[name][0], megatron_config={field: value})
    option = "--" + field.replace("_", "-")
    with pytest.raises(
        ValueError, match=f"{option} is {value}, but the config of --hf-checkpoint .* says {said}"
    ):
        transformer_config(args, read_hf_config(models[name][0]), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(norm_topk_prob=False), "norm_topk_prob=False"),
        (dict(topk_group=1), "ranks groups by their best 4 experts"),
        (dict(attention_bias=True), "attention_bias"),
    ],
)
def test_what_megatron_would_compute_otherwise_is_refused(changes, message):
    from transformers import AutoConfig

    from slime.backends.families import family_of

    config = AutoConfig.for_model("deepseek_v3", **(COMMON | FAMILIES["deepseek_v3"][1] | changes))
    with pytest.raises(ValueError, match=message):
        family_of(config).settings(config)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(tp=2, sp=True, cp=4), "split by their 4 key heads over both"),
        (dict(tp=4, sp=True), "cannot share one between ranks where attention has an output gate"),
    ],
)
def test_sizes_that_cannot_share_the_heads_of_delta_nets_are_refused(models, sizes, message):
    args = megatron_args(models["qwen3_next"][0], **sizes)
    with pytest.raises(ValueError, match=message):
        check_layout(args, read_hf_config(args.hf_checkpoint), world_size=8, device=torch.device("cpu"))


def test_layers_that_megatron_cannot_compute_are_named(tmp_path):
    from transformers import AutoConfig

    kinds = ["sliding_attention", "full_attention"]
    config = AutoConfig.for_model("qwen2", **(COMMON | dict(num_hidden_layers=2)), layer_types=kinds)
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"sliding_attention layers: .* computes full_attention there"):
        read_hf_config(str(tmp_path))
