"""What a user sees when something is wrong: one message that
names it, an exit code that is not 0, nothing left behind.
"""

import json
import os
import signal
from typing import NamedTuple

import psutil
import pytest
from loop_helpers import flags, make_world, run_train, series, start_train, wait_for
from patience import PATIENCE_S
from processes import cmdline, mortal_children
from tiny_model import make_tiny_model

from slime.cli import train as cli_train
from slime.rollout.rm_hub.scoring import reset_breaker
from slime.rollout.rm_hub.workers.check_pool import close_pools
from slime.utils.machine import shm

PLUGINS = '''
"""Plug-ins that do the wrong thing."""
from slime.rollout.data_source import RolloutDataSource
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample


async def raises(args, sample, **kwargs):
    raise ConnectionError("judge.example is down")


async def nan(args, sample, **kwargs):
    return float("nan")


async def no_sample(args):
    return 1.0


async def generate_raises(args, sample, sampling_params):
    raise KeyError("no such environment")


class TooFew(RolloutDataSource):
    """Gives two groups and then none."""

    def get_samples(self, num_samples):
        return super().get_samples(2) if self.sample_group_index == 0 else []


async def boxes(args, sample, sampling_params):
    """The first group answers with powers that no comparison of expressions finishes; others are right."""
    text = "123456789^{987654321}" if sample.group_index == 0 else sample.label
    sample.response = "\\\\boxed{" + text + "}"
    tokenizer = load_tokenizer(args.hf_checkpoint)
    sample.tokens = tokenizer.encode(sample.prompt)
    ids = tokenizer.encode(sample.response)
    sample.append_response_tokens(args, tokens=ids, log_probs=[-1.0] * len(ids))
    sample.status = Sample.Status.COMPLETED
    return sample
'''


