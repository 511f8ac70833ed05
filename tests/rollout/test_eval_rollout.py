"""Evaluation: datasets side by side, each with its own reward and sampling, undisturbed by training."""

import contextlib
import json
import threading

import pytest
import rollout_plugins
from fake_engine import FakeEngine
from patience import eventually, longer_each_time
from rollout_helpers import make_args, make_source, write_prompts

from slime.rollout.rm_hub.scoring import reset_breaker
from slime.rollout.sglang_rollout import generate_rollout


@pytest.fixture(autouse=True)
def fresh():
    rollout_plugins.calls.clear()
    reset_breaker()


def two_datasets(folder):
    one, two = write_prompts(folder / "one.jsonl", 3), write_prompts(folder / "two.jsonl", 2)
    config = {
        "eval": {
            "defaults": {"max_response_len": 6},
            "datasets": [
                {"name": "one", "path": str(one), "n_samples_per_eval_prompt": 2, "temperature": 0.5},
                {
                    "name": "two",
                    "path": str(two),
                    "custom_rm_path": "rollout_plugins.fixed_reward",
                    "top_k": 1,
                },
            ],
        }
    }
    path = folder / "eval.yaml"
    path.write_text(json.dumps(config))
    return ("--eval-config", str(path), "--eval-interval", "1")


def test_two_datasets_have_their_own_rewards_and_sampling(tmp_path):
    with FakeEngine() as engine:
        args = make_args(tmp_path, engine, *two_datasets(tmp_path))
        output = generate_rollout(args, 0, None, evaluation=True)
    one, two = output.data["one"], output.data["two"]
    assert len(one["samples"]) == 6 and len(two["samples"]) == 2
    assert two["rewards"] == [0.25, 0.25] and one["rewards"] == [s.reward for s in one["samples"]]
    assert [s.index for s in one["samples"]] == list(range(6))
    assert [s.group_index for s in one["samples"]] == [0, 0, 1, 1, 2, 2]
    assert one["truncated"] == [False] * 6
    params = [r["sampling_params"] for r in engine.requests]
    assert sorted(p["temperature"] for p in params) == [0.5] * 6 + [1.0] * 2
    assert sum(p.get("top_k") == 1 for p in params) == 2
    assert all(p["max_new_tokens"] == 6 for p in params)


def test_a_dataset_may_have_its_own_generate_function(tmp_path):
    data = write_prompts(tmp_path / "one.jsonl", 2)
    entry = {
        "name": "one",
        "path": str(data),
        "custom_generate_function_path": "rollout_plugins.wants_evaluation",
    }
    (tmp_path / "eval.yaml").write_text(json.dumps({"datasets": [entry]}))
    with FakeEngine() as engine:
        args = make_args(
            tmp_path, engine, "--eval-config", str(tmp_path / "eval.yaml"), "--eval-interval", "1"
        )
        generate_rollout(args, 0, None, evaluation=True)
    assert engine.requests == []
    assert [evaluation for evaluation, _ in rollout_plugins.calls["wants_evaluation"]] == [True, True]


def test_samples_without_a_score_are_left_out_and_counted(tmp_path):
    data = write_prompts(tmp_path / "one.jsonl", 4)
    with FakeEngine() as engine:
        flags = (
            "--eval-prompt-data",
            "one",
            str(data),
            "--eval-interval",
            "1",
            "--limits",
            "reward-retries=0",
        )
        args = make_args(tmp_path, engine, *flags, "--custom-rm-path", "rollout_plugins.fails_for_odd_groups")
        output = generate_rollout(args, 0, None, evaluation=True)
    assert output.data["one"]["rewards"] == [1.0, 1.0] and len(output.data["one"]["samples"]) == 2
    assert output.metrics == {"eval/one/reward_failures": 2}


def test_a_prompt_that_takes_too_long_is_left_out_and_counted(tmp_path):
    data = write_prompts(tmp_path / "one.jsonl", 2)
    entry = {"name": "one", "path": str(data), "custom_rm_path": "rollout_plugins.fixed_reward"}
    hangs = {"custom_generate_function_path": "rollout_plugins.hangs_for_odd_groups"}
    with FakeEngine() as engine:
        flags = ("--eval-config", str(tmp_path / "eval.yaml"), "--eval-interval", "1")
        for seconds in longer_each_time(1):
            config = {"datasets": [entry | hangs | {"eval_task_timeout": seconds}]}
            (tmp_path / "eval.yaml").write_text(json.dumps(config))
            with contextlib.suppress(RuntimeError):  # the other prompt was late, too: no score at all
                output = generate_rollout(make_args(tmp_path, engine, *flags), 0, None, evaluation=True)
                break
    assert output.data["one"]["rewards"] == [0.25]
    assert output.metrics == {"eval/one/reward_failures": 1}


