"""Every recipe is read by the same parser as `--config`, with its plug-ins, and says what it is."""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from docs_world import ROOT, make_world, provide_model, provide_settings, read_settings, write
from plugin_checks import check_plugins

from slime.preflight.prompts import check_rows
from slime.runtime.placement import num_machines_needed, plan_placement
from slime.utils.machine.described import described_machine

RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
DESCRIBED = re.compile(r"^# Data, one JSON object a line: (\{.*\})", re.MULTILINE)
MESSAGES = '[{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]'
# The hosts of each hardware, and the GPUs of each.
MACHINES = {"laptop": (1, 0), "gpu24": (1, 1), "gpu80": (1, 1), "gpu8": (1, 8), "nodes2": (2, 8)}
NAMES = [str(path.relative_to(ROOT)) for path in RECIPES]


def test_there_is_a_recipe_for_each_hardware_and_each_task():
    found = {tuple(path.with_suffix("").parts[-2:]) for path in RECIPES}
    hardware, tasks = (
        ("laptop", "gpu24", "gpu80", "gpu8", "nodes2"),
        ("math", "code", "tools", "sft", "dpo", "opd"),
    )
    assert found == set(itertools.product(hardware, tasks))


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_read_as_a_run_would_read_it(name, tmp_path, monkeypatch):
    world = make_world(tmp_path)
    monkeypatch.chdir(world)
    values = yaml.safe_load(Path(name).read_text())
    subprocess.run([sys.executable, "recipes/laptop/make_data.py", "--rows", "4"], check=True)
    described = DESCRIBED.search(Path(name).read_text().replace("\n#   ", " "))
    text = (
        described[1]
        .replace("[messages]", MESSAGES)
        .replace('"assistant", ...', '"assistant", "content": "2"')
    )
    row = json.loads(text.replace(", ...", "").replace('"..."', '"1+1?"'))
    if not Path(values["prompt-data"]).exists():
        write(world / values["prompt-data"], json.dumps(row) + "\n")
    provide_settings(world, values)
    for key in ("hf-checkpoint", "opd-teacher-load"):
        if str(values.get(key)).startswith(("runs/", "models/")):
            provide_model(world / values[key])
    hosts, gpus = MACHINES[Path(name).parts[1]]
    with described_machine(gpus, None):
        args = read_settings(["--config", name])
    assert num_machines_needed(args, gpus) <= hosts and plan_placement(args, gpus, hosts)
    check_plugins(args)
    assert not [str(finding) for finding in check_rows(args) if finding.kind == "error"]
    # Of a machine without GPUs only what is about the machine may be told.
    told = [w for w in args.warnings if not re.search("GPU|cores|threads", w)]
    assert not told, told
    assert args.run_dir.startswith(f"{world}/runs/") and args.save


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_what_it_is_and_how_to_run_it(name):
    head = []
    for line in (ROOT / name).read_text().splitlines():
        if not line.startswith("#"):
            break
        head.append(line)
    text = "\n".join(head)
    assert all(word in text for word in ("Data, one JSON object a line:", "Memory", f"--config {name}")), text
    assert max(map(len, head)) <= 110
