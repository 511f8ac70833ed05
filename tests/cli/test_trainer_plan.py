"""What `slime plan` says of a trainer: golden tables of two models, each estimate against a slow count."""

import json
import random
import re

import pytest

from slime.cli.plan import main
from slime.preflight.pipeline_schedule import bubble_share, most_kept
from slime.preflight.trainer_plan import expert_imbalance, layer_parameters, outside_parameters

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
DENSE = """\
trainer: 4.02B parameters on 8 ranks (tp 2, pp 2, cp 1, dp 2, ep 1)
  stage  parameters   weights  gradients  optimizer  activations    total (GiB per rank, estimated)
      0       1.10B       2.1        4.1        6.2         15.3     27.7
      1       1.10B       2.1        4.1        6.2          7.7     20.0
  pipeline bubble: 11.1% of a step of 8 micro-batches
"""
EXPERTS = """\
trainer: 30.53B parameters on 16 ranks (tp 2, pp 2 x 2 chunks, cp 1, dp 4, ep 8)
  stage  parameters   weights  gradients  optimizer  activations    total (GiB per rank, estimated)
      0       2.20B       4.1        8.2       21.3         33.8     67.4
      1       2.20B       4.1        8.2       21.3         20.2     53.9
  pipeline bubble: 3.0% of a step of 16 micro-batches
  busiest expert-parallel rank: 1.14 times the mean work
"""


@pytest.fixture
def folder(tmp_path):
    def write(model: dict) -> str:
        (tmp_path / "config.json").write_text(json.dumps(model))
        return str(tmp_path)

    return write


def plan(model: str, ranks: int, *words: str) -> list[str]:
    return ["--hf-checkpoint", model, "--actor-num-gpus-per-node", str(ranks), *words]