class Ended(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = make_world(tmp_path_factory.mktemp("bad"))
    (folder / "bad_plugins.py").write_text(PLUGINS)
    yield folder
    close_pools()


@pytest.fixture
def end(world, capfd):
    """`end(run, **flags)`: `slime train` in this process (its
    engines and ranks are processes as ever) until it gives up.
    """

    def run(name: str, **changes) -> Ended:
        reset_breaker()
        before = mortal_children()
        try:
            code = cli_train.main(flags(world, name, **changes))
        except SystemExit as stop:
            code = stop.code
        out, err = capfd.readouterr()
        _, alive = psutil.wait_procs(mortal_children() - before, timeout=PATIENCE_S)
        assert not alive, [cmdline(p) for p in alive]
        assert shm.list_segments(f"slime-{os.getpid()}") == []
        return Ended(code, out, err)

    return run


def line_of(text: str) -> int:
    """In the file of plug-ins."""
    return next(number for number, line in enumerate(PLUGINS.splitlines(), start=1) if text in line)


def rollout_only(**changes) -> dict:
    """One small rollout, and no trainer to wait for."""
    small = {"num_rollout": 1, "rollout_batch_size": 2, "n_samples_per_prompt": 2, "global_batch_size": 4}
    return {"debug_rollout_only": True, **small, **changes}


def assert_one_message(ended: Ended, *parts: str, code: int = 2) -> None:
    """One `error:` that holds every part, and no traceback."""
    assert ended.code == code, ended
    errors = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, ended.err
    message = ended.err[ended.err.index("error: ") :]
    assert "Traceback" not in ended.err, ended.err
    for part in parts:
        assert part in message, message


# ---- told before anything starts ---------------------------------------------------------------------------


def test_an_unknown_flag_is_told_with_the_nearest_one(world):
    done = run_train(world, "unknown", check=False, rollout_batch_sise=4)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: unknown flag --rollout-batch-sise; did you mean --rollout-batch-size?\n"
    assert not (world / "unknown").exists()


def test_a_plug_in_with_another_signature_is_told_with_the_expected_call(world, end):
    ended = end("signature", custom_rm_path=f"{world}/bad_plugins.py:no_sample")
    assert_one_message(
        ended, "--custom-rm-path", "bad_plugins.py:no_sample", "expected fn(args, sample)", "no_sample(args)"
    )
    assert not (world / "signature").exists()


def test_a_missing_plug_in_file_is_told(world, end):
    ended = end("absent", custom_rm_path=f"{world}/absent.py:reward")
    assert_one_message(ended, "--custom-rm-path", f"{world}/absent.py")


def test_a_model_folder_without_a_tokenizer_is_told(world, end, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(world / "model" / name)
    ended = end("tokenizer", hf_checkpoint=tmp_path)
    assert_one_message(ended, f"--hf-checkpoint is {tmp_path}: the folder has no tokenizer")
    assert not (world / "tokenizer" / "config.json").exists()


def test_a_model_that_is_nowhere_is_told_in_a_few_lines(world, end, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the test must not ask the hub
    ended = end("nowhere", hf_checkpoint="nothere")
    assert_one_message(ended, "--hf-checkpoint is nothere: there is no such folder here")
    assert len(ended.err.splitlines()) <= 3
    assert not (world / "nowhere" / "config.json").exists()


def test_a_folder_that_is_no_checkpoint_cannot_be_loaded(world, end):
    (world / "notes").mkdir()
    (world / "notes" / "todo.txt").write_text("train")
    ended = end("load", load=world / "notes")
    assert_one_message(ended, f"--load {world}/notes", "no complete checkpoint", "--save")
    assert not (world / "load" / "config.json").exists()


def test_a_missing_prompt_file_is_told(world, end):
    ended = end("missing", prompt_data=world / "absent.jsonl")
    assert_one_message(ended, "--prompt-data", f"{world}/absent.jsonl")
    assert not (world / "missing" / "logs").exists()  # no process was started


@pytest.mark.parametrize(
    "line", ['{"input": "b", "label"', '{"input": null, "label": "1"}', '{"input": 7, "label": "1"}']
)
def test_a_row_that_cannot_be_used_is_told_with_file_and_line(world, end, line):
    file = world / "broken.jsonl"
    file.write_text('{"input": "a", "label": "1"}\n' + line + "\n")
    assert_one_message(end("broken", prompt_data=file), f"{file}, line 2: ")
    assert not (world / "broken" / "logs").exists()


def test_a_dataset_that_the_length_filter_empties_is_told(world, end):
    ended = end("empty", rollout_max_prompt_len=1)
    assert_one_message(ended, "--prompt-data", "all 40 prompts", "--rollout-max-prompt-len 1", "raise")
    assert not (world / "empty").exists()


def test_a_folder_that_is_no_model_is_told(world, end):
    folder = world / "no-model"
    folder.mkdir()
    assert_one_message(end("no-model-run", hf_checkpoint=folder), "--hf-checkpoint", str(folder))


# ---- told by a rollout -------------------------------------------------------------------------------------


def test_a_reward_that_raises_is_retried_then_stops_the_run_with_cause_and_count(world, end):
    ended = end(
        "raises",
        **rollout_only(
            custom_rm_path=f"{world}/bad_plugins.py:raises", limits="reward-failures=3,reward-retries=1"
        ),
        save=world / "raises-ckpt",
        save_interval=1,
    )
    assert "retrying" in ended.out + ended.err
    assert_one_message(
        ended,
        "3 sample(s) in a row got no reward",
        "ConnectionError: judge.example is down",
        f"{world}/bad_plugins.py:{line_of('judge.example')} in raises",
        "--limits reward-failures=3",
        code=1,
    )
    assert "Traceback" in (world / "raises" / "error.txt").read_text()
    assert not list((world / "raises-ckpt").glob("step_*"))
    assert series(world, "raises", "rollout/raw_reward") == {}


def test_a_reward_of_nan_never_becomes_a_number(world, end):
    ended = end(
        "nan",
        skip_preflight="reward",
        **rollout_only(
            custom_rm_path=f"{world}/bad_plugins.py:nan", limits="reward-failures=2,reward-retries=0"
        ),
    )
    assert_one_message(
        ended, "reward is nan, not a finite number", f"{world}/bad_plugins.py:", "sample 0", code=1
    )


def test_a_prompt_longer_than_the_context_is_told(world, end):
    file = world / "long.jsonl"
    file.write_text(json.dumps({"input": "a" * 1100, "label": "1"}) + "\n")
    ended = end("long", skip_preflight="lengths", **rollout_only(prompt_data=file))
    assert_one_message(ended, "1100 tokens", "the model's context is 1024", "--rollout-max-prompt-len 1023")


def test_a_mistake_in_a_generate_function_stops_the_run_at_the_first_with_its_line(world, end):
    ended = end(
        "generate", **rollout_only(custom_generate_function_path=f"{world}/bad_plugins.py:generate_raises")
    )
    place = f"{world}/bad_plugins.py:{line_of('no such environment')} in generate_raises"
    assert_one_message(ended, "KeyError: 'no such environment'", place, "(group ", code=1)
    assert "attempt" not in ended.err


def test_a_data_source_that_runs_dry_stops_the_run(world, end):
    ended = end(
        "dry", **rollout_only(rollout_batch_size=4, data_source_path=f"{world}/bad_plugins.py:TooFew")
    )
    assert_one_message(ended, "data source gave no groups", "--rollout-batch-size 4", code=1)


def test_answers_too_large_to_compare_are_wrong_and_counted_and_the_run_goes_on(world, end):
    ended = end(
        "hang",
        **rollout_only(rm_type="math", custom_rm_path=None, reward_failure_action="stop"),
        custom_generate_function_path=f"{world}/bad_plugins.py:boxes",
        rollout_shuffle=None,
    )
    assert ended.code == 0, ended.err
    assert "too large to be compared and counts as wrong" in ended.err
    # The other group's answers are right.
    assert series(world, "hang", "rollout/raw_reward") == {0: 0.5}
    assert series(world, "hang", "rollout/answers_not_compared") == {0: 2}


# ---- several runs on one machine ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def neighbours(world):
    """Two runs at the same time: the first saves a checkpoint and ends, the second gets Ctrl-C in mid-run."""
    first = start_train(world, "first", num_rollout=1, save=world / "ckpt", save_interval=1)
    second = start_train(world, "second", num_rollout=100_000)
    try:
        wait_for(lambda: series(world, "second", "train/loss"), second)
        second.send_signal(signal.SIGINT)
        yield first.wait(PATIENCE_S), second.wait(PATIENCE_S)
    finally:
        for process in (first, second):
            process.kill()


def test_two_runs_at_once_do_not_take_each_others_ports(world, neighbours):
    assert neighbours[0] == 0, (world / "first.out").read_text()
    assert series(world, "second", "train/loss")


def test_ctrl_c_is_one_line(world, neighbours):
    said = (world / "second.out").read_text()
    assert neighbours[1] == 130, said
    assert said.splitlines()[-1] == "interrupted: all processes of the run have ended"
    assert "Traceback" not in said


def test_a_checkpoint_of_another_model_is_told(world, neighbours, end):
    assert (world / "ckpt" / "step_0000000").is_dir(), "the run before this one saved nothing"
    other = make_tiny_model(world / "other", hidden=32)
    ended = end("other-model", hf_checkpoint=other, load=world / "ckpt", save=world / "ckpt", num_rollout=2)
    assert_one_message(
        ended, f"--hf-checkpoint {other}: config.json has changed since this run was started", "--finetune"
    )
    assert sorted(p.name for p in (world / "ckpt").iterdir()) == ["step_0000000"]
