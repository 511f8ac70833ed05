"""Scripts of many kinds are run with their commands stood in for; what they call training with starts."""

import json
import os
import runpy
import shutil
import subprocess
from types import SimpleNamespace

import pytest
from launch_lines import MODELS, NOT_BUILT
from launch_scripts import FSDP_SCRIPTS, REFUSED, SCRIPTS, make_files
from slime_flags import MEGATRON, OLDER, SLIME
from tiny_model import make_tiny_tokenizer

from slime.arguments import parse_args
from slime.arguments.core.draft import ASYNCHRONOUS, SYNCHRONOUS
from slime.arguments.core.unbuilt import PLUGIN_FLAGS, is_unbuilt, renamed, why_idle
from slime.arguments.parser import build_parser, known_options
from slime.arguments.passthrough import sglang_flags
from slime.arguments.passthrough.megatron_flags import is_megatron_flag
from slime.cli import launch
from slime.preflight.all_checks import preflight
from slime.utils.models.model_config import quantization_config

pytest.importorskip("megatron", reason="flags of Megatron's are known where it is: make install")
pytest.importorskip("pyarrow", reason="a script reads parquet")

from megatron_families import FAMILIES, make_checkpoint

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("world")
    make_files(root)
    for model in MODELS:
        if model in FAMILIES:
            make_checkpoint(root, model, max_position_embeddings=256)
        else:
            make_other_family(root, model)
        make_tiny_tokenizer().save_pretrained(root / model)
        (root / f"{model}_torch_dist").mkdir()
        (root / f"{model}_torch_dist" / "latest_checkpointed_iteration.txt").write_text("release")
    shutil.copytree(root / "qwen3", root / "qwen3_fp8")
    config = json.loads((root / "qwen3" / "config.json").read_text())
    config["quantization_config"] = quantization_config((16, 16))
    (root / "qwen3_fp8" / "config.json").write_text(json.dumps(config))
    return root


def make_other_family(root, model):
    """A folder that says what it is, with weights of something else: nothing here reads them."""
    shutil.copytree(root / "qwen3", root / model) if (root / "qwen3").exists() else (root / model).mkdir()
    config = {"model_type": model, "vocab_size": 127, "max_position_embeddings": 256}
    config |= {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    (root / model / "config.json").write_text(json.dumps(config))


@pytest.fixture
def root(world, monkeypatch):
    monkeypatch.setattr(sglang_flags, "_cache_folder", lambda: world)
    monkeypatch.syspath_prepend(str(world))
    monkeypatch.chdir(world)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    return world


def called_with(root, name, text):
    """(the loop, its words) that a script calls training with."""
    file = root / "run.sh"
    file.write_text(text.replace("ROOT", str(root)))
    if "execute_train" in text:
        return _called_by_python(file)
    env = {**os.environ, "PATH": f"{root}/bin:{os.environ['PATH']}", "CALLED": str(root / "called")}
    done = subprocess.run(["bash", str(file)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{name}: {done.stderr[-2000:]}"
    script, *words = (root / "called").read_text().splitlines()
    return ASYNCHRONOUS if "async" in script else SYNCHRONOUS, words


def _called_by_python(file):
    found = []

    def record(command, env=None):
        found.append(command)
        return SimpleNamespace(returncode=0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch.subprocess, "run", record)
        runpy.run_path(str(file), run_name="__main__")
    ((_, _, _, command, *words),) = found
    return ASYNCHRONOUS if "async" in command else SYNCHRONOUS, words


def errors_before_start(args, loop):
    """What keeps a run from starting, but for packages and devices that this machine may lack."""
    found = preflight(args, overlapped=loop == ASYNCHRONOUS).of("error")
    return [str(finding) for finding in found if finding.group not in ("packages", "machine")]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_starts(root, name):
    loop, words = called_with(root, name, SCRIPTS[name])
    args = parse_args(words, training_loop=loop)
    model = next(m for m in sorted(MODELS, key=len, reverse=True) if f"/{m}" in args.hf_checkpoint)
    assert args.train_backend == ("fsdp" if model in NOT_BUILT else "megatron")
    assert errors_before_start(args, loop) == []


@pytest.mark.parametrize("name", FSDP_SCRIPTS)
def test_a_script_of_the_fsdp_trainer_starts(root, name):
    loop, words = called_with(root, name, FSDP_SCRIPTS[name])
    args = parse_args(words, training_loop=loop)
    assert args.train_backend == "fsdp"
    assert args.activation_checkpointing == ("full" if "--gradient-checkpointing" in words else "none")
    assert errors_before_start(args, loop) == []


@pytest.mark.parametrize("name", REFUSED)
def test_a_script_is_refused_for_one_reason(root, name):
    text, reason = REFUSED[name]
    loop, words = called_with(root, name, text)
    with pytest.raises(ValueError) as caught:
        parse_args(words, training_loop=loop)
    assert str(caught.value).startswith(reason)


def test_no_flag_of_slime_is_unknown():
    ours = set(known_options(build_parser()[0]))
    unknown = []
    for name in (*SLIME, *MEGATRON, *OLDER):
        option = renamed([f"--{name}"])[0]
        told = why_idle(option) or is_unbuilt(option.removeprefix("--")) or name in PLUGIN_FLAGS
        if not (told or option in ours or is_megatron_flag(option) or option.startswith("--router-")):
            unknown.append(name)
    assert unknown == []
