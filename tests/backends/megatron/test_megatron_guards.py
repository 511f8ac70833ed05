"""Layouts that megatron-core would refuse late or compute wrongly are refused at once."""

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_families import COMMON, FAMILIES
from megatron_helpers import make_family, megatron_args

from slime.backends.families.base import KINDS, DeltaDims, Dims, to_hub, to_local
from slime.backends.megatron.config import (
    check_layout,
    read_hf_config,
    transformer_config,
)
from slime.backends.megatron.modules.sparse_attention import check_stage

pytestmark = pytest.mark.megatron
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return make_family(tmp_path_factory.mktemp("dense"), "qwen3")


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return make_family(tmp_path_factory.mktemp("moe"), "qwen3_moe")


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        (dict(tp=2), 3, "3 trainer ranks are not a multiple"),
        (dict(tp=3), 3, "4 attention heads"),
        (dict(pp=3), 3, "4 layers"),
        (dict(vpp=2), 1, "needs --pipeline-model-parallel-size"),
        (dict(ep=2), 2, "qwen3 is dense"),
        (dict(use_routing_replay=True), 1, "--use-routing-replay is for mixtures"),
        (dict(megatron_config={"moe_aux_loss_coeff": 0.1}), 1, "--moe-aux-loss-coeff is for mixtures"),
    ],
)
def test_impossible_layout_is_refused(dense, changes, ranks, message):
    args = megatron_args(dense, **changes)
    with pytest.raises(ValueError, match=message):
        check_layout(args, read_hf_config(dense), world_size=ranks, device=CPU)


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        (dict(ep=3), 3, "does not divide the model's 4 experts"),
        (dict(tp=2), 2, "needs --sequence-parallel"),
        (dict(tp=2, sp=True, expert_tensor_parallel_size=2), 2, r"which gloo \(CPU\) cannot do"),
        (dict(pp=2, moe_token_dispatcher_type="allgather"), 2, "use alltoall"),
        (dict(pp=2, megatron_config={"recompute_modules": ["moe"]}), 2, "which micro-batch they compute"),
    ],
)
def test_impossible_layout_of_experts_is_refused(moe, changes, ranks, message):
    with pytest.raises(ValueError, match=message):
        check_layout(megatron_args(moe, **changes), read_hf_config(moe), world_size=ranks, device=CPU)


def config_of(name):
    from transformers import AutoConfig

    kind, extra = FAMILIES[name]
    return AutoConfig.for_model(kind, **(COMMON | extra))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("glm_moe_dsa", dict(cp=2), r"than 8 tokens \(index_topk\).*--rollout-max-context-len 8"),
        ("deepseek_v32", dict(cp=2, rollout_max_context_len=9), "must be on one rank: use 1"),
        ("minimax_m2", dict(tp=4, sp=True), "one norm over all its 2 key-value heads"),
    ],
)
def test_layouts_that_a_familys_attention_cannot_have_are_refused(name, changes, message):
    args = megatron_args("model", **changes)
    with pytest.raises(ValueError, match=message):
        check_layout(args, config_of(name), world_size=4, device=CPU)


def test_a_stage_that_needs_the_keys_another_one_selects_is_refused():
    config = transformer_config(megatron_args("model"), config_of("glm_moe_dsa"), torch.float32, CPU)
    check_stage(config, 2)
    with pytest.raises(ValueError, match=r"layer 1, which uses the keys that layer 0 selects.* \[0, 2\]"):
        check_stage(config, 1)


