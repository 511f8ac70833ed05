"""The examples run as their README says and end with a number that has risen."""

import os
import re
import sys
from pathlib import Path

import pytest
from glossary import assert_in_glossary
from processes import run_script

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"(?:greedy|ranked right by \S+:) ([01]\.\d+)")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, before, after",
    [("sft", 0.1, 0.8), ("dpo", 0.6, 0.7), ("opd", 0.6, 0.62), ("reward_model", 0.7, 0.9)],
)
def test_an_example_learns(tmp_path, name, before, after):
    environment = {**os.environ, "PYTHON": sys.executable, "RUN_DIR": str(tmp_path / "run")}
    with open(tmp_path / "told.txt", "w") as out, open(tmp_path / "log.txt", "w") as err:
        script = ["bash", ROOT / "examples" / name / "run.sh"]
        code = run_script(script, env=environment, stdout=out, stderr=err)
    told, log = (tmp_path / "told.txt").read_text(), (tmp_path / "log.txt").read_text()
    assert code == 0, told[-2000:] + log[-4000:]
    for metrics in (tmp_path / "run").rglob("metrics.jsonl"):
        assert_in_glossary(metrics.parent)
    numbers = [float(number) for number in NUMBER.findall(told)]
    assert numbers[-2] < before and numbers[-1] > after, told


def test_no_example_script_kills_processes_or_names_an_absolute_path():
    for script in (ROOT / "examples").glob("*/run.sh"):
        text = script.read_text()
        assert not re.search(r"\b(pkill|killall|kill)\b", text), script
        assert not re.search(r"[\s\"=]/(?!usr/bin/env)\w", text), script
