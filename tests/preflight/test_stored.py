"""Before anything starts: damaged checkpoints of Megatron's, models that an engine cannot serve, a login."""

import shutil

import huggingface_hub
import pytest
from argument_helpers import parse
from tiny_model import make_tiny_model
from transformers import AutoConfig, Qwen3NextConfig

from slime.backends.torch_dist.writing import write
from slime.preflight.stored import check_hub_login, check_megatron_folders, check_served


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def converted(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored") / "model_torch_dist"
    write(str(model), folder, AutoConfig.from_pretrained(model))
    return folder


@pytest.fixture
def folder(converted, tmp_path):
    return shutil.copytree(converted, tmp_path / "model_torch_dist")


def found(model, folder):
    args = parse("--ref-load", str(folder), "--use-kl-loss", hf_checkpoint=str(model))
    return [(finding.kind, str(finding)) for finding in check_megatron_folders(args)]


def test_a_whole_checkpoint_of_megatrons_is_fine(model, folder):
    assert found(model, folder) == []


def test_a_file_that_is_missing_or_short_is_named_before_the_start(model, folder):
    file = max((folder / "release").glob("*.distcp"), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-10])
    ((kind, text),) = found(model, folder)
    assert kind == "error" and f"{file.name} ends after" in text and "copy it again" in text
    file.unlink()
    ((kind, text),) = found(model, folder)
    assert kind == "error" and f"{file.name} is missing, which its .metadata names" in text


def test_a_list_of_tensors_that_is_no_list_is_named(model, folder):
    (folder / "release" / ".metadata").write_bytes(b"half a pickl")
    ((kind, text),) = found(model, folder)
    assert kind == "error" and text.startswith("--ref-load: ") and ".metadata is damaged" in text


def test_tensors_of_another_family_are_told_and_the_model_itself_is_taken(converted, folder, tmp_path):
    other = make_tiny_model(tmp_path / "other")
    config = (other / "config.json").read_text().replace('"qwen3"', '"qwen2"')
    (other / "config.json").write_text(config.replace("Qwen3ForCausalLM", "Qwen2ForCausalLM"))
    ((kind, text),) = found(other, folder)
    assert kind == "warning" and "a qwen2 does not have" in text and "are used instead" in text
    trained = folder.parent / "run"
    trained.mkdir()
    shutil.copytree(folder / "release", trained / "iter_0000003")
    (trained / "latest_checkpointed_iteration.txt").write_text("3")
    ((kind, text),) = found(other, trained)
    assert kind == "error" and "a qwen2 does not have" in text


def test_a_model_that_the_embedded_engine_cannot_serve_is_told_before_it_starts(tmp_path, model):
    Qwen3NextConfig(num_hidden_layers=4).save_pretrained(tmp_path)
    (text,) = map(str, check_served(parse(hf_checkpoint=str(tmp_path), rollout_engine="embedded")))
    assert "a qwen3_next has linear_attention layers and cannot run on the embedded engine's" in text
    assert "use --rollout-engine sglang" in text
    assert not list(check_served(parse(hf_checkpoint=str(model), rollout_engine="embedded")))
    (tmp_path / "kimi").mkdir()
    (tmp_path / "kimi" / "config.json").write_text('{"model_type": "kimi_k2"}')
    (text,) = map(str, check_served(parse(hf_checkpoint=f"{tmp_path}/kimi", rollout_engine="embedded")))
    assert "transformers has no model of type kimi_k2; use --rollout-engine sglang" in text
    alone = {"debug_train_only": True, "rollout_function_path": "a.b"}
    assert not list(check_served(parse(hf_checkpoint=str(tmp_path), rollout_engine="embedded", **alone)))


@pytest.fixture
def pushes(tmp_path):
    words = ["--save", str(tmp_path), "--save-hf", f"{tmp_path}/{{rollout_id}}", "--push-to-hub", "me/it"]
    return lambda: [(f.kind, str(f)) for f in check_hub_login(parse(*words))]


def no_network(*_, **__):
    raise AssertionError("the hub was asked")


def test_without_a_login_nothing_is_asked_and_nothing_starts(pushes, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    monkeypatch.setattr(huggingface_hub, "whoami", no_network)
    ((kind, text),) = pushes()
    assert kind == "error" and text.startswith("--push-to-hub: nobody is logged in") and "HF_TOKEN" in text


def test_offline_nothing_is_asked(pushes, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "token")
    monkeypatch.setattr(huggingface_hub, "whoami", no_network)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    ((kind, text),) = pushes()
    assert kind == "warning" and "HF_HUB_OFFLINE is set" in text


def test_a_hub_that_cannot_be_reached_keeps_no_run_from_starting(pushes, monkeypatch):
    def unreachable():
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "token")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "whoami", unreachable)
    ((kind, text),) = pushes()
    assert kind == "warning" and "cannot be reached now: no route" in text
    monkeypatch.setattr(huggingface_hub, "whoami", lambda: {"name": "me"})
    assert pushes() == []
