"""The cost model of a step: what was measured on one H200, and how it moves with sizes."""

import pytest

from benchmarks import scaling
from slime.catalog.gpus import GPUS, MODELS
from slime.cli.main import main
from slime.preflight.step_costs import EnginePlan, Model, Work, train_plan
from slime.preflight.trainer_plan import Sizes

H200 = GPUS["h200"]


# Seconds of a real SGLang on one H200 (benchmarks/generation_costs.py; vocabulary of 151,936).
PLAIN, WIDE = (Work(128, 256, 512, 0.0), 64), (Work(512, 32, 950, 0.0), 256)
ALONE, TAIL = (Work(1, 128, 512, 0.0), 1), (Work(256, 64, 380, 0.9, 4096), 256)
WAVES = (Work(256, 512, 256, 0.6, 1024), 32)
LONG_RESPONSES, LONG_PROMPTS = (Work(64, 128, 4096, 0.0), 64), (Work(256, 4096, 64, 0.0), 256)
MEASURED = [
    *(("0.6b", PLAIN, 3.89), ("0.6b", WIDE, 15.89), ("0.6b", ALONE, 0.95), ("0.6b", TAIL, 7.36)),
    *(("0.6b", WAVES, 10.38), ("4b", PLAIN, 6.69), ("4b", WIDE, 24.63), ("4b", ALONE, 1.92)),
    *(("4b", TAIL, 11.93), ("4b", WAVES, 18.40), ("4b", LONG_RESPONSES, 50.29), ("4b", LONG_PROMPTS, 22.80)),
    *(
        ("8b", PLAIN, 8.72),
        ("8b", WIDE, 30.81),
        ("8b", ALONE, 2.71),
        ("8b", TAIL, 16.41),
        ("8b", WAVES, 21.46),
    ),
]


@pytest.mark.parametrize(("shape", "load", "seconds"), MEASURED)
def test_generation_on_one_h200_is_predicted_within_a_fifth(shape, load, seconds):
    work, max_running = load
    tied = MODELS[f"qwen3-{shape}"] | {"tie_word_embeddings": True}
    predicted = EnginePlan(Model(tied), H200, 1, max_running).generate_s(work, work.samples)
    assert predicted == pytest.approx(seconds, rel=0.2)


def test_a_step_on_one_h200_is_predicted_within_a_fifth():
    """docs/performance.md: 512 responses of 950 tokens, 22.2 s generating and 22.4 s training."""
    model = Model(MODELS["qwen3-4b"] | {"vocab_size": 512})
    work = Work(512, 32, 950, 0.0, passes=0, siblings=8)
    assert EnginePlan(model, H200, 1, 256).generate_s(work, 512) == pytest.approx(22.2, rel=0.2)
    assert train_plan(model, H200, Sizes(1), work).seconds == pytest.approx(22.4, rel=0.2)


def test_published_steps_on_many_gpus_are_predicted_within_two_fifths():
    for published in scaling.PUBLISHED:
        assert scaling.published_step(published) == pytest.approx(published.step_s, rel=0.4), published.model


def test_gpus_that_work_together_are_slower_than_one_alone():
    rates = [H200.among(gpus).flops for gpus in (1, 2, 8, 16, 256)]
    assert rates[0] == H200.flops and rates == sorted(rates, reverse=True) and rates[3] == rates[4]


def test_a_prompt_is_computed_once_for_all_its_samples():
    engine = EnginePlan(Model(MODELS["qwen3-4b"]), H200, 1, 256)
    alone, shared = (engine.generate_s(Work(256, 4096, 64, siblings=n), 256) for n in (1, 8))
    assert shared < alone - engine.prefill_s(200 * 4096)


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
    steps = [scaling.best_runs(model, H200, gpus, Work(256, 128, 2048))[0].step_s for gpus in (8, 16)]
    assert steps[0] > steps[1]
    engine = EnginePlan(model, H200, 1, 64)
    assert engine.generate_s(Work(64, 128, 2048, 1.0), 64) > 1.5 * engine.generate_s(
        Work(64, 128, 2048, 0.0), 64
    )


def test_no_replica_and_no_engine_is_without_a_sample():
    model, few = Model(MODELS["qwen3-4b"]), Work(16, 256, 4096, 0.0, passes=0)
    for run in scaling.best_runs(model, H200, 256, few):
        assert run.trainer.sizes.dp <= 16
        assert run.generate_s >= 4096 / 2 * run.engine.decode_s(1, 0), "two rollouts are in flight at most"


@pytest.mark.parametrize(
    "words",
    [
        "--num-gpus-per-node 0",
        "--rollout-num-gpus-per-engine 0",
        "--rollout-num-gpus 99999999999",
        "--rollout-num-gpus -3",
    ],
)
def test_numbers_of_a_plan_of_engines_that_nobody_can_mean_are_refused(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--hf-checkpoint", "x", "--rollout-num-gpus", "8", *words.split()])
    assert stop.value.code == 2 and f"argument {words.split()[0]}: " in capsys.readouterr().err


def test_splits_of_gpus_are_what_simulate_tries(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--model", "deepseek-v3", "--gpus", "1024"])
    assert stop.value.code == 2 and "simulate --gpus N" in capsys.readouterr().err
