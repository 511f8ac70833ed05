"""A mixture of experts on real SGLang, whose choices the Megatron trainer repeats."""

import pytest
import torch
from loop_helpers import make_world, run_train, series
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

from slime.arguments.passthrough.sglang_flags import find_python
from slime.rollout.dumps import load_rollout_dump

pytestmark = [pytest.mark.sglang, pytest.mark.megatron]

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


def test_experts_chosen_by_sglang_are_recorded_and_replayed(tmp_path):
    pytest.importorskip("megatron.core")
    if find_python(None) is None:
        pytest.skip("there is no SGLang: `make sglang-env`")
    world = make_world(tmp_path / "world")
    make_mixture(world / "model")
    dump = str(tmp_path / "rollout_{rollout_id}.pt")
    run_train(
        world,
        "run",
        timeout=1200,
        num_rollout=2,
        rollout_engine="sglang",
        timeouts="engine-start=900",
        train_backend="megatron",
        use_rollout_routing_replay=True,
        save_debug_rollout_data=dump,
    )
    for sample in load_rollout_dump(dump, 0):
        found = torch.tensor(sample.rollout_routed_experts)
        assert found.shape == (len(sample.tokens) - 1, LAYERS, CHOSEN)
        assert found.min() >= 0 and found.max() < EXPERTS
        assert (found[..., 0] != found[..., 1]).all()
    differences = series(world, "run", "train/train_rollout_logprob_abs_diff")
    assert set(differences) == {0, 1} and max(differences.values()) < 1e-5
