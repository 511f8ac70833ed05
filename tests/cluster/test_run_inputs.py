"""A run that is resumed notices which of the files that define it have changed since it was started."""

import json

import pytest
from argument_helpers import parse
from tiny_model import make_tiny_model

from slime.cluster.checkpoints.checkpoint import write_checkpoint
from slime.cluster.checkpoints.save_folder import check_folders
from slime.cluster.run_opening import close_run, open_run
from slime.utils.files.run_file import read_run
from slime.utils.files.step_folders import Manifest, find_step

ROWS = '{"input": "1 + 1", "label": "2"}\n'


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden=16)


@pytest.fixture
def world(model, tmp_path):
    """A folder with all files of a run, which has saved a checkpoint and was killed."""
    (tmp_path / "model").mkdir()
    for file in model.iterdir():
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "prompts.jsonl").write_text(ROWS)
    (tmp_path / "held.jsonl").write_text(ROWS)
    (tmp_path / "reward.py").write_text("def reward(args, sample):\n    return 1.0\n")
    run = open_run(settings(tmp_path))
    (run.run_dir / "metrics.jsonl").write_text("{}\n")
    save(tmp_path, run)
    return tmp_path


def settings(world, **changes):
    flags = {
        "hf_checkpoint": world / "model",
        "rollout_global_dataset": True,
        "prompt_data": world / "prompts.jsonl",
        "custom_rm_path": f"{world}/reward.py:reward",
        "eval_prompt_data": ["held", world / "held.jsonl"],
        "eval_interval": 1,
        "run_dir": world / "run",
        "save": world / "save",
    }
    return parse(**{**flags, **changes})


def save(world, run):
    manifest = Manifest(0, run.run_id, 1, inputs=run.inputs)
    write_checkpoint(world / "save", manifest, {}, lambda path: path.mkdir(), 0)


def resume(world, **changes):
    args = settings(world, load=world / "save", **changes)
    run = open_run(args, find_step(args.load))
    close_run(run, None)
    return run


def change(file, **values):
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_nothing_is_said_of_files_that_are_as_they_were(world, caplog):
    resume(world)
    assert "digest" not in caplog.text and "changed" not in caplog.text


@pytest.mark.parametrize("folder", ["run", "second"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
def test_another_tokenizer_or_model_config_is_an_error_that_names_the_file(world, name, folder):
    change(world / "model" / name, rms_norm_eps=1e-3)
    before = sorted(world.rglob("*"))
    with pytest.raises(ValueError, match=rf"--hf-checkpoint .*{name} has changed.* --finetune"):
        resume(world, run_dir=world / folder)
    if folder == "run":
        args = settings(world, load=world / "save", dry_run=True)
        assert [f for f in check_folders(args) if f"{name} has changed" in f.text], "a dry run says so too"
    (world / "second").exists() and (world / "second").rmdir()
    assert sorted(world.rglob("*")) == before, "nothing was written"
    resume(world, run_dir=world / "third", finetune=True, save=world / "more")  # new run from these weights


def test_a_tokenizer_file_that_is_gone_is_an_error(world):
    (world / "model" / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer_config.json is missing"):
        resume(world)


@pytest.mark.parametrize(
    "name, flag", [("reward.py", "--custom-rm-path"), ("held.jsonl", "--eval-prompt-data held")]
)
def test_another_reward_or_evaluation_file_is_a_warning(world, name, flag, caplog):
    with open(world / name, "a") as file:
        file.write("\n" if name == "reward.py" else ROWS)
    resume(world)
    assert f"{flag}: {world / name} has changed since this run was started" in caplog.text
    caplog.clear()
    resume(world)
    assert "has changed" not in caplog.text, "one warning for one change"


def test_a_run_without_a_checkpoint_yet_notices_it_too(world):
    for path in (world / "save").iterdir():
        path.rename(world / path.name)
    change(world / "model" / "config.json", rms_norm_eps=1e-3)
    with pytest.raises(ValueError, match=r"config.json has changed"):
        args = settings(world)
        assert args.load == str(world / "save"), "the same command resumes its run"
        open_run(args)


def test_a_run_of_an_earlier_version_warns_once_that_it_has_no_digests(world, caplog):
    file = world / "run" / "run.json"
    data = json.loads(file.read_text())
    assert data.pop("inputs")
    file.write_text(json.dumps(data))
    [step] = (world / "save").iterdir()
    manifest = find_step(world / "save").manifest
    (step / "manifest.json").write_text(Manifest(0, manifest.run_id, 1, manifest.files).to_json())
    run = resume(world)
    assert caplog.text.count("has no digests") == 1
    assert read_run(world / "run").last.inputs == run.inputs != {}
    caplog.clear()
    resume(world)
    assert "has no digests" not in caplog.text
    change(world / "model" / "config.json", rms_norm_eps=1e-3)
    with pytest.raises(ValueError, match=r"config.json has changed"):
        resume(world)
