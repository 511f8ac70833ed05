"""A model that cannot be loaded is told in one sentence, at once, with what would mend it."""

import http.server
import socket
import threading
import time

import pytest
from huggingface_hub import constants
from patience import LONG_S

from slime.utils.models.model_files import check_model

HELD = ("/gpt2/", "/owner/model/")


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers as the hub does to the question for a model's config."""

    def do_HEAD(self):
        if self.path.startswith("/gated/"):
            self.answer(403, **{"X-Error-Code": "GatedRepo"})
        elif self.path.startswith("/busy/"):
            self.answer(503)
        elif self.path.startswith(HELD):
            self.answer(200, ETag='"x"', **{"X-Repo-Commit": "0" * 40, "Content-Length": "2"})
        else:
            self.answer(404, **{"X-Error-Code": "RepoNotFound"})

    def answer(self, status, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint(monkeypatch, server.server_port)
    yield
    server.shutdown()
    server.server_close()


def endpoint(monkeypatch, port):
    base = f"http://127.0.0.1:{port}"
    monkeypatch.setattr(constants, "ENDPOINT", base)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", base + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def why_not(model, **options):
    with pytest.raises(ValueError, match="--hf-checkpoint") as error:
        check_model("--hf-checkpoint", str(model), **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("model", ["gpt2", "owner/model", "busy/model"])
def test_names_that_the_hub_knows_pass(hub, model):
    check_model("--hf-checkpoint", model, tokenizer=True)


def test_a_name_that_the_hub_does_not_know_is_told(hub):
    assert "no such folder here, and the hub has no model of that name" in why_not("nothere")


def test_a_model_behind_a_gate_says_how_to_get_it(hub):
    assert "hf auth login" in why_not("gated/model")


def test_a_hub_that_cannot_be_reached_is_told(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        endpoint(monkeypatch, unused.getsockname()[1])
    assert "cannot be reached" in why_not("nothere")


def test_a_hub_that_never_answers_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("slime.utils.models.model_files.HUB_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint(monkeypatch, silent.getsockname()[1])
        started = time.monotonic()
        assert "cannot be reached" in why_not("owner/nothere")
        assert time.monotonic() - started < LONG_S


def test_without_the_hub_its_own_copy_is_enough(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in why_not("nothere")
    kept = tmp_path / "config.json"
    kept.write_text("{}")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda model, file: str(kept))
    check_model("--hf-checkpoint", "owner/model")


def test_a_misspelt_folder_names_the_one_beside_it(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "models" / "qwen3-8b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert "Did you mean models/qwen3-8b?" in why_not("models/qwen3-8")


def test_a_folder_must_hold_a_model_and_where_prompts_are_made_a_tokenizer(tmp_path):
    (tmp_path / "weights.bin").write_text("")
    assert "it has no config.json" in why_not(tmp_path)
    check_model("--ref-load", str(tmp_path), whole=False)
    (tmp_path / "config.json").write_text("{}")
    check_model("--hf-checkpoint", str(tmp_path))
    assert "has no tokenizer" in why_not(tmp_path, tokenizer=True)
    (tmp_path / "tokenizer.json").write_text("{}")
    check_model("--hf-checkpoint", str(tmp_path), tokenizer=True)
    assert "a file; give the folder" in why_not(tmp_path / "config.json")
