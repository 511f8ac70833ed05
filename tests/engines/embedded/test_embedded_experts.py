"""A mixture of experts in the embedded engine takes new weights under the names of its hub checkpoint."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.engines.embedded.weight_update import BadWeights, DiskSource, GroupSource, WeightStore


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model, another of the same shape, and the folder of the other."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=[1],
        initializer_range=0.2,
    )
    own, other = Qwen3MoeForCausalLM(config).eval(), Qwen3MoeForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("experts")
    other.save_pretrained(folder)
    return own, other, folder


@torch.no_grad()
def test_every_expert_is_replaced_and_compared_by_its_hub_name(models):
    own, other, folder = models
    store, source, tokens = WeightStore(own), DiskSource(folder), torch.tensor([[3, 1, 4, 1, 5]])
    assert not torch.allclose(own(tokens).logits, other(tokens).logits)
    store.check(source)
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in store.differing(source)
    count, _ = store.apply(source)
    assert count == len(load_file(folder / "model.safetensors"))
    torch.testing.assert_close(own(tokens).logits, other(tokens).logits, rtol=0, atol=0)
    assert store.differing(source) == [] and store.checksums() == WeightStore(other).checksums()
    own.model.layers[0].mlp.experts.down_proj.data[2, 0, 0] += 1.0
    assert store.differing(source) == ["model.layers.0.mlp.experts.2.down_proj.weight"]


def test_a_missing_expert_is_named(models, tmp_path):
    own, _, folder = models
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.1.gate_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        BadWeights, match=r"1 parameters are missing .* model\.layers\.0\.mlp\.experts\.1\.gate_proj\.weight"
    ):
        WeightStore(own).check(DiskSource(tmp_path))


@torch.no_grad()
def test_a_buffer_of_the_checkpoint_may_come_with_an_update():
    """As the bias that balances the experts of DeepSeek-V3 and GLM-4.5, which is no parameter."""

    def balanced(values):
        model = torch.nn.Linear(2, 2)
        model.register_buffer("e_score_correction_bias", torch.tensor(values))
        model.register_buffer("inv_freq", torch.ones(1), persistent=False)
        return model

    own, other = balanced([0.0, 0.0]), balanced([1.0, 2.0])
    store, source = WeightStore(own), GroupSource(other.state_dict())
    store.check(source)
    assert "e_score_correction_bias" in store.differing(source)
    store.apply(source)
    assert own.e_score_correction_bias.tolist() == [1.0, 2.0] and store.differing(source) == []
    store.check(GroupSource({name: p.data for name, p in other.named_parameters()}))
    with pytest.raises(BadWeights, match="inv_freq is not a parameter"):
        store.check_part(GroupSource({"inv_freq": torch.ones(1)}))