def test_an_evaluation_without_any_score_is_an_error(tmp_path):
    data = write_prompts(tmp_path / "one.jsonl", 2)
    with FakeEngine() as engine:
        flags = (
            "--eval-prompt-data",
            "one",
            str(data),
            "--eval-interval",
            "1",
            "--limits",
            "reward-retries=0",
        )
        args = make_args(tmp_path, engine, *flags, "--custom-rm-path", "rollout_plugins.always_fails")
        with pytest.raises(
            RuntimeError, match=r"evaluation one: none of 2 samples has a score.*judge is down"
        ):
            generate_rollout(args, 0, None, evaluation=True)


def test_an_abort_of_training_does_not_touch_evaluation(tmp_path):
    data = write_prompts(tmp_path / "one.jsonl", 6)

    trained = threading.Event()

    def script(payload, number):
        evaluating = payload["sampling_params"]["temperature"] == 0.5
        return (
            {"until": trained.is_set}
            if evaluating
            else {"hold": True, "tokens": [33]}
            if number >= 14
            else None
        )

    with FakeEngine(script) as engine:
        flags = ("--eval-prompt-data", "one", str(data), "--eval-interval", "1", "--eval-temperature", "0.5")
        args = make_args(tmp_path, engine, *flags, "--over-sampling-batch-size", "8")
        result = []
        thread = threading.Thread(
            target=lambda: result.append(generate_rollout(args, 0, None, evaluation=True))
        )
        thread.start()
        eventually(lambda: len(engine.requests) >= 6)
        generate_rollout(args, 0, make_source(args))
        assert engine.aborts and thread.is_alive()
        trained.set()
        thread.join()
    evaluation_rids = {r["rid"] for r in engine.requests if r["sampling_params"]["temperature"] == 0.5}
    assert evaluation_rids.isdisjoint(engine.aborted)
    assert all(s.response_length == 4 for s in result[0].data["one"]["samples"])


def test_a_sample_that_a_generate_function_gave_up_on_begins_again(tmp_path):
    data = write_prompts(tmp_path / "one.jsonl", 3)
    entry = {
        "name": "one",
        "path": str(data),
        "custom_generate_function_path": "rollout_plugins.gives_up_twice",
    }
    (tmp_path / "eval.yaml").write_text(json.dumps({"datasets": [entry]}))
    with FakeEngine() as engine:
        args = make_args(
            tmp_path, engine, "--eval-config", str(tmp_path / "eval.yaml"), "--eval-interval", "1"
        )
        output = generate_rollout(args, 0, None, evaluation=True)
    samples = output.data["one"]["samples"]
    assert [(s.status.value, s.response_length, s.reward) for s in samples] == [("completed", 1, 20.0)] * 3
    assert sorted(rollout_plugins.calls["gives_up_twice"]) == [(i, 0) for i in range(3) for _ in range(3)]
    assert output.metrics is None


def test_evaluation_asks_the_engines_that_are_kept_for_it_and_training_the_others(tmp_path):
    data = write_prompts(tmp_path / "one.jsonl", 3)
    with FakeEngine() as engine, FakeEngine() as kept:
        flags = ("--eval-prompt-data", "one", str(data), "--eval-interval", "1", "--eval-num-engines", "1")
        routers = {"default": ("127.0.0.1", engine.port), "evaluation": ("127.0.0.1", kept.port)}
        args = make_args(tmp_path, engine, *flags, "--rollout-num-gpus", "2", sglang_model_routers=routers)
        generate_rollout(args, 0, make_source(args))
        assert len(engine.requests) == 8 and kept.requests == []
        output = generate_rollout(args, 0, None, evaluation=True)
        generate_rollout(args, 1, make_source(args))
    assert len(output.data["one"]["samples"]) == len(kept.requests) == 3
    assert len(engine.requests) == 16
