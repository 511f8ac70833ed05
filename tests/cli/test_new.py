"""`slime new`: the folder that it makes runs as it is, and nothing of a user's is overwritten."""

import json
import subprocess
import sys

import pytest
from terminal import run_in_terminal

from slime.cli.main import main


@pytest.fixture
def task(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "mine", "--generate"]) == 0
    return tmp_path / "mine"


def test_the_test_of_the_reward_passes(task):
    result = subprocess.run(
        [sys.executable, "test_reward.py"], cwd=task, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0 and result.stdout.count("ok") == 3, result.stderr


def test_doctor_finds_nothing_wrong(task, capsys):
    assert main(["doctor", "--config", "mine/run.yaml"]) == 0
    out = capsys.readouterr().out
    assert "ready" in out and "error" not in out


def test_doctor_lists_what_is_wrong(task, capsys):
    (task / "nothing.py").write_text("def reward(args, sample):\n    return None\n")
    generate = "custom-generate-function-path"
    text = (
        (task / "run.yaml").read_text().replace(generate, f"# {generate}").replace("reward.py", "nothing.py")
    )
    (task / "run.yaml").write_text(text)
    assert main(["doctor", "--config", "mine/run.yaml", "--rollout-max-prompt-len", "2"]) == 2
    out = capsys.readouterr().out
    assert "all 200 prompts" in out and "no score" in out


def test_a_name_with_odd_characters_works_and_commands_can_be_copied(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "a#b: ü"]) == 0
    out = capsys.readouterr().out
    assert "slime train --config 'a#b: ü/run.yaml'" in out
    assert "created a#b: ü: README.md, model, prompts.jsonl, reward.py, run.yaml, test_reward.py\n" in out
    assert main(["doctor", "--config", "a#b: ü/run.yaml"]) == 0
    monkeypatch.chdir(tmp_path / "a#b: ü")
    with pytest.raises(SystemExit):
        main(["doctor", "--config", "run.yaml"])
    assert f"in {tmp_path} there is one: run the command there" in capsys.readouterr().err


def test_a_folder_that_is_there_is_left_alone(task, capsys):
    before = (task / "reward.py").read_text()
    assert main(["new", "mine"]) == 2
    assert "already exists" in capsys.readouterr().err and (task / "reward.py").read_text() == before


def test_a_folder_that_cannot_be_made_is_named_with_the_reason(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["new", f"{tmp_path}/file/deep/x"]) == 2
    why = f"{tmp_path}/file/deep/x cannot be created: {tmp_path}/file is a file; give another name."
    assert why in capsys.readouterr().err
    assert main(["new", f"{tmp_path}/{'x' * 300}"]) == 2
    assert "x cannot be created: File name too long; give another name." in capsys.readouterr().err


def assert_told(lines: list[str]) -> None:
    """Panels with whole frames, the parts of the start, one live line, samples, and no log lines."""
    text = "\n".join(lines)
    frames = [line for line in lines if line.startswith(("╭", "│", "╰"))]
    assert len(frames) > 15 and {len(line) for line in frames} == {80}, text
    for words in ("16 prompts x 8 samples", "checkpoints in mine/run/checkpoints", "slime plot mine/run"):
        assert words in text, text
    for part in ("data", "engines", "trainer", "model", "first push"):
        assert f"✓ {part}" in text, text
    [line] = [line for line in lines if line.startswith("train ")]
    assert "7/7" in line and "tok/s" in line and "step 0 · sample" in text and "INFO" not in text, text


def test_it_trains_and_the_reward_rises(task):
    """A whole run on a terminal, as a user starts it; then its answers are looked at."""
    command = ("-m", "slime", "train", "--config", "mine/run.yaml", "--num-rollout", "7")
    result = run_in_terminal(*command, columns=80, rows=24, timeout_s=900)
    assert result.code == 0, result.written[-2000:]
    assert_told(result.lines())
    logs = {path.name: path.read_text() for path in (task / "run" / "logs").iterdir()}
    assert {"driver.log", "engine-0.log", "trainer-0.log"} <= set(logs) and all(logs.values())
    assert "train   6: loss" in logs["driver.log"]
    rows = map(json.loads, (task / "run" / "metrics.jsonl").read_text().splitlines())
    rewards = [row["rollout/raw_reward"] for row in rows if "rollout/num_samples" in row]
    assert len(rewards) == 7 and rewards[-1] > 2 * rewards[0]
    shown = [sys.executable, "-m", "slime", "samples", "mine/run", "--step", "6", "--best", "2", "--json"]
    lines = subprocess.run(
        shown, cwd=task.parent, capture_output=True, text=True, timeout=300
    ).stdout.splitlines()
    assert [json.loads(line)["rollout_id"] for line in lines] == [6, 6]
