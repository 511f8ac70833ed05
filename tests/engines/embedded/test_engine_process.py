"""The engine as a process: it starts, reports its port, waits for weights, dies with its parent, leaves nothing."""

import subprocess
import sys
import time

import pytest
from engine_under_test import EngineUnderTest, largest_difference, load_model, plain_log_probs, start_engine
from tiny_model import make_tiny_model

from slime.utils import shm
from slime.utils.async_utils import run
from slime.utils.http_utils import HttpError


@pytest.fixture(scope="module")
def tied_folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=True, init_std=0.2)


def test_an_engine_that_awaits_weights_serves_after_the_first_push_and_dies_with_its_parent(tied_folder, tmp_path):
    flags = ("--await-weights", "--weight-version", "run:0", "--max-total-tokens", "4096", "--device", "cpu")
    with start_engine(tied_folder, tmp_path, *flags) as (url, process, life, prefix):
        engine = EngineUnderTest(url, tied_folder, process.pid, prefix)
        with pytest.raises(HttpError, match="waits for its first weights") as error:
            engine.generate([5, 6], max_new_tokens=2)
        assert error.value.status == 503
        assert run(engine.control.healthy())
        model = load_model(tied_folder)
        state = dict(model.state_dict())
        assert "lm_head.weight" in state  # tied: the same tensor under two names, either may be left out
        for version, left_out in (
            ("run:1", None),
            ("run:2", "lm_head.weight"),
            ("run:3", "model.embed_tokens.weight"),
        ):
            given = {name: tensor for name, tensor in state.items() if name != left_out}
            with engine.published(given, version) as (manifest, _):
                assert run(engine.control.update_from_shared_memory(manifest)).version == version
            made = engine.generate([5, 6], max_new_tokens=10, ignore_eos=True)
            assert made.weight_version == version
            assert largest_difference(made.log_probs, plain_log_probs(model, [5, 6], made.ids)) < 1e-4
        left = shm.create_segment(64, prefix)
        life.close()
        assert process.wait(10) == 1
        deadline = time.monotonic() + 5
        while left.path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert shm.list_segments(prefix) == []


def failed_start(*flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "slime.engines.embedded", "--threads", "1", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_missing_model_folder_ends_the_process_with_the_cause(tmp_path):
    ended = failed_start("--model-path", str(tmp_path / "nowhere"), "--ready-file", str(tmp_path / "ready"))
    assert ended.returncode != 0 and "nowhere" in ended.stderr
    assert not (tmp_path / "ready").exists()


def test_a_taken_port_ends_the_process_before_the_model_is_loaded(tmp_path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = failed_start("--model-path", str(tmp_path), "--port", str(taken.getsockname()[1]))
    assert ended.returncode != 0 and "Address already in use" in ended.stderr
