"""The memory of Megatron layouts: golden tables of two models, each estimate against a slow count."""

import random
from types import SimpleNamespace

import pytest

from slime.cli.simulate import main
from slime.preflight.step_costs import expert_imbalance
from slime.preflight.trainer_plan import (
    GIB,
    Sizes,
    _most_kept,
    layer_parameters,
    outside_parameters,
    plan_stages,
)

QWEN3_4B = dict(
    hidden_size=2560,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=9728,
    vocab_size=151936,
    tie_word_embeddings=True,
)
QWEN3_30B_A3B = dict(
    hidden_size=2048,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    vocab_size=151936,
    tie_word_embeddings=False,
)

# Memory of each pipeline stage in GiB: weights, gradients, optimizer, activations.
DENSE = [(2.1, 4.1, 6.2, 15.3), (2.1, 4.1, 6.2, 7.7)]
EXPERTS = [(4.1, 8.2, 21.3, 33.8), (4.1, 8.2, 21.3, 20.2)]


def stages_of(model, sizes, **changes):
    options = dict(
        num_micro_batches=8,
        max_tokens_per_gpu=8192,
        optimizer_cpu_offload=False,
        optimizer_offload_fraction=1.0,
        exp_avg_dtype="fp32",
        exp_avg_sq_dtype="fp32",
        activation_checkpointing="none",
    )
    return plan_stages(model, sizes, SimpleNamespace(**(options | changes)))


def rounded(stages):
    return [
        tuple(round(size / GIB, 1) for size in (s.weights, s.gradients, s.optimizer, s.activations))
        for s in stages
    ]


def test_what_is_in_host_memory_is_not_counted():
    def optimizer(**changes) -> float:
        return stages_of(QWEN3_4B, Sizes(4), **changes)[0].optimizer

    plain = optimizer()
    assert optimizer(exp_avg_dtype="bf16", exp_avg_sq_dtype="fp8") == plain * 7 / 12
    half = optimizer(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
    assert half == pytest.approx(plain / 2)
    assert optimizer(optimizer_cpu_offload=True) == 0
    # With almost no activations, the fp32 weights that come for the step are the peak.
    alone = optimizer(optimizer_cpu_offload=True, max_tokens_per_gpu=1, num_micro_batches=1)
    assert alone == pytest.approx(plain / 3, rel=0.01)


def test_dense_layout_has_its_golden_table():
    assert rounded(stages_of(QWEN3_4B, Sizes(8, tp=2, pp=2, sequence_parallel=True))) == DENSE


def test_interleaved_layout_of_experts_has_its_golden_table():
    sizes = Sizes(16, tp=2, pp=2, vpp=2, ep=8, sequence_parallel=True)
    assert rounded(stages_of(QWEN3_30B_A3B, sizes, num_micro_batches=16)) == EXPERTS


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_first_stage_keeps_the_most(stages):
    kept = [_most_kept(stage, stages, 1, 32) for stage in range(stages)]
    assert kept == list(range(stages, 0, -1))
    assert _most_kept(0, stages, 1, 1) == 1
    # Interleaved: stages + (stages - 1) / chunks on the first stage; on the last all
    # chunks but one of a group are under way.
    assert _most_kept(0, stages, 4, 32) == pytest.approx(stages + (stages - 1) / 4)
    assert _most_kept(stages - 1, stages, 4, 32) == pytest.approx((3 * stages + 1) / 4)


def test_uneven_stages_are_planned():
    stages = stages_of(QWEN3_4B, Sizes(8, pp=4, layers=(11, 11, 11, 3)))
    layer = layer_parameters(QWEN3_4B, 0).total
    assert stages[1].parameters == 11 * layer
    # The last stage also holds the last norm and a copy of the tied embedding.
    assert stages[3].parameters == 3 * layer + 2560 + 151936 * 2560


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (Sizes(8, tp=3), "not a multiple of tensor 3"),
        (Sizes(8, pp=8, vpp=2), "36 layers, which 8 pipeline stages of 2 chunks cannot share"),
        (Sizes(8, ep=2), "has no experts"),
        (Sizes(8, vpp=2), "needs --pipeline-model-parallel-size"),
        (Sizes(8, sequence_parallel=True), "needs --tensor-model-parallel-size"),
        (Sizes(24, tp=3), "32 attention heads"),
    ],
)
def test_impossible_layouts_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        stages_of(QWEN3_4B, sizes)


def test_parameters_are_those_of_transformers():
    """Counts of Qwen3-4B and Qwen3-30B-A3B without the norms of single heads, 2 x 128 in each layer."""
    for model, count in ((QWEN3_4B, 4022468096), (QWEN3_30B_A3B, 30532122624)):
        layers = sum(layer_parameters(model, i).total for i in range(model["num_hidden_layers"]))
        found = layers + sum(p.total for p in outside_parameters(model).values())
        assert found == count - model["num_hidden_layers"] * 2 * 128


def test_experts_without_a_width_of_their_own_have_that_of_the_config():
    """Mixtral-8x7B has 46,702,792,704 parameters; of routers and norms little is counted."""
    widths = dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
    experts = dict(intermediate_size=14336, vocab_size=32000, num_local_experts=8, num_experts_per_tok=2)
    model = widths | experts
    layers = sum(layer_parameters(model, i).total for i in range(32))
    assert layers + sum(p.total for p in outside_parameters(model).values()) == 46702792704


def test_experts_spread_over_few_ranks_even_out():
    assert expert_imbalance(128, 1, 3.0) == 1.0
    assert expert_imbalance(128, 128, 3.0) == pytest.approx(3.0)
    assert 1.0 < expert_imbalance(128, 8, 3.0) < expert_imbalance(128, 32, 3.0) < 3.0


def test_imbalance_is_that_of_drawn_loads():
    draw = random.Random(0)
    experts, ranks, trials = 64, 8, 4000
    busiest, rank = 0.0, 0.0
    for _ in range(trials):
        loads = [draw.gauss(1.0, 0.4) for _ in range(experts)]
        busiest += max(loads) / trials
        shares = [sum(loads[first::ranks]) / (experts / ranks) for first in range(ranks)]
        rank += max(shares) / trials
    assert expert_imbalance(experts, ranks, busiest) == pytest.approx(rank, rel=0.02)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"model_type": "mamba"}', "no plan of such a model (AttributeError"),
        ("[1", "config.json cannot be read (Expecting"),
        ("[1]", "config.json holds a list"),
    ],
)
def test_a_config_that_nothing_can_be_counted_from_is_named(tmp_path, capsys, content, problem):
    (tmp_path / "config.json").write_text(content)
    words = "--gpus 8 --rollout-batch-size 8 --num-rollout 2 --n-samples-per-prompt 8"
    with pytest.raises(SystemExit) as end:
        main([*words.split(), "--rollout-max-response-len", "64", "--model", str(tmp_path)])
    assert end.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and str(tmp_path) in shown and problem in shown
