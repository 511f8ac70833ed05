"""What a script says of its model is held against the config: repeated it is fine, changed it is not."""

import json

import pytest
from launch_lines import MODELS, NOT_BUILT, command_line, make_world
from megatron_families import COMMON, FAMILIES

from slime.arguments import parse_args

pytest.importorskip("megatron")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("world")
    make_world(root)
    return root


def built(model, root, *words):
    import torch
    from transformers import AutoConfig

    from slime.backends.megatron import config

    kind, extra = FAMILIES[model]
    hf_config = AutoConfig.for_model(kind, **(COMMON | extra))
    args = parse_args([*command_line(model, "replayed", root), *words])
    return config.transformer_config(args, hf_config, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("model", [m for m in MODELS if m not in NOT_BUILT])
def test_flags_of_the_model_file_agree_with_its_config(model, root):
    assert built(model, root).num_layers == 4


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("deepseek_v3", ("--kv-lora-rank", "512")),
        ("deepseek_v3", ("--rotary-scaling-factor", "40")),
        ("qwen3", ("--apply-layernorm-1p",)),
        ("qwen3", ("--post-self-attn-layernorm",)),
        ("glm4", ("--rotary-percent", "0.25")),
    ],
)
def test_another_model_than_the_config_says_is_refused(model, words, root):
    with pytest.raises(ValueError, match="the architecture comes from the checkpoint"):
        built(model, root, *words)


def test_kimi_k2_is_built_as_the_deepseek_v3_that_it_is(root, tmp_path):
    import torch
    from transformers import AutoConfig

    from slime.backends.megatron import config

    kind, extra = FAMILIES["deepseek_v3"]
    values = AutoConfig.for_model(kind, **(COMMON | extra)).to_dict() | {"model_type": "kimi_k2"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    words = [*command_line("deepseek_v3", "replayed", root), "--hf-checkpoint", str(tmp_path)]
    args = parse_args(words)
    assert args.train_backend == "megatron"
    made = config.transformer_config(
        args, config.read_hf_config(str(tmp_path)), torch.float32, torch.device("cpu")
    )
    assert (made.num_layers, made.kv_lora_rank, made.num_moe_experts) == (4, 16, 16)
