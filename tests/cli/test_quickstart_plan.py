"""The quick start writes complete data files and two runs whose flags parse."""

import functools
import json
from pathlib import Path

import pytest

from slime.arguments import parse_args
from slime.cli.quickstart import tiny
from slime.cli.quickstart.tasks import SORT_DIGITS, write_data
from slime.cli.quickstart.two_runs import (
    PRESETS,
    RECIPES,
    build_rl_argv,
    build_sft_argv,
    describe,
    machine_flags,
    preset,
    write_run_file,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.make_checkpoint(tmp_path_factory.mktemp("quickstart") / "checkpoint", seed=0)


def files_of(recipe, folder):
    num_sft = recipe.warm_up.num_samples if recipe.warm_up else 0
    return write_data(recipe.task, folder, seed=0, num_sft=num_sft, num_rl=recipe.num_rl_prompts)


@functools.cache
def rl_files_of(task, num_rl, folder):
    """Without the conversations of the warm-up, which are most of the data."""
    return write_data(task, folder / f"{task.name}-{num_rl}", seed=0, num_sft=0, num_rl=num_rl)


def rows(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def rl_args(recipe, checkpoint, tmp_path, **kwargs):
    files = rl_files_of(recipe.task, recipe.num_rl_prompts, checkpoint.parent)
    return parse_args(
        build_rl_argv(recipe, checkpoint=checkpoint, files=files, run_dir=tmp_path / "rl", seed=5, **kwargs)
    )


def test_data_files_hold_what_they_promise(tmp_path):
    files = files_of(RECIPES["tiny"], tmp_path)
    assert len(rows(files.sft)) == files.num_sft
    assert len(rows(files.rl)) == files.num_rl
    assert len(rows(files.held_out)) == files.num_held_out >= 500
    assert [m["role"] for m in rows(files.sft)[0]["messages"]] == ["user", "assistant"]
    assert set(rows(files.rl)[0]) == {"prompt", "label"}


def test_the_same_seed_writes_the_same_data(tmp_path):
    first, again, other = (
        write_data(SORT_DIGITS, tmp_path / name, seed=s, num_sft=500, num_rl=500)
        for name, s in (("a", 1), ("b", 1), ("c", 2))
    )
    assert first.rl.read_bytes() == again.rl.read_bytes() != other.rl.read_bytes()
    assert first.sft.read_bytes() == again.sft.read_bytes() != other.sft.read_bytes()
    assert first.held_out.read_bytes() == other.held_out.read_bytes()


def test_the_warm_up_flags_parse_and_use_every_sft_row_once(checkpoint, tmp_path):
    recipe = RECIPES["tiny"]
    files = files_of(recipe, tmp_path / "data")
    args = parse_args(
        build_sft_argv(recipe, checkpoint=checkpoint, files=files, run_dir=tmp_path / "sft", seed=5)
    )
    assert args.num_rollout * args.rollout_batch_size == files.num_sft
    assert args.debug_train_only and args.loss_type == "sft_loss"


@pytest.mark.parametrize("model", RECIPES)
def test_the_rl_flags_parse_and_evaluate_greedily_and_sampled(model, checkpoint, tmp_path):
    args = rl_args(RECIPES[model], checkpoint, tmp_path)
    assert {(d.name, d.temperature) for d in args.eval_datasets} == {
        ("heldout_greedy", 0.0),
        ("heldout_sampled", 1.0),
    }
    assert args.seed == 5


def test_what_the_user_wrote_wins_over_the_recipe(checkpoint, tmp_path):
    args = rl_args(RECIPES["tiny"], checkpoint, tmp_path, extra=["--lr", "0.5", "--runtime", "ray"])
    assert args.lr == 0.5 and args.runtime == "ray"


@pytest.mark.parametrize("model", RECIPES)
def test_every_preset_parses_and_names_only_what_differs_from_grpo(model, checkpoint, tmp_path):
    plain = rl_args(RECIPES[model], checkpoint, tmp_path)
    for estimator in PRESETS:
        words = preset(estimator, model).split()
        args = rl_args(RECIPES[model], checkpoint, tmp_path, estimator=estimator)
        assert args.advantage_estimator == estimator
        names = [word.removeprefix("--").replace("-", "_") for word in words if word.startswith("--")]
        assert all(getattr(args, name) != getattr(plain, name) for name in names), words
        assert all(word in describe(estimator, model) for word in words)


def test_the_estimators_that_the_quick_start_page_lists_have_a_preset():
    listed = {
        "ppo",
        "grpo",
        "gspo",
        "cispo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "rloo",
        "dr_grpo",
    }
    page = (Path(__file__).parents[2] / "docs" / "quickstart.md").read_text()
    assert set(PRESETS) == listed
    assert all(f"`{name}`" in page for name in listed)


def test_an_estimator_without_a_preset_runs_by_the_recipe(checkpoint, tmp_path):
    assert rl_args(RECIPES["tiny"], checkpoint, tmp_path, estimator="maxrl").advantage_estimator == "maxrl"
    assert "none" in describe("maxrl", "tiny")


def test_what_the_user_wrote_wins_over_the_preset(checkpoint, tmp_path):
    args = rl_args(RECIPES["tiny"], checkpoint, tmp_path, estimator="ppo", extra=["--critic-lr", "0.25"])
    assert args.critic_lr == 0.25


def test_the_control_changes_the_reward_of_training_but_not_of_evaluation(checkpoint, tmp_path):
    recipe = RECIPES["tiny"]
    args = rl_args(recipe, checkpoint, tmp_path, control=True)
    assert args.custom_rm_path == recipe.task.control_path
    assert {d.custom_rm_path for d in args.eval_datasets} == {recipe.task.reward_path}


def test_a_shortened_recipe_still_parses_and_evaluates_at_its_end(checkpoint, tmp_path):
    for num_rollout in (2, 7, 15, 24):
        recipe = RECIPES["tiny"].shortened_to(num_rollout)
        args = rl_args(recipe, checkpoint, tmp_path)
        assert args.num_rollout == num_rollout and num_rollout % args.eval_interval == 0


def test_only_flags_about_the_machine_reach_the_warm_up():
    extra = [
        "--lr",
        "1e-4",
        "--runtime",
        "ray",
        "--partial-rollout",
        "--dtype=bfloat16",
        "--rollout-stop",
        "a",
        "b",
    ]
    assert machine_flags(extra) == ["--runtime", "ray", "--dtype=bfloat16"]


def test_the_run_is_written_as_a_file_that_runs(checkpoint, tmp_path):
    args = rl_args(RECIPES["tiny"], checkpoint, tmp_path, extra=("--rollout-stop", "a", "b"))
    write_run_file(args, tmp_path / "run.yaml")
    text = (tmp_path / "run.yaml").read_text()
    assert text.splitlines()[2].startswith(f"hf-checkpoint: {checkpoint}    # your model")
    again = parse_args(["--config", str(tmp_path / "run.yaml")])
    own = {"run_dir", "save", "load", "save_hf", "config", "sources"}
    same, changed = ({k: v for k, v in a.to_dict().items() if k not in own} for a in (args, again))
    assert changed == same
    assert again.run_dir == again.save.removesuffix("/checkpoints") == str(tmp_path / "mine")


def test_a_very_long_quick_start_sees_its_prompts_again():
    assert RECIPES["tiny"].shortened_to(100).num_rl_prompts == 3_600
    assert RECIPES["tiny"].shortened_to(1_000_000).num_rl_prompts == 50_000
