"""The model card of a saved model, and --push-to-hub against a hub that answers over HTTP."""

import base64
import http.server
import json
import logging
import threading

import huggingface_hub
import huggingface_hub.constants
import pytest
from argument_helpers import parse

from slime.cluster.checkpoints.published import Models, model_card


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as an upload of small files needs."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) or self._chunks()
        hub = self.server
        hub.asked.append(self.path)
        if hub.refuses:
            return self._answer(403, {"error": "no room"})
        if self.path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            modes = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]
            return self._answer(200, {"files": modes})
        if self.path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return self._answer(200, {"commitOid": "0" * 40, "commitUrl": f"{hub.url}/me/it/commit/0"})
        if self.path.endswith("/create"):
            hub.made.append(json.loads(body))
        return self._answer(200, {"url": f"{hub.url}/me/it", "id": "me/it", "errors": [], "warnings": []})

    def do_GET(self):
        self._answer(200, {"id": "me/it", "sha": "0" * 40, "siblings": []})

    def _chunks(self):
        found = b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        return found

    def _answer(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass


@pytest.fixture
def hub(monkeypatch):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.asked, server.files, server.made, server.refuses = [], {}, [], False
        server.url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def model(tmp_path):
    """A run that has logged something, and the folder of a model."""
    rows = [{"step": i, "rollout/raw_reward": i / 100, "eval/held": 0.5} for i in range(100)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tmp_path / "hf-99"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def settings(**changes):
    data = "hf:openai/gsm8k#main:train@[:9]"
    return parse().replace(hf_checkpoint="Qwen/Qwen3-0.6B", prompt_data=data, **changes)


def test_the_card_says_what_it_is_and_how_it_learned(model):
    text = model_card(settings(wandb_key="secret-key"), model.parent, 99)
    assert text.startswith("---\nlibrary_name: transformers\n")
    assert "base_model: Qwen/Qwen3-0.6B" in text and "- openai/gsm8k" in text
    assert "| 0 | 0 | 0.5 |" in text and "| 99 | 0.99 | 0.5 |" in text
    assert text.count("| 0.5 |") <= 22 and "secret-key" not in text


def test_a_model_goes_to_the_hub_with_its_card(model, hub):
    models = Models(settings(push_to_hub="me/it"), model.parent)
    models.made(model, 99)
    models.finish()
    assert set(hub.files) == {"README.md", "config.json"} and b"raw_reward" in hub.files["README.md"]
    assert hub.made[0]["name"] == "it" and hub.made[0].get("private", hub.made[0].get("visibility"))


def test_a_push_that_fails_is_told_and_the_run_goes_on(model, hub, caplog):
    hub.refuses = True
    models = Models(settings(push_to_hub="me/it"), model.parent)
    with caplog.at_level(logging.WARNING):
        models.made(model, 99)
        models.finish()
    assert "--push-to-hub me/it failed" in caplog.text and f"hf upload me/it {model}" in caplog.text
    assert (model / "README.md").is_file()


def save_model(folder):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_the_run_folder_has_a_link_to_the_model_that_was_saved_last(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    models = Models(settings(), run)
    for model in (run / "hf-0", tmp_path / "elsewhere" / "hf-1", run / "hf-2"):
        models.made(save_model(model), 0)
        assert (run / "model").resolve() == model.resolve()
    run.rename(tmp_path / "moved")
    assert (tmp_path / "moved" / "model" / "config.json").is_file(), "a link into the folder moves with it"
    assert sorted(p.name for p in (tmp_path / "moved").iterdir()) == ["hf-0", "hf-2", "model"]


def test_a_folder_of_somebody_else_in_place_of_the_link_stays(tmp_path, caplog):
    save_model(tmp_path / "model")
    (tmp_path / "model" / "mine").write_text("years of work")
    models = Models(settings(), tmp_path)
    models.made(save_model(tmp_path / "hf-0"), 0)
    assert (tmp_path / "model" / "mine").is_file() and not (tmp_path / "model").is_symlink()
    assert f"the last model is in {tmp_path / 'hf-0'}" in caplog.text
    models.link(tmp_path / "model")  # --save-hf RUN/model: it is there already
    assert not (tmp_path / "model").is_symlink()
