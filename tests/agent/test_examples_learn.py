"""The examples that learn from what tools and environments answer, run as their READMEs say. Minutes each.

`make test-examples` installs what they need and runs this file. What an example took and what it learned is
printed when it has ended, and added to runs/examples/learnt.jsonl: a run that is stopped has told its part.
Seconds are told, never judged: two cores that do other things too may take as long as they like.
"""

import importlib.util
import json
import os
import re
import resource
import sys
import time
from pathlib import Path

import pytest
from processes import run_script

ROOT = Path(__file__).parents[2]
# Held-out scores, most before and least after: far above the start and below what was seen.
LEARNT = {
    "retool": {"held_out": (0.55, 0.70)},
    "mcp_tools": {"held_out": (0.55, 0.70)},
    "terminal": {"held_out": (0.62, 0.70)},
    "coding_agent": {"held_out": (0.58, 0.62)},
    "search_r1": {"town": (0.30, 0.45), "land": (0.30, 0.30)},
    "judge": {"judge": (0.30, 0.40), "rule": (0.30, 0.35)},
    "geo_shapes": {"held_out": (0.65, 0.70)},
    "textarena": {"Nim-v0": (0.15, 0.25)},
    "reasoning_gym": {"number_sorting": (0.50, 0.55), "spell_backward": (0.74, 0.74)},
}
NEEDS = {
    "search_r1": "bm25s", "reasoning_gym": "reasoning_gym", "textarena": "textarena", "mcp_tools": "mcp"
}  # fmt: skip


def cpu_seconds():
    """Of all processes that this one started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_example(name, folder, **more):
    """(what it wrote on the way, the seconds that it took); all that it makes is in `folder`."""
    package = NEEDS.get(name)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"examples/{name} needs the package {package}")
    environment = {**os.environ, "PYTHON": sys.executable, "RUN_DIR": str(folder), **more}
    wall, cpu = time.monotonic(), cpu_seconds()
    with open(folder / "told.txt", "w+") as out:
        code = run_script([ROOT / "examples" / name / "run.sh"], env=environment, stdout=out)
        assert code == 0, f"examples/{name}/run.sh ended with {code}"
        out.seek(0)
        took = {"wall_s": round(time.monotonic() - wall), "cpu_s": round(cpu_seconds() - cpu)}
        return out.read(), {**took, "load": round(os.getloadavg()[0], 1)}


@pytest.fixture
def tell(capsys):
    """Print one line about an example, and keep it."""

    def line(name, took, **shares):
        told = json.dumps({"example": name, **took, **shares})
        (ROOT / "runs" / "examples").mkdir(parents=True, exist_ok=True)
        with open(ROOT / "runs" / "examples" / "learnt.jsonl", "a") as file:
            print(told, file=file)
        with capsys.disabled():
            print(f"\n{told}", flush=True)

    return line


def curve(folder, metric):
    rows = [json.loads(line) for line in (folder / "rl" / "metrics.jsonl").read_text().splitlines()]
    return [row[f"eval/{metric}"] for row in rows if f"eval/{metric}" in row]


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNT)
def test_the_example_learns(name, tmp_path, tell):
    _, took = run_example(name, tmp_path)
    curves = {metric: curve(tmp_path, metric) for metric in LEARNT[name]}
    tell(name, took, **curves)
    for metric, (most_before, least_after) in LEARNT[name].items():
        assert curves[metric][0] < most_before, metric
        assert curves[metric][-1] > least_after, metric
    if name == "geo_shapes":  # who sees another picture can only guess
        assert max(curve(tmp_path, "other_picture")) < 0.40


@pytest.mark.slow
def test_two_agents_of_one_model_both_learn(tmp_path, tell):
    told, took = run_example("multi_agent", tmp_path)
    shares = re.findall(r"(?:solver|critic) is right in ([0-9.]+) of", told)
    solver, critic, better_solver, better_critic = map(float, shares)
    tell("multi_agent", took, solver=[solver, better_solver], critic=[critic, better_critic])
    assert better_solver > solver + 0.2
    assert better_critic > critic


@pytest.mark.slow
def test_a_judge_that_sees_no_reference_is_pleased_without_right_answers(tmp_path, tell):
    """The control of examples/judge: its judge is wrong more often, and that is what is learned."""
    _, took = run_example("judge", tmp_path, JUDGE="blind")
    tell("judge, blind", took, judge=curve(tmp_path, "judge"), rule=curve(tmp_path, "rule"))
    assert curve(tmp_path, "judge")[-1] > 0.5
    assert curve(tmp_path, "rule")[-1] < 0.35
