"""A mixture of experts on an engine, whose choices the trainer repeats."""

import pytest
import torch
from loop_helpers import make_world, run_train, series
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

from slime.arguments.passthrough.sglang_flags import find_python
from slime.rollout.dumps import load_rollout_dump

LAYERS, EXPERTS, CHOSEN = 2, 8, 2


def make_mixture(folder):
    base = AutoConfig.from_pretrained(folder)
    config = Qwen3MoeConfig(
        vocab_size=base.vocab_size, hidden_size=64, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, intermediate_size=128, moe_intermediate_size=64,
        num_experts=EXPERTS, num_experts_per_tok=CHOSEN, norm_topk_prob=True,
        max_position_embeddings=base.max_position_embeddings, eos_token_id=base.eos_token_id,
        pad_token_id=base.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


@pytest.mark.sglang
@pytest.mark.megatron
def test_experts_chosen_by_sglang_are_recorded_and_replayed_by_megatron(tmp_path):
    pytest.importorskip("megatron.core")
    if find_python(None) is None:
        pytest.skip("there is no SGLang: `make sglang-env`")
    timeouts = "engine-start=900"
    check_a_run(tmp_path, rollout_engine="sglang", train_backend="megatron", timeouts=timeouts)


@pytest.mark.slow
def test_experts_chosen_by_the_embedded_engine_are_recorded_and_replayed_by_fsdp(tmp_path):
    check_a_run(tmp_path, rollout_engine="embedded", train_backend="fsdp")


def check_a_run(tmp_path, **settings):
    world = make_world(tmp_path / "world")
    make_mixture(world / "model")
    dump = str(tmp_path / "rollout_{rollout_id}.pt")
    replay = dict(use_rollout_routing_replay=True, save_debug_rollout_data=dump)
    run_train(world, "run", timeout=1200, num_rollout=2, **replay, **settings)
    for sample in load_rollout_dump(dump, 0):
        found = torch.tensor(sample.rollout_routed_experts)
        assert found.shape == (len(sample.tokens) - 1, LAYERS, CHOSEN)
        assert found.min() >= 0 and found.max() < EXPERTS
        assert (found[..., 0] != found[..., 1]).all()
    differences = series(world, "run", "train/train_rollout_logprob_abs_diff")
    assert set(differences) == {0, 1} and max(differences.values()) < 1e-5
