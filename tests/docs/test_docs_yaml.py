"""Every YAML of the docs passes `--dry-run`, with rows of the shape that the page describes."""

import csv
import json
import re

import pytest
import yaml
from docs_world import PLUGIN, ROOT, write
from loop_helpers import flags
from tiny_model import make_tiny_model

from slime.arguments.passthrough.sglang_flags import find_python
from slime.cli import plan, train
from slime.cli.tasks import TASKS

BLOCK = re.compile(r"^```ya?ml\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = {
    f"{page.relative_to(ROOT)}:{number}": block
    for page in (
        *sorted((ROOT / "docs").glob("*.md")),
        ROOT / "README.md",
        *(ROOT / "examples").rglob("*.md"),
    )
    for number, block in enumerate(BLOCK.findall(page.read_text(encoding="utf-8")))
}
GSM8K = {"question": "Tom has 2 apples and gets 3. How many?", "answer": "2 + 3 = 5\n#### 5"}
ONE_RUN = {"skip_preflight": "machine", "rm_type": "math", "custom_rm_path": None}


@pytest.fixture
def world(tmp_path, monkeypatch):
    make_tiny_model(tmp_path / "model")
    write(tmp_path / "prompts.jsonl", json.dumps({"prompt": "6 x 7?", "label": "42"}) + "\n")
    with open(tmp_path / "gsm8k.csv", "w", newline="") as file:
        table = csv.DictWriter(file, list(GSM8K))
        table.writeheader()
        table.writerow(GSM8K)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def dry_run(words, capsys, command=train.main):
    try:
        code = command([*words, "--dry-run"])
    except SystemExit as stop:
        code = stop.code
    printed = capsys.readouterr()
    assert code == 0 and "ready:" in printed.out, printed.out + printed.err


def one_run(world, **changes):
    return flags(world, "run", input_key="prompt", **ONE_RUN | changes)


def as_whole_run(world, block, capsys):
    """A run.yaml that needs nothing else; the data set of the hub is here as a table, the model is tiny."""
    values = yaml.safe_load(block)
    assert values["prompt-data"] == "hf:openai/gsm8k#main:train"
    values |= {"prompt-data": "gsm8k.csv", "hf-checkpoint": "model"}
    write(world / "run.yaml", yaml.safe_dump(values))
    dry_run(["--config", "run.yaml", "--skip-preflight", "machine"], capsys)


def as_part_of_a_run(world, block, capsys):
    write(world / "mytask/heldout.jsonl", json.dumps({"prompt": "2 x 3?", "label": "6"}) + "\n")
    write(world / "run.yaml", block)
    dry_run([*one_run(world), "--config", "run.yaml"], capsys)


def as_roles(world, block, capsys):
    make_tiny_model(world / "models/small", hidden=32)
    write(world / "roles.yaml", block)
    words = one_run(world, megatron_config_path="roles.yaml", advantage_estimator="ppo", lr=None)
    dry_run(words, capsys)


def as_topology(world, block, capsys):
    """Regular groups on this machine: the embedded engine serves no others."""
    models = yaml.safe_load(block)["sglang"]
    assert {"prefill", "decode", "placeholder"} == {g["worker_type"] for g in models[0]["server_groups"]}
    models[0]["server_groups"] = [{"num_gpus": 1, "num_gpus_per_engine": 1}]
    models[1] |= {"model_path": "model", "server_groups": [{"num_gpus": 1}]}
    write(world / "engines.yaml", yaml.safe_dump({"sglang": models}))
    dry_run(one_run(world, sglang_config="engines.yaml", rollout_engine="embedded"), capsys)


def as_prefill_engines(world, block, capsys):
    """No SGLang is needed to say where its engines would lie."""
    write(world / "engines.yaml", block)
    words = one_run(world, sglang_config="engines.yaml", rollout_engine="sglang", rollout_num_gpus=8)
    assert plan.main([*words, "--place", "2x8"]) == 0
    printed = capsys.readouterr()
    assert "engine-3" in printed.out
    assert ("SGLang is not installed here" in printed.err) == (find_python(None) is None)


def as_evaluation(world, block, capsys):
    write(world / "mytask/reward.py", PLUGIN)
    write(world / "vowels.jsonl", json.dumps({"prompt": "7 vowels>", "label": "aeiou"}) + "\n")
    write(world / "eval.yaml", block)
    words = ["--model", "model", "--eval-config", "eval.yaml", "--skip-preflight", "machine"]
    dry_run(words, capsys, TASKS["eval"].main)


HOW = {
    "docs/data.md:0": as_whole_run,
    "docs/evaluate.md:0": as_evaluation,
    "docs/own_task.md:0": as_part_of_a_run,
    "docs/algorithms.md:0": as_roles,
    "docs/pd_disaggregation.md:0": as_prefill_engines,
    "docs/topology.md:0": as_topology,
}


def test_every_block_of_the_docs_is_tried():
    assert set(BLOCKS) == set(HOW), "say in HOW what a new block is for"


@pytest.mark.parametrize("name", HOW)
def test_a_block_passes_a_dry_run(name, world, capsys):
    HOW[name](world, BLOCKS[name], capsys)
