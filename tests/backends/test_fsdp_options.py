"""Which parameters train and how: frozen ones, adapters, experts, 16-bit
passes, recomputation, loading by shards.
"""

import json
import shutil

import pytest
import torch
from tiny_model import make_tiny_model
from trainer_helpers import backend_of, train, trainer_args, weights_of

from slime.backends.fsdp import loading
from slime.backends.fsdp.layer_execution import _policy

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", tie_word_embeddings=True)


def changed(before, after):
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize(
    ("flags", "trained"),
    [
        (dict(only_train_params_name_list=[r"layers\.1\.mlp"]), lambda name: "layers.1.mlp" in name),
        (
            dict(freeze_params_name_list=["embed_tokens", "norm"]),
            lambda n: "embed_tokens" not in n and "norm" not in n,
        ),
    ],
)
@pytest.mark.parametrize("offload", [False, True])
def test_only_the_chosen_parameters_change(model, flags, trained, offload):
    args = trainer_args(model, fsdp_cpu_offload=offload, **flags)
    backend = backend_of(args)
    before = weights_of(backend)
    train(backend, args)
    assert changed(before, weights_of(backend)) == {name for name in before if trained(name)}


def test_a_pattern_that_matches_nothing_is_an_error(model):
    with pytest.raises(ValueError, match="--freeze-params-name-list: 'vision' matches no parameter"):
        backend_of(trainer_args(model, freeze_params_name_list=["vision"]))
    with pytest.raises(ValueError, match="freezes every parameter"):
        backend_of(trainer_args(model, freeze_params_name_list=["."]))


