"""`from slime import train`: rows and functions become a run's files, and the run is that of the command."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from processes import mortal_children
from terminal import run_in_terminal
from tiny_model import make_tiny_model

import slime
from slime import train
from slime.arguments.parser import parse_args
from slime.utils.misc import load_function

ROOT = Path(__file__).parent.parent
LENGTHS = {
    "num_rollout": 2,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 2,
    "rollout_max_response_len": 8,
}
ROWS = [{"prompt": f"{i}>", "label": str(i)} for i in range(8)]


@pytest.fixture
def started(tmp_path, monkeypatch):
    """The settings of every run that would begin, in place of the run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    found = []

    def run(args):
        found.append(args)
        (Path(args.run_dir) / "metrics.jsonl").write_text('{"step": 0, "rollout/raw_reward": 0.5}\n')

    monkeypatch.setattr("slime.cli.train.run_loop", run)
    return found


def test_rows_and_a_function_become_the_settings_of_a_run(started):
    seen = []

    def reward(args, sample):
        seen.append(sample)
        return 1.0

    result = train("model", reward, ROWS, **LENGTHS)
    [args] = started
    assert (args.input_key, args.label_key, args.num_rollout) == ("prompt", "label", 2)
    assert [json.loads(line) for line in Path(args.prompt_data).read_text().splitlines()] == ROWS
    assert load_function(args.custom_rm_path) is reward  # in this process the function itself
    assert args.save == str(result.run_dir / "checkpoints")
    assert result.curve() == {0: 0.5} and result.model_path is None
    settings = yaml.safe_load((result.run_dir / "inputs" / "run.yaml").read_text())
    assert settings["hf_checkpoint"] == str(Path("model").absolute())


def test_a_second_call_has_a_folder_and_functions_of_its_own(started):
    first = train("model", lambda args, sample: 1.0, ["a", "b"], **LENGTHS)
    second = train("model", lambda args, sample: 2.0, ["c"], save=None, **LENGTHS)
    assert first.run_dir != second.run_dir
    assert [load_function(args.custom_rm_path)(None, None) for args in started] == [1.0, 2.0]
    assert started[1].save is None and started[1].input_key == "input"
    with pytest.raises(ValueError, match="belongs to another run"):
        train("model", lambda args, sample: 3.0, ["d"], run_dir=first.run_dir, **LENGTHS)
    assert "a" in (first.run_dir / "inputs" / "prompts.jsonl").read_text()


def test_another_process_loads_what_a_notebook_defined(started):
    offset = 40

    async def generate(args, sample, sampling_params):
        return sample

    train("model", lambda args, sample: sample + offset, ROWS, generate=generate, **LENGTHS)
    [args] = started
    code = (
        "import sys; from slime.utils.misc import load_function; print(load_function(sys.argv[1])(None, 2)); "
        "print(load_function(sys.argv[2]).__name__)"
    )
    words = [sys.executable, "-c", code, args.custom_rm_path, args.custom_generate_function_path]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=600)
    assert done.stdout.split() == ["42", "generate"], done.stderr


def test_a_function_that_cannot_travel_is_told_where_it_must(started):
    lock = threading.Lock()

    def reward(args, sample):
        with lock:
            return 1.0

    train("model", reward, ROWS, **LENGTHS)  # called in this process, where it works
    assert load_function(started[0].custom_rm_path) is reward
    with pytest.raises(ValueError, match=r"rm .* cannot be sent to other processes: TypeError"):
        train("model", reward, ROWS, runtime="ray", **LENGTHS)
    with pytest.raises(ValueError, match=r"rm .* cannot be sent to other processes: TypeError"):
        train("model", reward, ROWS, rollout_workers=2, **LENGTHS)