def test_flag_that_contradicts_the_checkpoint_names_both(dense):
    args = megatron_args(dense, megatron_config={"num_layers": 7})
    with pytest.raises(ValueError, match=r"--num-layers is 7, but the config of --hf-checkpoint .* says 4"):
        transformer_config(args, read_hf_config(dense), torch.float32, CPU)


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"vocab_size": 128}, "127"),
        ({"rotary_base": 5.0}, "10000.0"),
        ({"untie_embeddings_and_output_weights": False}, "True"),
        ({"position_embedding_type": "learned_absolute"}, "rope"),
        ({"attention_dropout": 0.1}, "0.0"),
        # Not in the config of any model here, and without effect on our attention and norms.
        ({"window_size": [4, 0]}, "None"),
        ({"softmax_scale": 0.5}, "None"),
        ({"layernorm_zero_centered_gamma": True}, "False"),
        ({"num_moe_experts": 4}, "None"),
    ],
)
def test_flag_that_would_be_another_model_names_both(dense, field, said):
    ((name, value),) = field.items()
    option = "--" + name.replace("_", "-")
    args = megatron_args(dense, megatron_config=field)
    with pytest.raises(ValueError) as refused:
        transformer_config(args, read_hf_config(dense), torch.float32, CPU)
    assert f"{option} is {value}, but" in str(refused.value) and f"says {said}:" in str(refused.value)


def test_flags_that_repeat_the_checkpoint_are_welcome(dense, moe):
    """As launch scripts of Megatron's write a model down."""
    same = {
        "num_layers": 4,
        "vocab_size": 127,
        "rotary_base": 1e4,
        "group_query_attention": True,
        "normalization": "RMSNorm",
    }
    same |= {
        "untie_embeddings_and_output_weights": True,
        "qk_layernorm": True,
        "use_rotary_position_embeddings": True,
    }
    experts = {"moe_layer_freq": 1, "moe_router_num_groups": 1, "moe_router_topk": 2, "num_moe_experts": 4}
    for model, fields in ((dense, same), (moe, same | experts)):
        plain = transformer_config(megatron_args(model), read_hf_config(model), torch.float32, CPU)
        found = transformer_config(
            megatron_args(model, megatron_config=fields), read_hf_config(model), torch.float32, CPU
        )
        assert (found.num_layers, found.qk_layernorm) == (plain.num_layers, plain.qk_layernorm)


def test_interleaved_stages_without_overlap_are_refused(dense):
    """Megatron computes a wrong loss there and says nothing."""
    args = megatron_args(
        dense, pp=2, vpp=2, megatron_config={"overlap_p2p_comm": False, "batch_p2p_comm": True}
    )
    with pytest.raises(ValueError, match="computes a wrong loss without an error"):
        transformer_config(args, read_hf_config(dense), torch.float32, CPU)


@pytest.mark.parametrize("module", ["mla_up_proj", "moe_act", "atention"])
def test_recomputed_part_that_is_not_there_is_refused(dense, module):
    args = megatron_args(
        dense,
        activation_checkpointing="selective",
        megatron_config={"recompute_modules": ["core_attn", module]},
    )
    with pytest.raises(ValueError, match=f"--recompute-modules names {module}: there are core_attn, mlp"):
        transformer_config(args, read_hf_config(dense), torch.float32, CPU)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_of_all_ranks_join_to_what_was_cut(kind, size):
    dims = Dims(groups=4, head_dim=2, vocab=7, delta=DeltaDims(heads=4, key=2, values=2, value=3))
    shapes = {
        "qkv": [(16, 3), (8, 3), (8, 3)],
        "gated_qkv": [(32, 3), (8, 3), (8, 3)],
        "gate_up": [(8, 3), (8, 3)],
        "vocab": [(7, 3)],
        "delta_fused": [(64, 3), (16, 3)],
        "delta_apart": [(40, 3), (24, 3), (8, 3), (8, 3)],
        "delta_conv": [(40, 1, 4)],
    }.get(kind, [(8, 8)])
    tensors = [torch.randn(shape) for shape in shapes]
    parts = [to_local(kind, tensors, dims, size, rank) for rank in range(size)]
    assert all(torch.equal(a, b) for a, b in zip(to_hub(kind, parts, dims), tensors, strict=True))
