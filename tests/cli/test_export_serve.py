"""`slime export` and `slime serve`: a trained model becomes a folder, or an endpoint that ends cleanly."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
from patience import PATIENCE_S
from processes import mortal_children
from tiny_model import make_tiny_model

from slime.cli.main import main

ROOT = Path(__file__).parents[2]
IDS = torch.tensor([[5, 9, 20, 33, 7, 60]])


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with `model`, and `run`: an SFT of adapters, which leaves a checkpoint and a merged model."""
    folder = tmp_path_factory.mktemp("export")
    make_tiny_model(folder / "model", init_std=0.2)
    rows = [{"prompt": f"{i}+1?", "completion": str(i + 1)} for i in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--model", str(folder / "model"), "--data", str(folder / "rows.jsonl")]
    lora = ["--lora-rank", "4", "--lora-alpha", "8", "--lr", "0.1", "--num-rollout", "2"]
    assert main(["sft", *words, *lora, "--out", str(folder / "run")]) == 0
    return folder


def logits(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("words", ["export {}/model --out /proc/none/x", "serve {}/model --port 99999"])
def test_a_value_that_cannot_be_used_is_named_with_its_option(world, capsys, words):
    with pytest.raises(SystemExit) as ended:
        main(words.format(world).split())
    said = capsys.readouterr().err
    assert ended.value.code == 2 and ("--out /proc/none/x cannot be written" in said or "--port" in said)


def export(*words: object) -> None:
    assert main(["export", *map(str, words)]) == 0


def test_an_adapter_is_exported_alone_and_merged(world, tmp_path):
    run, checkpoints = world / "run", world / "run" / "checkpoints"
    export(run, "--out", tmp_path / "adapter", "--adapter-only")
    expected = logits(world / "model", tmp_path / "adapter")
    assert not torch.allclose(expected, logits(world / "model"), atol=1e-2)
    sources = {
        "of the run": (run,),
        "of its checkpoints": (checkpoints,),
        "of one checkpoint": (checkpoints / "step_0000001",),
        "by its number": (run, "--step", 1),
        "of an adapter": (tmp_path / "adapter",),
    }
    for name, words in sources.items():
        export(*words, "--out", tmp_path / name)
        assert torch.allclose(logits(tmp_path / name), expected, atol=1e-4), name
        assert (tmp_path / name / "tokenizer.json").is_file() and not (tmp_path / name / "adapter").exists()
    export(checkpoints, "--out", tmp_path / "again", "--adapter-only")
    assert torch.equal(logits(world / "model", tmp_path / "again"), expected)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["gone", "--out", "new"], "gone: there is no such folder"),
        (["empty", "--out", "new"], "holds no model and no checkpoint"),
        (["model", "--out", "run"], "--out run exists already"),
        (["model", "--out", "new", "--adapter-only"], "has no adapter"),
        (["run", "--out", "new", "--step", "7"], "has checkpoints of rollouts 1"),
        (["run"], "--out"),
    ],
)
def test_an_export_that_cannot_be_made_is_refused(world, monkeypatch, capsys, words, complaint):
    monkeypatch.chdir(world)
    (world / "empty").mkdir(exist_ok=True)
    with pytest.raises(SystemExit) as ended:
        main(["export", *words])
    assert ended.value.code == 2 and complaint in capsys.readouterr().err
    assert not (world / "new").exists()


def start(folder: Path, *words: str) -> tuple[subprocess.Popen, str]:
    """The command, and the address that it prints once it serves."""
    command = [sys.executable, "-m", "slime", "serve", str(folder), "--port", "0", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    told = ""
    for line in process.stdout:
        told += line
        if found := re.match(r"OpenAI-compatible endpoint: (\S+)", line):
            return process, found[1]
    raise AssertionError(told)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_served_run_answers_a_chat_and_ends_with_its_command(world, number):
    before = mortal_children()
    process, url = start(world / "run")
    try:
        body = {"model": "default", "messages": [{"role": "user", "content": "1+1?"}], "max_tokens": 4}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            [choice] = json.load(response)["choices"]
        assert choice["message"]["role"] == "assistant"
    finally:
        process.send_signal(number)
        said = process.communicate(timeout=PATIENCE_S)[0]
    assert process.returncode == 0 and "the engine has ended" in said, said
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{url}/models", timeout=5)
    assert mortal_children() == before


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["gone"], "gone: there is no such folder"),
        (["run/checkpoints"], "slime export run/checkpoints"),
        (["model", "--host", "0.0.0.0"], "Set SLIME_ENGINE_TOKEN"),
        (["model", "--engine", "sglang", "--sglang-python", "no/python"], "--sglang-python is no/python"),
        (["reward"], "is a reward model"),
        (["mute"], "the folder has no tokenizer"),
        (["torn"], "torn/model.safetensors: it cannot be read"),
    ],
)
def test_what_cannot_be_served_is_refused(world, monkeypatch, capsys, words, complaint):
    monkeypatch.chdir(world)
    (world / "reward").mkdir(exist_ok=True)
    (world / "reward" / "config.json").write_text('{"architectures": ["Qwen3ForSequenceClassification"]}')
    for name, is_other in (("mute", "token"), ("torn", "safetensors")):
        (world / name).mkdir(exist_ok=True)
        for file in (world / "model").iterdir():
            if is_other not in file.name:
                shutil.copy(file, world / name)
    (world / "torn" / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(SystemExit) as ended:
        main(["serve", *words])
    assert ended.value.code == 2 and complaint in capsys.readouterr().err
