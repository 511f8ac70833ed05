"""Code that torch compiles for one layer serves every layer, of a longer model too."""

import pytest
import torch
from tiny_model import make_tiny_model
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Qwen3Config

from slime.algorithms.attention_variants import note_kinds, variant_of
from slime.backends.fsdp.layer_execution import require_input_gradient


class Attention(torch.nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        note_kinds(self)


def window_added(module, x):
    return x + (variant_of(module, None, {}).window or 0)


@pytest.mark.parametrize(
    ("configs", "graphs"),
    [
        ([Qwen3Config(num_hidden_layers=n) for n in (1, 3, 28)], 1),
        ([Gemma3TextConfig(num_hidden_layers=n) for n in (12, 18)], 2),  # windows, and layers that see all
    ],
)
def test_what_is_compiled_depends_on_the_kind_of_a_layer_and_not_on_how_many_there_are(configs, graphs):
    from torch._dynamo.testing import CompileCounter  # imports the compiler

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(window_added, backend=counter)
    for config in configs:
        for layer in range(config.num_hidden_layers):
            module, x = Attention(config, layer), torch.zeros(1)
            assert torch.equal(compiled(module, x), window_added(module, x))
    assert counter.frame_count == graphs


def test_the_first_layer_gets_an_input_with_a_gradient_although_embeddings_are_frozen(tmp_path):
    lm = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path / "tiny"))
    lm.requires_grad_(False)
    lm.model.layers[0].mlp.requires_grad_(True)
    seen = []
    for layer in lm.model.layers:
        layer.register_forward_pre_hook(lambda _layer, inputs: seen.append(inputs[0].requires_grad))
    require_input_gradient(lm)
    ids = torch.tensor([[5, 6, 7]])
    lm(input_ids=ids).logits.sum().backward()
    assert len(seen) > 1 and all(seen)
    seen.clear()
    with torch.no_grad():
        lm(input_ids=ids)
    assert not any(seen)