@pytest.mark.parametrize("offload", [False, True])
def test_adapters_start_as_the_model_train_alone_and_leave_merged(model, tmp_path, offload):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    plain = backend_of(trainer_args(model))
    args = trainer_args(model, lora_rank=4, lora_alpha=8.0, lr=1e-2, fsdp_cpu_offload=offload)
    backend = backend_of(args)
    original = {name: t.clone() for bucket in plain.export() for name, t in bucket}
    exported = {name: t.clone() for bucket in backend.export() for name, t in bucket}
    torch.testing.assert_close(exported, original, rtol=0, atol=0)
    before = weights_of(backend)
    metrics = train(backend, args)
    assert metrics["train/grad_norm"] > 0
    assert all("lora_" in name for name in changed(before, weights_of(backend)))
    backend.save_hf(tmp_path / "out")
    exported = {name: t.clone() for bucket in backend.export() for name, t in bucket}
    assert exported.keys() == original.keys()
    assert {n.split(".")[-2] for n in changed(original, exported)} <= {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with_adapter = PeftModel.from_pretrained(lm, tmp_path / "out" / "adapter").merge_and_unload()
    for name, parameter in with_adapter.named_parameters():
        torch.testing.assert_close(parameter.data, exported[name], rtol=1e-5, atol=1e-6)


def test_a_checkpoint_of_adapters_holds_them_alone_and_resumes_exactly(model, tmp_path):
    args = trainer_args(model, lora_rank=4, lora_target_modules=["q_proj", "down_proj"])
    first = backend_of(args)
    train(first, args)
    first.save(tmp_path / "ckpt")
    size = sum(file.stat().st_size for file in (tmp_path / "ckpt").rglob("*.distcp"))
    whole = sum(p.numel() * 4 for p in first.model.parameters())
    assert size < whole
    second = backend_of(args)
    second.load(tmp_path / "ckpt")
    torch.testing.assert_close(weights_of(second), weights_of(first), rtol=0, atol=0)
    assert train(second, args)["train/loss"] == train(first, args)["train/loss"]
    with pytest.raises(ValueError, match=r"another model.*lora_A"):
        backend_of(trainer_args(model, lora_rank=2)).load(tmp_path / "ckpt")


def test_the_reference_of_adapters_is_the_model_without_them(model):
    args = trainer_args(model, lora_rank=4, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3", lr=1e-2)
    backend = backend_of(args)
    assert train(backend, args)["train/kl_loss"] == pytest.approx(0.0, abs=1e-7)
    assert train(backend, args)["train/kl_loss"] > 1e-5


def make_moe(path):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


def test_adapters_on_experts_are_refused_by_name(tmp_path):
    path = make_moe(tmp_path / "moe")
    for targets in (["all-linear"], ["gate_proj", "up_proj"]):
        with pytest.raises(ValueError, match=r"includes experts .*use --train-backend megatron"):
            backend_of(trainer_args(path, lora_rank=2, lora_target_modules=targets))


def test_a_mixture_of_experts_trains_and_tells_its_load(tmp_path):
    path = make_moe(tmp_path / "moe")
    outcomes = []
    for changes in (dict(micro_batch_size=1), dict(micro_batch_size=4, activation_checkpointing="full")):
        args = trainer_args(path, optimizer="sgd", lr=0.5, weight_decay=0.0, **changes)
        backend = backend_of(args)
        metrics = train(backend, args)
        assert 1.0 <= metrics["train/moe_load_max_over_mean"] <= 2.0
        assert 0.0 <= metrics["train/moe_idle_experts"] <= 0.5
        outcomes.append((metrics, weights_of(backend)))
    torch.testing.assert_close(outcomes[1][1], outcomes[0][1], rtol=1e-5, atol=1e-5)
    assert outcomes[0][0]["train/moe_load_worst_layer"] == pytest.approx(
        outcomes[1][0]["train/moe_load_worst_layer"]
    )


def test_16_bit_passes_of_one_rank_equal_those_of_sharding(model):
    """The copy that one rank computes on is what sharding would have gathered; gradients add up in fp32."""
    outcomes = []
    for offload in (False, True):
        args = trainer_args(
            model, dtype="bfloat16", fsdp_cpu_offload=offload, micro_batch_size=3, optimizer="sgd", lr=0.5
        )
        backend = backend_of(args)
        assert (backend.working is None) == offload
        train(backend, args)
        assert {p.dtype for p in backend.model.parameters()} == {torch.float32}
        outcomes.append((weights_of(backend), train(backend, args)["train/loss"]))
    torch.testing.assert_close(outcomes[0][0], outcomes[1][0], rtol=1e-6, atol=1e-6)
    assert outcomes[0][1] == pytest.approx(outcomes[1][1], rel=1e-4, abs=1e-6)


def test_selective_recomputation_keeps_products_and_attention():
    aten = torch.ops.aten
    kept = [
        op
        for op in (aten.mm.default, aten.addmm.default, aten.mul.Tensor, aten.silu.default)
        if "SAVE" in _policy(None, op).name
    ]
    assert kept == [aten.mm.default, aten.addmm.default]


def test_weights_are_read_by_regions_and_missing_ones_are_named(model, tmp_path):
    backend = backend_of(trainer_args(model))
    weight = backend.model.lm.get_input_embeddings().weight
    assert loading.region_of(weight) == (slice(0, weight.shape[0]), slice(0, weight.shape[1]))
    from safetensors.torch import load_file, save_file

    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text((model / name).read_text())
    tensors = load_file(model / "model.safetensors")
    halves = [dict(list(tensors.items())[::2]), dict(list(tensors.items())[1::2])]
    for i, half in enumerate(halves):
        save_file(half, tmp_path / f"model-{i}.safetensors", metadata={"format": "pt"})
    index = {name: f"model-{i}.safetensors" for i, half in enumerate(halves) for name in half}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    torch.testing.assert_close(
        weights_of(backend_of(trainer_args(tmp_path))), weights_of(backend), rtol=0, atol=0
    )


@pytest.mark.parametrize("width", [32, 200])
def test_weights_of_another_size_than_the_config_has_are_not_read_in_part(model, tmp_path, width):
    folder = shutil.copytree(model, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    assert config["intermediate_size"] not in (32, 200)
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": width}))
    with pytest.raises(ValueError, match=rf"gate_proj.weight is .* in its file, but \({width}, .* different"):
        backend_of(trainer_args(folder))
