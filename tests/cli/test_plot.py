"""`slime plot`: curves of any metric, of several runs, in a terminal and as a picture."""

import json
import shutil
from dataclasses import replace

import pytest

from slime.cli.main import main
from slime.utils.files.run_file import RunRecord, Start, write_run


@pytest.fixture
def runs(tmp_path):
    for name, scale in (("one", 1.0), ("two", 2.0)):
        (tmp_path / name).mkdir()
        rows = [
            {
                "step": i,
                "step_key": "rollout/step",
                "rollout/raw_reward": scale * i,
                "train/odd": float("nan"),
            }
            for i in range(100)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name / "metrics.jsonl").write_text(text + '{"step": 100, "rollout/raw_rew')
    return [str(tmp_path / "one"), str(tmp_path / "two")]


def test_two_runs_in_the_terminal(runs, capsys):
    assert main(["plot", *runs]) == 0
    out = capsys.readouterr().out
    assert "rollout/raw_reward" in out and "0 -> 99" in out and "0 -> 198" in out and "from 0 to 198" in out


def test_a_shorter_run_ends_where_it_ended(runs, tmp_path, capsys):
    rows = [{"step": i, "step_key": "rollout/step", "rollout/raw_reward": 198.0} for i in range(50)]
    (tmp_path / "one" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["plot", *runs]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"  {runs[0]}")]
    strip = line.removeprefix(f"  {runs[0]} ").partition(" 198 -> 198")[0]
    assert strip == "█" * 30 + " " * 30


def test_a_picture(runs, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "p.png"
    assert main(["plot", *runs, "-m", "rollout/*", "--out", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["plot", *runs, "--out", str(tmp_path / "no" / "p.png")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_picture_is_written_where_it_is_said_to_be(runs, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "pictures").mkdir()
    assert main(["plot", *runs, "--out", str(tmp_path / "pictures")]) == 2
    assert "it is a folder" in capsys.readouterr().err and not (tmp_path / "pictures.png").exists()
    assert main(["plot", *runs, "--out", str(tmp_path / "curves")]) == 0
    assert f"wrote {tmp_path / 'curves.png'}: " in capsys.readouterr().out
    assert (tmp_path / "curves.png").exists()


def test_names_are_listed_and_misspelt_ones_corrected(runs, capsys):
    assert main(["plot", runs[0], "--list"]) == 0
    assert "rollout/raw_reward" in capsys.readouterr().out
    assert main(["plot", runs[0], "-m", "rollout/raw_rewards"]) == 2
    assert "did you mean rollout/raw_reward" in capsys.readouterr().err


def test_a_folder_that_is_no_run(tmp_path, capsys):
    assert main(["plot", str(tmp_path / "nowhere")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_of_evaluations_the_scores_are_shown_unless_more_is_asked_for(tmp_path, capsys):
    row = {"step": 0, "step_key": "eval/step", "eval/held": 0.5, "eval/held/response_len/mean": 7.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["plot", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "eval/held" in out and "response_len" not in out
    assert main(["plot", str(tmp_path), "-m", "eval/*"]) == 0
    assert "eval/held/response_len/mean" in capsys.readouterr().out


def test_runs_that_differ_by_their_seed_are_one_curve(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed, lr in ((1, 0.1), (2, 0.1), (1, 0.5)):
        folder = tmp_path / f"lr={lr},seed={seed}"
        settings = {"lr": lr, "seed": seed, "run_dir": str(folder), "save": f"{folder}/checkpoints"}
        folder.mkdir()
        sourced = {name: {"value": value, "source": "default"} for name, value in settings.items()}
        write_run(folder, RunRecord("id", folder.name, Start("now", sourced, {}, {})))
        row = {"step": 0, "step_key": "rollout/step", "rollout/raw_reward": float(seed)}
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert main(["plot", *names]) == 0
    out = capsys.readouterr().out
    assert "lr=0.1 (2 seeds)" in out and "1.5 -> 1.5 ± 0.71" in out and "lr=0.5,seed=1" in out
    shutil.copytree(names[0], "again")
    assert main(["plot", *names, "again"]) == 0
    out = capsys.readouterr().out
    assert "lr=0.1 (2 seeds)" in out and "  again " in out, "a repetition is no further seed"
    assert main(["plot", *names, "--each"]) == 0
    assert "seeds)" not in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    assert main(["plot", *names, "--out", "p.png"]) == 0


def test_runs_of_equal_settings_with_another_reward_file_are_two_curves(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, digest in (("first", "aa"), ("second", "bb")):
        start = Start("now", {"seed": {"value": 1, "source": "default"}}, {}, {})
        (tmp_path / name).mkdir()
        write_run(
            tmp_path / name, RunRecord("id", name, replace(start, inputs={"--custom-rm-path r.py": digest}))
        )
        row = {"step": 0, "step_key": "rollout/step", "rollout/raw_reward": 0.5}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["plot", "first", "second"]) == 0
    out = capsys.readouterr().out
    assert "first" in out and "second" in out and "seeds)" not in out
