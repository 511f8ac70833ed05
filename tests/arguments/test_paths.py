"""Relative paths of settings are resolved once, against the folder in which the command was started."""

import json

import pytest
from argument_helpers import parse

from slime.utils.files.run_file import is_unfinished, open_run_file


@pytest.fixture
def task(tmp_path, monkeypatch):
    """A folder as `slime new` writes it, in which the command is started."""
    for name in ("w/prompts.jsonl", "w/more.jsonl", "w/held_out.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"input": "a", "label": "b"}\n')
    for name in ("reward.py", "maze.py"):
        (tmp_path / "w" / name).write_text("def reward(args, sample, **kwargs):\n    return 0.0\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_folders_within_the_run_folder_move_with_it(task):
    folders = {"save": "{run_dir}/ckpt", "load": "{run_dir}/ckpt", "save_hf": "{run_dir}/hf-{rollout_id}"}
    args = parse(run_dir="w/run", **folders)
    assert (
        args.save == args.load == f"{task}/w/run/ckpt" and args.save_hf == f"{task}/w/run/hf-{{rollout_id}}"
    )
    with pytest.raises(ValueError, match=r"--save is \{run_dir\}/ckpt, and --run-dir is missing"):
        parse(save="{run_dir}/ckpt")


def test_paths_of_a_settings_file_are_absolute_when_they_are_read(task):
    (task / "w/run.yaml").write_text(
        "custom-rm-path: w/reward.py:reward\nrollout-sample-hook-path: [./w/reward.py:reward, pkg.mod.hook]\n"
        "prompt-data: w/prompts.jsonl@[0:1]\nsave: w/ckpt\nhf-checkpoint: model\nrun-dir: w/run\n"
        "save-debug-rollout-data: dumps/{rollout_id}.pt\n"
    )
    args = parse("--config", "w/run.yaml", hf_checkpoint=None, rollout_global_dataset=True)
    assert args.custom_rm_path == f"{task}/w/reward.py:reward"
    assert args.rollout_sample_hook_path == [f"{task}/w/reward.py:reward", "pkg.mod.hook"]
    assert args.prompt_data == f"{task}/w/prompts.jsonl@[0:1]"
    assert args.hf_checkpoint == args.engine_topology.policy.model_path == args.start_from == f"{task}/model"
    assert args.save == f"{task}/w/ckpt" and args.run_dir == f"{task}/w/run"
    assert args.save_debug_rollout_data == f"{task}/dumps/{{rollout_id}}.pt"
    assert args.sources["custom_rm_path"] == "file w/run.yaml", "the file that the user named"


def test_several_files_of_prompts_and_of_evaluation_are_absolute(task):
    (task / "eval.yaml").write_text(
        "datasets:\n- {name: held, path: w/held_out.jsonl, custom_rm_path: 'w/reward.py:reward'}\n"
    )
    given = {"rollout_global_dataset": True, "rm_type": "math", "prompt_data": "w/prompts.jsonl,w/more.jsonl"}
    args = parse(**given, eval_interval=1, eval_config="eval.yaml")
    assert args.prompt_data == f"{task}/w/prompts.jsonl,{task}/w/more.jsonl"
    (dataset,) = args.eval_datasets
    assert (dataset.path, dataset.custom_rm_path) == (
        f"{task}/w/held_out.jsonl",
        f"{task}/w/reward.py:reward",
    )
    named = parse(**given, eval_interval=1, eval_prompt_data=["held", "w/held_out.jsonl"])
    assert named.eval_prompt_data == ["held", f"{task}/w/held_out.jsonl"]


def test_names_that_are_no_paths_stay_as_they_are(task):
    args = parse(custom_rm_path="package.rewards.reward")
    assert args.hf_checkpoint == "owner/model"
    assert args.custom_rm_path == "package.rewards.reward"
    assert args.rollout_function_path == "slime.rollout.sglang_rollout.generate_rollout"
    assert parse(rollout_function_path="package.module:make").rollout_function_path == "package.module:make"
    assert parse(env="w/maze.py:Maze").prompt_data.startswith(f"env:{task}/w/maze.py:Maze#")


def test_a_mistake_is_reported_with_the_path_that_the_user_wrote(task):
    with pytest.raises(ValueError, match=r"--prompt-data is w/prompt.jsonl: .*did you mean w/prompts.jsonl"):
        parse(prompt_data="w/prompt.jsonl", rollout_global_dataset=True)


def test_a_run_from_before_paths_were_absolute_is_still_the_same_run(task):
    given = {"prompt_data": "w/prompts.jsonl,w/more.jsonl", "rollout_global_dataset": True, "save": "ckpt"}
    given |= {"run_dir": "run", "custom_rm_path": "w/reward.py:reward", "hf_checkpoint": "model"}
    settings = parse(**given).to_dict()
    old = json.loads(json.dumps(settings, default=vars_of).replace(f"{task}/", ""))
    (task / "run").mkdir()
    open_run_file(task / "run", {name: {"value": value} for name, value in old.items()}, "ckpt", None, None)
    assert is_unfinished(task / "run", settings, str(task / "ckpt"))
    assert parse(**given).load == str(task / "ckpt")
    assert parse(**given | {"custom_rm_path": "w/maze.py:reward"}).load is None


def vars_of(value):
    from dataclasses import asdict

    return asdict(value)