def test_names_of_built_in_rewards_and_importable_functions_stay_names(started):
    from slime.rollout.rm_hub.f1 import f1_score

    train("model", "deepscaler", ROWS, **LENGTHS)
    train("model", f1_score, ROWS, **LENGTHS)
    assert started[0].rm_type == "deepscaler"
    assert started[1].custom_rm_path == "slime.rollout.rm_hub.f1.f1_score"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"data": []}, "data has no rows"),
        ({"data": {"prompt": ["a"]}}, "data is a mapping"),
        ({"data": [{"prompt": "a"}, {"prompt": {1, 2}}]}, "row 2 of data cannot be written as JSON"),
        ({"data": [1]}, "row 1 of data cannot be written"),
        ({"data": ROWS, "lrr": 1}, "unknown key 'lrr'; did you mean 'lr'"),
        ({"data": ROWS, "rm_type": "math", "num_rollout": "x"}, "num_rollout"),
        ({"data": ROWS, "hf_checkpoint": "x"}, "hf_checkpoint is given twice"),
        ({"data": "gone.csv"}, "there is no such file"),
    ],
)
def test_a_mistake_is_told_and_leaves_no_folder(started, arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        train("model", lambda args, sample: 0.0, **{**LENGTHS, **arguments})
    assert not started and not list(Path("runs").glob("*"))


def test_a_task_is_the_run_of_its_command(started):
    talks = [{"prompt": f"{i}?", "completion": "yes"} for i in range(8)]
    slime.sft("model", talks, lr=0.5)
    slime.dpo("model", [{"prompt": "a", "chosen": "b", "rejected": "c"}], out="dpo", save=None)
    slime.distill("model", ROWS, "model", num_rollout=1)
    slime.evaluate("model", {"one": ROWS, "two": ["a"]}, lambda args, sample: 1.0)
    sft, dpo, distill, evaluation = started
    assert (sft.input_key, sft.label_key, sft.lr, sft.num_epoch) == ("prompt", "completion", 0.5, 1)
    assert Path(sft.run_dir).name == "model-sft" and sft.save.endswith("model-sft/checkpoints")
    assert (dpo.run_dir, dpo.save, dpo.loss_type) == (str(Path("dpo").absolute()), None, "dpo_loss")
    assert distill.opd_teacher_load == str(Path("model").absolute()) and distill.num_epoch is None
    assert [dataset.name for dataset in evaluation.eval_datasets] == ["one", "two"]
    assert load_function(evaluation.custom_rm_path)(None, None) == 1.0
    # Without the preset: the file has it all.
    again = parse_args(["--config", f"{sft.run_dir}/inputs/run.yaml"])
    assert again.to_dict() == sft.to_dict() | {"config": f"{sft.run_dir}/inputs/run.yaml"}


def test_a_task_names_what_is_wrong(started):
    with pytest.raises(ValueError, match="has the columns 'a', and none of these"):
        slime.sft("model", [{"a": 1}])
    with pytest.raises(ValueError, match="no reward is given"):
        slime.evaluate("model", ROWS)
    assert not started and not list(Path("runs").glob("*"))


@pytest.mark.slow
def test_an_interrupt_ends_every_process_and_the_next_call_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "model")
    before, others = signal.getsignal(signal.SIGTERM), mortal_children()
    once = threading.Lock()

    def interrupting(args, sample):
        """Not where it is tried before the start: engines and ranks are there."""
        if mortal_children() != others and once.acquire(blocking=False):
            os.kill(os.getpid(), signal.SIGINT)
        return 0.0

    with pytest.raises(KeyboardInterrupt):
        train("model", interrupting, ROWS, **LENGTHS)
    assert mortal_children() == others
    assert signal.getsignal(signal.SIGTERM) == before
    result = train("model", lambda args, sample: float(len(sample.response)), ROWS, **LENGTHS)
    assert len(result.curve()) == 2 and result.model_path is not None
    assert mortal_children() == others


SCRIPT = """
import json, logging, sys
from pathlib import Path

import slime, slime.cli.train
from slime.observability.logging_utils import configure_logger


def stand_in(args):
    # In place of the loop: logs as it does, and writes the metrics of one step.
    configure_logger(level=args.log_level)
    logging.getLogger("slime.loop").info("a line of the log")
    row = {"time": 1.0, "step": 0, "rollout/raw_reward": 0.5, "perf/step_time": 1.0}
    (Path(args.run_dir) / "metrics.jsonl").write_text(json.dumps(row) + chr(10))


slime.cli.train.run_loop = stand_in
result = slime.train("model", lambda args, sample: 1.0, ["a"], **json.loads(sys.argv[1]))
print("the reward was", result.curve())
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "mine.py").write_text(SCRIPT)
    return "mine.py", json.dumps(LENGTHS)


def test_a_script_in_a_terminal_has_the_live_view_of_the_command(script):
    shown = run_in_terminal(*script, columns=100, rows=30)
    text = "\n".join(shown.lines())
    assert shown.code == 0, text
    assert "a line of the log" not in text
    assert "model-1234: finished" in text and "0.5 at the start" in text
    assert "the reward was {0: 0.5}" in text  # what the script prints afterwards


def test_a_script_whose_output_goes_elsewhere_has_plain_log_lines(script):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "INFO: a line of the log" in done.stderr and "finished" not in done.stdout
