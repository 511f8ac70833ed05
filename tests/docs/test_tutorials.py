"""Python on the pages of tutorials does what the page says of it."""

import json
import re
from types import SimpleNamespace

from docs_world import ROOT

from slime.utils.types import Sample


def python_of(page):
    return re.findall(r"```python[^\n]*\n(.*?)```", (ROOT / "docs" / page).read_text("utf-8"), re.DOTALL)


def test_the_rewards_of_the_debugging_session_pay_what_the_page_says():
    scores = []
    for source in python_of("flat_reward.md"):
        scope: dict = {}
        exec(source, scope)
        samples = [Sample(response=text, label="aeiou") for text in ("aeiou<eos>", "<eos>", "aexy")]
        scores.append([scope["reward"](SimpleNamespace(), sample) for sample in samples])
    assert scores == [[0, 0, 0], [1, 1, 0], [1, 0, 0.5]], "the end token, the empty response, partial credit"


def test_the_data_of_the_evaluation_are_two_sets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [source] = python_of("evaluate.md")
    exec(source, {})
    rows = {path.name: path.read_text().splitlines() for path in tmp_path.iterdir()}
    assert {name: len(lines) for name, lines in rows.items()} == {"vowels.jsonl": 32, "hard.jsonl": 32}
    assert json.loads(rows["hard.jsonl"][0]) == {"prompt": "200 vowels>", "label": "u"}


def test_the_agent_of_the_tutorial_is_a_generate_function():
    [source] = python_of("tool_agent.md")
    scope: dict = {}
    exec(source, scope)
    assert scope["generate"].__code__.co_varnames[:3] == ("args", "sample", "sampling_params")
