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
from launch_lines import make_server
from plugin_checks import check_plugins

from slime.catalog.gpus import GPUS, known_model
from slime.preflight.prompts import check_rows
from slime.preflight.run_plan import Device, plan_run
from slime.preflight.trainer_plan import GIB, number_of_experts
from slime.runtime.placement import Machine, host_rows, num_machines_needed, plan_placement
from slime.utils.machine.described import described_machine
from slime.utils.models.pipeline_stages import layers_of_chunks

RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
DESCRIBED = re.compile(r"^# Data, one JSON object a line: (\{.*\})", re.MULTILINE)
MESSAGES = '[{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]'
# The hosts of each hardware, and the GPUs of each.
MACHINES = {"laptop": (1, 0), "gpu24": (1, 1), "gpu80": (1, 1), "gpu8": (1, 8), "nodes2": (2, 8)}
# The runs of docs/large_models.md: the recipe, its hosts of 8 GPUs, and the model's row of the page.
LARGE = {
    "glm4-9b-8gpu": (1, "GLM-4-9B-0414"),
    "qwen3-30b-a3b-16gpu": (2, "Qwen3-30B-A3B"),
    "qwen3-235b-64gpu": (8, "Qwen3-235B-A22B"),
    "deepseek-r1-128gpu": (16, "DeepSeek-R1"),
    "glm5.2-744b-256gpu": (32, "GLM-5.2"),
}
MACHINES |= {name: (hosts, 8) for name, (hosts, _) in LARGE.items()}
PAGE = (ROOT / "docs/large_models.md").read_text()
NAMES = [str(path.relative_to(ROOT)) for path in RECIPES]


def for_parser(name: str):
    """The recipe as a parameter; flags of Megatron's stages are known only where it is installed."""
    has_stages = "pipeline-num-layers" in (ROOT / name).read_text()
    return pytest.param(name, marks=pytest.mark.megatron if has_stages else ())


def test_there_is_a_recipe_for_each_hardware_and_each_task():
    found = {(path.parent.name, path.name.removesuffix(".yaml")) for path in RECIPES}
    found -= {("large", name) for name in LARGE}
    hardware, tasks = (
        ("laptop", "gpu24", "gpu80", "gpu8", "nodes2"),
        ("math", "code", "tools", "sft", "dpo", "opd"),
    )
    assert found == set(itertools.product(hardware, tasks))


@pytest.mark.parametrize("name", map(for_parser, NAMES))
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
    hosts, gpus = MACHINES[Path(name).stem if Path(name).stem in LARGE else Path(name).parts[1]]
    # Flags of SGLang are known only where it is installed: a stand-in names those of these recipes.
    server = ["--sglang-python", str(make_server(tmp_path))] if "large" in name else []
    with described_machine(gpus, None):
        args = read_settings(["--config", name, *server])
    assert num_machines_needed(args, gpus) <= hosts and plan_placement(args, gpus, hosts)
    check_plugins(args)
    assert not [str(finding) for finding in check_rows(args) if finding.kind == "error"]
    # Of a machine without GPUs only what is about the machine may be told.
    told = [w for w in args.warnings if not re.search("GPU|cores|threads", w)]
    assert not told, told
    assert args.run_dir.startswith(f"{world}/runs/") and args.save


@pytest.mark.parametrize("name", [for_parser(f"recipes/large/{name}.yaml") for name in LARGE])
def test_a_large_run_is_placed_and_fits_as_its_page_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(make_world(tmp_path))
    write(tmp_path / "data/math.jsonl", '{"prompt": "1+1?", "label": "2"}\n')
    hosts, model = LARGE[Path(name).stem]
    with described_machine(8, None):
        words = ["--config", name, "--sglang-python", str(make_server(tmp_path))]
        args = read_settings(words)
    cluster = [Machine(f"host-{i}", tuple(range(8))) for i in range(hosts)]
    assert args.actor_num_nodes == hosts == num_machines_needed(args, 8)
    assert len(host_rows(args, plan_placement(args, 8, hosts).on(cluster), hosts)) == hosts
    plan = plan_run(args, Device(GPUS["h100"].capacity, True, "h100"))
    assert plan.peak < 0.8 * GPUS["h100"].capacity
    shown = [line.split(" | ") for line in PAGE.splitlines() if line.startswith(f"| {model} |")]
    (_, gpus, sizes, shares, memory, engines), (_, response, *seconds, _) = shown
    config = known_model(args.hf_checkpoint)
    pp, layers = args.pipeline_model_parallel_size, config["num_hidden_layers"]
    counts = layers_of_chunks(layers, pp, 1, args.megatron_config)
    assert shares == ", ".join(map(str, counts))
    tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
    ep = args.expert_model_parallel_size if number_of_experts(config) else "-"
    assert sizes == f"{tp}, {pp}, {cp}, {ep}" and int(gpus) == 8 * hosts
    each = args.rollout_num_gpus_per_engine
    assert engines == f"{8 * hosts // each} of {each} |"
    assert memory == f"{sum(plan.trainer.values()) / GIB:.0f} GiB"
    times = (plan.generate_s, plan.train_s, plan.push_s, plan.step_s)
    assert seconds == [f"{float(f'{value:.3g}'):.0f} s" for value in times]
    assert response == f"{plan.response_tokens:,.0f}"
    head = (ROOT / name).read_text().partition("\n\n")[0]
    assert f"about {memory} a GPU" in head and f"and {plan.engine['weights'] / GIB:.0f} GiB" in head
    if model == "GLM-5.2":
        # Each stage begins with a layer that has an indexer.
        assert {0, 1, 2, *range(6, 78, 4)} >= {sum(counts[:stage]) for stage in range(pp)}


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
