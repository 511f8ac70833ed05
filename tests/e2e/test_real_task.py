"""The real-task benchmark: its reward, its split, its tables, and the end of parts at the time limit."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import PATIENCE_S

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import real_task
    import real_task_data
    import real_task_report

    return real_task, real_task_data, real_task_report


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("3 + 4 = 7\n#### 7", "7", 1),
        ("#### 7<|im_end|>", "7", 1),
        ("#### $1,200.", "1200", 1),
        ("#### 16.0\n", "16", 1),
        ("#### -12", "-12", 1),
        ("#### 8\n#### 7", "7", 1),
        ("#### 7\n#### 8", "7", 0),
        ("#### 7 and so on", "7", 0),
        ("#### 17", "7", 0),
        ("The answer is 7", "7", 0),
        ("####", "7", 0),
        ("", "0", 0),
    ],
)
def test_a_response_is_right_if_it_ends_with_the_number(modules, response, label, expected):
    assert modules[1].score(response, label) == expected


def test_worked_solutions_end_with_the_right_number(modules):
    data = modules[1]
    chain = {"metadata": {"expression": "12 + 30 - 50"}}
    assert data.solve_chain_sum(chain) == "12 + 30 = 42\n42 - 50 = -8"
    assert data.solve_gcd({"metadata": {"numbers": [36, 84]}}) == "84 = 2 * 36 + 12\n36 = 3 * 12 + 0"


def test_one_problem_in_eight_is_held_out_and_always_the_same(modules):
    data = modules[1]
    chosen = [data.held_out("gcd", [str(i), "7"]) for i in range(4000)]
    assert 400 < sum(chosen) < 600
    assert chosen == [data.held_out("gcd", [str(i), "7"]) for i in range(4000)]


def test_drawn_problems_are_on_their_side_of_the_split(modules):
    pytest.importorskip("reasoning_gym")
    data = modules[1]
    templates = data.usable_templates()[:20]
    for task in data.TASKS:
        drawn = {
            side: data.draw(data.problems(task, templates, "test", is_held_out=side), 12, set())
            for side in (False, True)
        }
        questions = [{row["prompt"][0]["content"] for row in rows} for rows in drawn.values()]
        assert not questions[0] & questions[1] and all(len(found) == 12 for found in questions)
        assert all(data.score(row["completion"], row["label"]) for rows in drawn.values() for row in rows)


def report(seed, *, final, finished=True, beside=()):
    rng = random.Random(seed)
    steps = [
        {
            "step": i,
            "reward": final * min(1, (i + 1) / 20) + rng.uniform(-0.01, 0.01),
            "tokens": 40000,
            "seconds": 30 + 2.0 * i,
        }
        for i in range(40)
    ]
    return {"steps": steps, "finished": finished, "beside": list(beside)}


def results(modules):
    sets = modules[1].EVALUATIONS
    parts = {f"grpo-{seed}": report(seed, final=0.6, beside=["x"] if seed else ()) for seed in range(3)}
    parts |= {"trl-0": report(5, final=0.5), "lora-0": report(6, final=0.4, finished=False)}
    parts |= {
        f"eval:{name}": {"scores": dict.fromkeys(sets, score), "finished": True}
        for name, score in {"base": 0.0, "sft-0": 0.2, "sft-1": 0.3, "grpo-0": 0.6, "grpo-1": 0.5}.items()
    }
    return {"parts": parts, "machine": "a machine", "settings": {"prompts": "64", "samples": "8"}}


def test_the_tables_and_the_figure_are_made_from_the_results(modules, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results(modules)))
    words = ["real_task.py", "compare", "--json", str(path), "--figure", str(tmp_path / "curve.svg")]
    monkeypatch.setattr(sys, "argv", words)
    assert modules[0].main() == 0
    printed = capsys.readouterr().out
    assert "| slime, embedded engine | 2 | 55.0 ± 7.1 |" in printed
    assert "| TRL, seed 0 | none | 40 | 30 | 2.00 | 20,000 | 108 |" in printed
    assert "40, ended" in printed  # a run that the time limit ended
    assert (tmp_path / "curve.svg").read_text().startswith("<?xml")


def test_rl_starts_from_the_first_snapshot_that_scores_enough(modules):
    options = modules[0].argparse.Namespace(start=None, start_score=0.25, work=Path("w"))
    made = results(modules)
    assert modules[0].start_model(options, made) == Path("w/sft/model-1") and made["start"] == "sft-1"
    options.start_score = 0.9
    assert modules[0].start_model(options, made) == Path("w/sft/model-3")


def test_a_wrong_part_and_missing_data_are_named(tmp_path):
    for words, said in ((["grpo"], "grpo is no part"), (["grpo-0"], "real_task_data.py writes it")):
        command = [sys.executable, str(BENCHMARKS / "real_task.py"), "run", *words, "--data", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr


def test_the_time_limit_ends_all_processes_of_a_part(modules, tmp_path, monkeypatch):
    real_task = modules[0]
    started = tmp_path / "pids"
    child = "import os, time; open(os.environ['PIDS'], 'a').write(f'{os.getpid()}\\n'); time.sleep(1000)"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]); exec({child!r})"
    monkeypatch.setenv("PIDS", str(started))
    monkeypatch.setattr(real_task, "eval_command", lambda *_: [sys.executable, "-c", parent])
    monkeypatch.setattr(real_task, "POLL_S", 0.05)
    (tmp_path / "rl.jsonl").touch()
    words = ["run", "eval:base", "--model", tmp_path, "--data", tmp_path, "--work", tmp_path / "work"]
    monkeypatch.setattr(sys, "argv", list(map(str, ["", *words, "--json", tmp_path / "results.json"])))

    def polled(*_):
        if started.exists() and len(started.read_text().split()) == 2:
            raise KeyboardInterrupt  # as the alarm of --limit-s does
        return {"scores": {}}

    monkeypatch.setattr(real_task, "read_part", polled)
    assert real_task.main() == 1
    deadline = time.monotonic() + PATIENCE_S
    for pid in map(int, started.read_text().split()):
        while alive(pid):
            assert time.monotonic() < deadline, "a process outlived its part"
            time.sleep(0.05)
    assert (
        not json.loads((tmp_path / "results.json").read_text())["parts"].get("eval:base", {}).get("finished")
    )


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
