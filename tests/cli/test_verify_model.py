"""`slime verify-model` agrees with itself on a sound model, and names what is wrong with an unsound one."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from patience import PATIENCE_S
from verify_model_mistakes import change_one_weight, never_finish, swap_gate_and_up

from slime.cli.verify_model import main, shrink, verify
from slime.cli.verify_model.cases import CaseOutcome
from slime.cli.verify_model.compare import compare
from slime.cli.verify_model.layouts import choose_targets, parse_layout

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="needs megatron-core"
)


def config_folder(path, kind="qwen3", **changes) -> str:
    """A config.json as a hub model has it, and nothing else."""
    from transformers import AutoConfig

    values = dict(num_attention_heads=32, num_key_value_heads=8, hidden_size=4096, intermediate_size=12288)
    AutoConfig.for_model(kind, **(values | changes)).save_pretrained(path)
    return str(path)


def options(model: str, **changes) -> SimpleNamespace:
    values = dict(layers=2, full_width=False, layouts="single", tolerance=1e-4, deadline_s=PATIENCE_S)
    return SimpleNamespace(hf_checkpoint=model, **(values | changes))


# -- the small model -----------------------------------------------------------------------------------------


def test_small_config_keeps_the_architecture(tmp_path):
    config = shrink.read_config(config_folder(tmp_path, rope_theta=5e5, tie_word_embeddings=True))
    small = shrink.shrink(config, layers=3)
    assert (small.model_type, small.num_hidden_layers, small.vocab_size) == ("qwen3", 3, 512)
    assert small.num_attention_heads // small.num_key_value_heads == 4
    assert small.intermediate_size / small.hidden_size == pytest.approx(3.0)
    assert small.tie_word_embeddings and small.rope_parameters == config.rope_parameters
    assert shrink.shrink(config, layers=1, full_width=True).hidden_size == 4096


def test_small_config_of_experts_keeps_a_dense_layer_and_groups(tmp_path):
    config = shrink.read_config(
        config_folder(
            tmp_path, "deepseek_v3", num_key_value_heads=32, first_k_dense_replace=3, n_group=8, topk_group=4
        )
    )
    small = shrink.shrink(config, layers=2)
    assert (small.first_k_dense_replace, small.n_routed_experts, small.n_group, small.topk_group) == (
        1,
        8,
        2,
        1,
    )
    assert small.kv_lora_rank == 16 and small.qk_rope_head_dim == 8


def test_folder_without_config_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--hf-checkpoint", str(tmp_path)])
    assert stopped.value.code == 2 and "no config.json" in capsys.readouterr().err


def test_type_that_transformers_lacks_is_refused(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(SystemExit):
        main(["--hf-checkpoint", str(tmp_path)])
    assert "no model of type 'no_such_model'" in capsys.readouterr().err


# -- layouts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "experts", "ranks"),
    [
        ("single", False, 1),
        ("tp2pp2", False, 4),
        ("ep2", True, 2),
        ("tp2ep2", True, 2),
        ("pp2vpp2", False, 2),
    ],
)
def test_layout_names_its_ranks(text, experts, ranks):
    assert parse_layout(text, experts=experts).ranks == ranks


def test_experts_under_tensor_parallelism_split_the_sequence():
    assert dict(parse_layout("tp2", experts=True).settings)["sequence_parallel"]
    assert not dict(parse_layout("tp2", experts=False).settings)["sequence_parallel"]


@pytest.mark.parametrize("text", ["tp", "xp2", "tp2,"])
def test_misspelt_layout_is_refused(text):
    with pytest.raises(ValueError, match="a layout is"):
        choose_targets(text, experts=False, megatron=True)


def test_layouts_without_megatron_are_refused():
    assert [t.name for t in choose_targets(None, experts=False, megatron=False)] == [
        "fsdp single",
        "fsdp dp2",
    ]
    with pytest.raises(ValueError, match="not installed"):
        choose_targets("tp2", experts=False, megatron=False)


# -- the verdict ---------------------------------------------------------------------------------------------


def outcome() -> CaseOutcome:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    names = [
        f"model.layers.{i}.{part}.weight" for i in (0, 1) for part in ("self_attn.q_proj", "mlp.up_proj")
    ]
    before = {name: draw(4, 4) for name in names}
    after = {name: tensor - 0.05 * draw(4, 4) for name, tensor in before.items()}
    return CaseOutcome([draw(3)], [draw(3)], 1.0, 2.0, before, after)


def test_equal_outcomes_have_no_first_divergence():
    verdict = compare(outcome(), outcome(), 1e-4)
    assert verdict.first is None and not any(verdict.errors.values())


def test_weight_that_changes_between_load_and_export_is_named():
    found = outcome()
    found.before["model.layers.1.mlp.up_proj.weight"][2, 1] += 1e-6
    assert "model.layers.1.mlp.up_proj.weight: 1 of 16 elements" in compare(outcome(), found, 1e-4).first


def test_weight_that_is_not_exported_is_named():
    found = outcome()
    del found.before["model.layers.0.mlp.up_proj.weight"], found.after["model.layers.0.mlp.up_proj.weight"]
    assert "model.layers.0.mlp.up_proj.weight is missing" in compare(outcome(), found, 1e-4).first


def test_a_forward_pass_that_differs_is_named_before_its_gradients():
    found = outcome()
    found.log_probs[0] += 0.1
    found.after["model.layers.0.self_attn.q_proj.weight"][0, 0] += 0.01
    assert compare(outcome(), found, 1e-4).first == "the forward pass: its log-probs differ"


def test_gradient_that_differs_alone_is_named():
    found = outcome()
    found.after["model.layers.0.self_attn.q_proj.weight"][0, 0] += 0.01
    assert compare(outcome(), found, 1e-4).first == "gradient of model.layers.0.self_attn.q_proj.weight"


def test_missing_numbers_never_agree():
    found = outcome()
    found.log_probs[0][1] = float("nan")
    assert compare(outcome(), found, 1e-4).first is not None


# -- whole runs ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.megatron
@needs_megatron
def test_sound_model_agrees_under_every_layout(tmp_path, capsys):
    model = config_folder(tmp_path / "config")
    assert verify(options(model, layouts="tp2,pp2"), tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.endswith("same") for line in lines) == 4
    assert lines[-1] == "all 4 agree"


FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3_moe": dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=1536),
    "glm4": dict(num_key_value_heads=2),
    "glm4_moe": {},
    "deepseek_v3": dict(num_key_value_heads=32),
    "qwen3_next": {},
    "qwen3_5": {},
    "glm4_moe_lite": dict(num_key_value_heads=32),
    "minimax_m2": {},
    "glm_moe_dsa": dict(num_key_value_heads=32),
    "deepseek_v32": dict(num_key_value_heads=32),
}


@pytest.mark.slow
@pytest.mark.megatron
@needs_megatron
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_agrees_from_its_config_alone(tmp_path, capsys, kind):
    model = config_folder(tmp_path / "config", kind, **FAMILIES[kind])
    assert verify(options(model, layouts="tp2"), tmp_path) == 0, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.megatron
@needs_megatron
def test_wrong_family_map_is_found_in_the_forward_pass(tmp_path, capsys):
    model = config_folder(tmp_path / "config")
    assert verify(options(model), tmp_path, before_build=swap_gate_and_up) == 1
    out = capsys.readouterr().out
    assert "megatron single diverges first at the forward pass: its log-probs differ" in out
    assert "fsdp single" in out and "fsdp single diverges" not in out


@pytest.fixture
def without_megatron(monkeypatch):
    """As where megatron-core is not installed; all else is found as ever."""
    find = importlib.util.find_spec

    def find_others(name, package=None):
        return None if name == "megatron" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_others)


@pytest.mark.slow
def test_perturbed_weight_is_named(tmp_path, capsys, without_megatron):
    model = config_folder(tmp_path / "config")
    assert verify(options(model, layouts=None), tmp_path, before_build=change_one_weight) == 1
    assert "first at tensor model.layers.1.self_attn.k_proj.weight: 1 of" in capsys.readouterr().out


@pytest.mark.slow
def test_trainer_that_hangs_is_ended_at_the_deadline(tmp_path, capsys, without_megatron):
    model = config_folder(tmp_path / "config")
    assert verify(options(model, layouts=None, deadline_s=3.0), tmp_path, before_build=never_finish) == 1
    assert "fsdp dp2 did not finish: not finished after 3 s (--deadline-s)" in capsys.readouterr().out
