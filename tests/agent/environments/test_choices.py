"""How environments are chosen, where items come from, and what flags follow from --env."""

import itertools
import re
from collections import Counter

import pytest
from rollout_helpers import make_args

from slime.agent.environments.rows import read_environment, seed_of
from slime.arguments import parse_args
from slime.catalog.environments import Choice, read_choices, read_source, source_of


def test_tasks_weights_and_classes_are_read_and_written_back():
    choices = read_choices("reasoning_gym:chain_sum=2,gcd")
    assert choices == [Choice("reasoning_gym", "chain_sum", 2.0), Choice("reasoning_gym", "gcd")]
    assert read_choices("reasoning_gym:chain_sum,reasoning_gym:gcd")[1].task == "gcd"
    assert read_choices("my.envs:Maze") == [Choice("own", "my.envs:Maze")]
    for some in (choices, read_choices("a/b.py:Maze"), read_choices("textarena:TicTacToe-v0")):
        assert read_source(source_of(some, "heldout", 7)) == (some, "heldout", 7)
    assert read_choices("a/b.py:Maze")[0].short == "Maze"


@pytest.mark.parametrize(
    "text", ["chain_sum", "reasoning_gym:", "reasoning_gym:a=0", "reasoning_gym:a=x", "reasoning_gym:a,a"]
)
def test_what_is_no_choice_is_refused(text):
    with pytest.raises(ValueError, match="--env is "):
        read_choices(text)


def test_rows_depend_on_nothing_but_their_number_and_weights_are_kept():
    source = "env:environments_under_test:Countdown#train:20"
    once, again = list(read_environment(source)), list(read_environment(source))
    assert once == again and len(once) == 20
    seeds = {row["metadata"]["env_seed"] for _, row in once}
    assert len(seeds) == 20 and all(seed % 2 for seed in seeds)
    held = {row["metadata"]["env_seed"] for _, row in read_environment(source.replace("train", "heldout"))}
    assert not any(seed % 2 for seed in held)
    assert not {seed_of(n, True) for n in range(2000)} & {seed_of(n, False) for n in range(2000)}


def test_tasks_take_turns_by_weight():
    from slime.agent.environments.rows import _interleave

    turns = [c.task for c in itertools.islice(_interleave(read_choices("reasoning_gym:a=2,b,c")), 400)]
    assert Counter(turns) == {"a": 200, "b": 100, "c": 100}
    assert turns[:4] in (["a", "b", "a", "c"], ["a", "b", "c", "a"])


def flags(tmp_path, *own):
    make_args(tmp_path)  # writes the model's folder
    base = ("--hf-checkpoint", str(tmp_path / "model"), "--rollout-batch-size", "4", "--num-rollout", "1")
    return parse_args([*base, "--rollout-max-response-len", "64", "--n-samples-per-prompt", "2", *own])


def test_env_brings_items_a_generate_function_and_held_out_items_of_each_task(tmp_path):
    args = flags(tmp_path, "--env", "environments_under_test:Countdown", "--eval-interval", "5")
    assert args.prompt_data == "env:environments_under_test:Countdown#train:10000"
    assert args.custom_generate_function_path == "slime.agent.environments.episode.generate"
    [dataset] = args.eval_datasets
    assert (dataset.name, dataset.path) == ("Countdown", "env:environments_under_test:Countdown#heldout:64")


@pytest.mark.parametrize(
    "own, said",
    [
        (("--env-args", '{"Maze": {}}'), "--env-args has 'Maze'"),
        (("--env-args", '{"*": 3}'), "must be an object"),
        (("--label-key", "x"), "--label-key is given, but --env"),
        (("--turn-discount", "0.5", "--advantage-estimator", "reinforce_plus_plus"), "discounts by token"),
        (("--partial-episodes", "restart"), "only with --partial-rollout"),
    ],
)
def test_settings_that_contradict_each_other_are_told(tmp_path, own, said):
    with pytest.raises(ValueError, match=said):
        flags(tmp_path, "--env", "environments_under_test:Countdown", *own)


def test_flags_of_environments_do_nothing_without_one(tmp_path):
    with pytest.raises(ValueError, match="it has an effect only with --env"):
        make_args(tmp_path, None, "--max-turns", "3")


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ("nope:X", "No module named 'nope'; 'nope' is no environment family either"),
        ("reasoning-gym:gcd", "did you mean reasoning_gym"),
        ("missing.py:X", "no such plug-in file: missing.py"),
        ("environments_under_test:Nobody", "has no 'Nobody'; it defines"),
        ("json:JSONDecoder", "the class has no method reset and no method step"),
        ("environments_under_test:NoStep", "the class has no method step"),
    ],
)
def test_a_class_that_is_not_there_is_refused_before_anything_starts(env, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        next(read_environment(f"env:{env}#train:2"))


def test_a_family_whose_package_is_missing_is_told_by_its_flag(tmp_path, monkeypatch):
    make_args(tmp_path)  # imports what is imported late
    monkeypatch.setattr("slime.catalog.datasets.importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match="--env is reasoning_gym:gcd: it needs the package reasoning_gym: pip"
    ):
        flags(tmp_path, "--env", "reasoning_gym:gcd")
