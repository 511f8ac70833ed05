"""The cost model of a step: what was measured on one H200, and how it moves with sizes."""

import json

import pytest

from slime.catalog.gpus import GPUS, MODELS
from slime.cli.main import main
from slime.preflight.step_costs import EnginePlan, Model, Work, best_runs, train_plan
from slime.preflight.trainer_plan import Sizes

H200 = GPUS["h200"]


def test_a_step_on_one_h200_is_what_was_measured():
    """docs/performance.md: 512 answers of about 950 tokens, 23.2 s generating and 21.6 s training."""
    model = Model(MODELS["qwen3-4b"] | {"vocab_size": 512})
    work = Work(512, 32, 950, 0.0, passes=0)
    assert EnginePlan(model, H200, 1, 256).generate_s(work, 512) == pytest.approx(23.2, rel=0.05)
    assert train_plan(model, H200, Sizes(1), work).seconds == pytest.approx(21.6, rel=0.06)


def test_parameters_are_those_that_models_are_named_for():
    for name, billions in {
        "qwen3-4b": 4.0,
        "qwen3-30b-a3b": 30.5,
        "qwen3-235b-a22b": 235,
        "deepseek-v3": 671,
    }.items():
        assert Model(MODELS[name]).parameters / 1e9 == pytest.approx(billions, rel=0.02)


def test_lengths_keep_their_mean_whatever_is_cut_off():
    work = Work(8, 10, 1000, 1.0, longest=2000)
    assert sum(work.lengths()) / len(work.lengths()) == pytest.approx(1000, rel=0.01)
    assert max(work.lengths()) == 2000


def test_more_gpus_are_faster_and_a_long_tail_is_slower():
    model = Model(MODELS["qwen3-4b"])
    steps = [best_runs(model, H200, gpus, Work(256, 128, 2048))[0].step_s for gpus in (8, 16)]
    assert steps[0] > steps[1]
    engine = EnginePlan(model, H200, 1, 64)
    assert engine.generate_s(Work(64, 128, 2048, 1.0), 64) > 1.5 * engine.generate_s(
        Work(64, 128, 2048, 0.0), 64
    )


def test_the_command_prints_the_best_split_with_its_assumptions(capsys):
    words = "plan --gpus 16 --model qwen3-4b --samples 128 --answer-tokens 512"
    assert main(words.split()) == 0
    printed = capsys.readouterr().out
    assert "best: " in printed and "assumed:" in printed and "train:rollout" in printed
    assert main([*words.split(), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows == sorted(rows, key=lambda row: row["step_s"])


def test_a_model_that_does_not_fit_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--gpus", "8", "--model", "deepseek-v3"])
    assert "no layout of deepseek-v3 fits" in capsys.readouterr().err


@pytest.mark.parametrize("gpus", [9, 320, 1023])
def test_where_fewer_gpus_are_faster_the_plan_says_so(capsys, gpus):
    assert main(f"plan --gpus {gpus} --model qwen3-14b".split()) == 0
    printed = capsys.readouterr().out
    best = float(printed.partition("a step ")[2].partition(" s")[0])
    model, work = Model(MODELS["qwen3-14b"]), Work(2048, 256, 4096, 0.8, 8 * 4096.0, 0)
    below = best_runs(model, H200, gpus - gpus % 256 or 8, work)[0].step_s
    assert ("fewer are faster: on" in printed) == (round(below, 1) < best)


def test_a_few_gpus_less_are_looked_at_too(capsys):
    assert main(["plan", "--gpus", "29", "--gpu", "h100", "--model", "llama-3.1-8b"]) == 0
    assert "fewer are faster: on 2" in capsys.readouterr().out


def test_gpus_that_no_layout_divides_are_told_from_too_few(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--gpus", "257", "--model", "deepseek-v3"])
    told = capsys.readouterr().err
    assert "uses exactly so many; --gpus 256 has one" in told and "use more" not in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--longest 10", "answers cannot have 4096 tokens on average"),
        ("--optimizer-steps 4096", "a rollout has 2048 (--samples)"),
    ],
)
def test_lengths_that_no_run_has_are_named(capsys, words, told):
    with pytest.raises(SystemExit) as end:
        main(f"plan --gpus 8 --model qwen3-4b {words}".split())
    assert end.value.code == 2 and told in capsys.readouterr().err


def test_no_replica_and_no_engine_is_without_a_sample():
    model, few = Model(MODELS["qwen3-4b"]), Work(16, 256, 4096, 0.0, passes=0)
    for run in best_runs(model, H200, 256, few):
        assert run.trainer.sizes.dp <= 16
        assert run.generate_s >= 4096 / 2 * run.engine.decode_s(1, 0), "two rollouts are in flight at most"


@pytest.mark.parametrize(
    "words",
    [
        "--gpus 999999999999",
        "--gpus 8 --answer-tokens 0",
        "--gpus 8 --answer-tokens inf",
        "--gpus 8 --prompt-tokens nan",
        "--gpus 8 --spread 1e9",
        "--gpus 8 --samples 0",
    ],
)
def test_numbers_that_nobody_can_mean_are_refused_by_their_flag(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--model", "qwen3-4b", *words.split()])
    flag, value = words.split()[-2:]
    assert stop.value.code == 2 and f"argument {flag}: '{value}' is no" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "--num-gpus-per-node 0",
        "--rollout-num-gpus-per-engine 0",
        "--first-gpu -9",
        "--rollout-num-gpus 99999999999",
        "--rollout-num-gpus -3",
    ],
)
def test_so_are_those_of_a_plan_of_engines(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--hf-checkpoint", "x", "--rollout-num-gpus", "8", *words.split()])
    assert stop.value.code == 2 and f"argument {words.split()[0]}: " in capsys.readouterr().err


def test_a_plan_fits_a_terminal_of_80_columns(capsys):
    assert main(["plan", "--model", "deepseek-v3", "--gpus", "1024"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