def test_what_lies_in_host_memory_is_not_counted(folder, capsys):
    words = ["--hf-checkpoint", folder(QWEN3_4B), "--actor-num-gpus-per-node", "4", "--json"]

    def optimizer(*more: str) -> float:
        main([*words, *more])
        return json.loads(capsys.readouterr().out)["trainer"]["stages"][0]["optimizer"]

    plain = optimizer()
    assert optimizer("--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "fp8") == plain * 7 / 12
    half = optimizer("--optimizer-cpu-offload", "--optimizer-offload-fraction", "0.5")
    assert half == pytest.approx(plain / 2)
    assert optimizer("--optimizer-cpu-offload") == 0
    # Without activations to speak of, the fp32 weights that come for the step are the peak.
    alone = optimizer("--optimizer-cpu-offload", "--max-tokens-per-gpu", "1", "--num-micro-batches", "1")
    assert alone == pytest.approx(plain / 3, rel=0.01)


def test_dense_layout_has_its_golden_table(folder, capsys):
    words = [
        "--tensor-model-parallel-size",
        "2",
        "--pipeline-model-parallel-size",
        "2",
        "--sequence-parallel",
    ]
    assert main(plan(folder(QWEN3_4B), 8, *words)) == 0
    assert capsys.readouterr().out == DENSE


def test_interleaved_layout_of_experts_has_its_golden_table(folder, capsys):
    words = "--actor-num-nodes 2 --tensor-model-parallel-size 2 --sequence-parallel"
    words += " --pipeline-model-parallel-size 2"
    words += " --virtual-pipeline-model-parallel-size 2 --expert-model-parallel-size 8 --num-micro-batches 16"
    assert main(plan(folder(QWEN3_30B_A3B), 8, *words.split())) == 0
    assert capsys.readouterr().out == EXPERTS


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


@pytest.mark.parametrize(
    ("stages", "chunks", "micro_batches"),
    [(1, 1, 3), (2, 1, 4), (4, 1, 8), (4, 1, 2), (8, 1, 32), (2, 2, 4), (4, 2, 8), (4, 4, 16), (8, 2, 8)],
)
def test_bubble_of_equal_stages_is_the_known_one(stages, chunks, micro_batches):
    """Filling and draining take (stages - 1) / chunks micro-batches."""
    waiting = (stages - 1) / chunks
    expected = waiting / (micro_batches + waiting)
    assert bubble_share((chunks,) * stages, chunks, micro_batches) == pytest.approx(expected)


def test_idle_micro_batches_of_interleaved_stages_are_waiting_too():
    """6 of 8 micro-batches are real, and the pipeline fills and drains in 1.5."""
    assert bubble_share((2,) * 4, 2, 6) == pytest.approx(1 - 6 / 9.5)


def test_uneven_stages_wait_for_the_largest():
    # By hand, stages of 2 and 1 layers: forwards of the first end at 2 and 4, the second works 2-3 (f0), 3-4
    # (b0), the first 4-6 (b0); f1 4-5 and b1 5-6 on the second, b1 6-8 on the first: 8 units, of which the
    # stages work 8 and 4.
    assert bubble_share((2, 1), 1, 2) == pytest.approx(1 - 6 / 8)
    # The largest stage always works once it has begun.
    assert bubble_share((1, 8), 1, 4) == pytest.approx(1 - 4 * 9 / (64 + 2))


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_first_stage_keeps_the_most(stages):
    kept = [most_kept(stage, stages, 1, 32) for stage in range(stages)]
    assert kept == list(range(stages, 0, -1))
    assert most_kept(0, stages, 1, 1) == 1
    # Interleaved: stages + (stages - 1) / chunks on the first stage; on the last all
    # chunks but one of a group are under way.
    assert most_kept(0, stages, 4, 32) == pytest.approx(stages + (stages - 1) / 4)
    assert most_kept(stages - 1, stages, 4, 32) == pytest.approx((3 * stages + 1) / 4)


def test_uneven_stages_are_planned(folder, capsys):
    words = "--pipeline-model-parallel-size 4 --num-layers-in-last-pipeline-stage 3 --json"
    assert main(plan(folder(QWEN3_4B), 8, *words.split())) == 0
    shown = json.loads(capsys.readouterr().out)["trainer"]
    assert shown["bubble"] == pytest.approx(bubble_share((11, 11, 11, 3), 1, 8))
    layer = layer_parameters(QWEN3_4B, 0).total
    assert shown["stages"][1]["parameters"] == 11 * layer
    # The last stage also holds the last norm and a copy of the tied embedding.
    assert shown["stages"][3]["parameters"] == 3 * layer + 2560 + 151936 * 2560


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
    ("words", "message"),
    [
        ("--tensor-model-parallel-size 3", "not a multiple of tensor 3"),
        (
            "--pipeline-model-parallel-size 8 --virtual-pipeline-model-parallel-size 2",
            "36 layers cannot be shared",
        ),
        ("--expert-model-parallel-size 2", "has no experts"),
        (
            "--pipeline-model-parallel-size 4 --num-layers-in-first-pipeline-stage 7",
            "36 layers cannot be shared",
        ),
        ("--virtual-pipeline-model-parallel-size 2", "needs --pipeline-model-parallel-size"),
        ("--sequence-parallel", "needs --tensor-model-parallel-size"),
        ("--actor-num-nodes 3 --tensor-model-parallel-size 3", "32 attention heads"),
        ("--moe-load-max-over-mean 0.5", "use at least 1"),
    ],
)
def test_impossible_trainer_is_refused(folder, capsys, words, message):
    with pytest.raises(SystemExit) as stopped:
        main(plan(folder(QWEN3_4B), 8, *words.split()))
    assert stopped.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--actor-num-gpus-per-node 8 --hf-checkpoint", "--gpus 8 --model"])
@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"model_type": "mamba"}', "no plan of such a model (.*num_hidden_layers"),
        ("[1", "config.json cannot be read: Expecting"),
        ("[1]", "no plan of such a model"),
    ],
)
def test_a_config_that_nothing_can_be_counted_from_is_named(tmp_path, capsys, words, content, told):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(SystemExit) as end:
        main([*words.split(), str(tmp_path)])
    assert end.value.code == 2
    assert re.search(f"^error: .*{tmp_path}.*{told.replace('(', '[(]')}", capsys.readouterr().err)


@pytest.mark.parametrize(
    "words", ["--gpu-gib nan", "--optimizer-offload-fraction 5", "--moe-load-max-over-mean nan"]
)
def test_numbers_that_mean_nothing_are_refused(folder, capsys, words):
    with pytest.raises(SystemExit) as end:
        main(["--hf-checkpoint", folder(QWEN3_4B), "--actor-num-gpus-per-node", "8", *words.split()])
    assert end.value.code == 2 and words.split()[0] in capsys.readouterr().err


def test_trainer_without_a_model_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(plan(str(tmp_path), 8))
    assert "no config.json" in capsys.readouterr().err


def test_plan_for_programs_holds_the_trainer(folder, capsys):
    assert main(plan(folder(QWEN3_4B), 8, "--json", "--rollout-num-gpus", "2")) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["trainer"]["sizes"]["ranks"] == 8 and len(shown["engines"]) == 2
