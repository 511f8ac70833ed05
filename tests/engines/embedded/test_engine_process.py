"""The engine as a process: it starts, reports its port, waits for weights, dies with its parent."""

import asyncio
import socket
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from engine_under_test import EngineUnderTest, largest_difference, load_model, plain_log_probs, start_engine
from patience import LONG_S, PATIENCE_S, eventually
from tiny_model import make_tiny_model

from slime.rollout.on_policy_distillation import reward_func
from slime.utils.async_utils import get_loop, run
from slime.utils.http_utils import HttpError
from slime.utils.machine import shm
from slime.utils.machine.ports import is_port_available, with_port
from slime.utils.types import Sample
from slime.wire.control import EngineControl


@pytest.fixture(scope="module")
def tied_folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=True, init_std=0.2)


def test_an_engine_that_awaits_weights_serves_after_the_first_push_and_dies_with_its_parent(
    tied_folder, tmp_path
):
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
        assert process.wait(PATIENCE_S) == 1
        eventually(lambda: shm.list_segments(prefix) == [])
        assert not left.path.exists()


def test_an_engine_serves_at_an_address_of_version_6(tied_folder, tmp_path):
    if not is_port_available(0, "::1"):
        pytest.skip("this machine has no version 6 of the Internet Protocol")
    with start_engine(tied_folder, tmp_path, "--host", "::1", "--device", "cpu") as (url, *_):
        info = run(EngineControl(f"http://{with_port('::1', url.rpartition(':')[2])}").info())
    assert info.model_path == str(tied_folder)


def test_an_input_is_scored_as_a_teacher_does_it_and_leaves_nothing_behind(tied_folder, tmp_path):
    sampling = {"max_new_tokens": 0, "temperature": 1.0}
    asked = {"return_logprob": True, "logprob_start_len": 0}
    with start_engine(tied_folder, tmp_path, "--max-total-tokens", "512", "--device", "cpu") as (
        url,
        process,
        *_,
    ):
        engine = EngineUnderTest(url, tied_folder, process.pid, "")
        ids, model = [7, 5, 90, 5, 6, 44], load_model(tied_folder)
        before = engine.generate([5, 6], max_new_tokens=10, temperature=0.0)
        answers = engine.post("generate", {"input_ids": [ids, ids[:2]], "sampling_params": sampling, **asked})
        for tokens, answer in zip((ids, ids[:2]), answers, strict=True):
            entries = answer["meta_info"]["input_token_logprobs"]
            assert entries[0] == [None, 7, None] and [entry[1] for entry in entries] == tokens
            expected = plain_log_probs(model, tokens[:1], tokens[1:])
            assert largest_difference([entry[0] for entry in entries[1:]], expected) < 1e-4
            assert answer["output_ids"] == [] and answer["meta_info"]["finish_reason"]["type"] == "length"
        after = engine.generate([5, 6], max_new_tokens=10, temperature=0.0)
        assert (after.ids, after.log_probs) == (before.ids, before.log_probs)
        sample = Sample(tokens=ids, response_length=3, index=0, group_index=0)
        args = SimpleNamespace(
            rm_url=f"{url}/generate", rollout_temperature=1.0, timeouts={"generate": PATIENCE_S}
        )
        vars(args).update(opd_kl="reverse_top_k", opd_top_k=3)
        assert run(reward_func(args, sample)) == 0.0
        assert largest_difference(sample.teacher_log_probs, plain_log_probs(model, ids[:3], ids[3:])) < 1e-4
        assert sample.teacher_top_ids.shape == sample.teacher_top_log_probs.shape == (3, 3)
        for changes, named in (
            ({"sampling_params": {"max_new_tokens": 2}}, "takes max_new_tokens = 0"),
            ({"logprob_start_len": 3}, "use 0 or -1"),
            ({"top_logprobs_num": 1 << 20}, "top_logprobs_num is 1048576: .* reports 0 to "),
            ({"top_logprobs_num": 1, "logprob_start_len": -1}, "unless logprob_start_len is 0"),
        ):
            with pytest.raises(HttpError, match=named):
                engine.post("generate", {"input_ids": ids, "sampling_params": sampling, **asked, **changes})


def failed_start(*flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "slime.engines.embedded", "--threads", "1", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


def test_a_missing_model_folder_ends_the_process_with_the_cause(tmp_path):
    ended = failed_start("--model-path", str(tmp_path / "nowhere"), "--ready-file", str(tmp_path / "ready"))
    assert ended.returncode != 0 and "nowhere" in ended.stderr
    assert not (tmp_path / "ready").exists()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "engine.example"])
def test_an_engine_that_others_reach_does_not_start_without_a_token(tmp_path, host):
    ended = failed_start("--model-path", str(tmp_path), "--host", host)
    assert ended.returncode != 0 and "SLIME_ENGINE_TOKEN" in ended.stderr and host in ended.stderr


def test_a_taken_port_ends_the_process_before_the_model_is_loaded(tmp_path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = failed_start("--model-path", str(tmp_path), "--port", str(taken.getsockname()[1]))
    assert ended.returncode != 0 and "Address already in use" in ended.stderr


def test_a_group_is_answered_to_the_bit_like_single_requests_where_each_is_computed_alone(
    tied_folder, tmp_path
):
    flags = ("--max-running-requests", "1", "--max-total-tokens", "512", "--device", "cpu")
    with start_engine(tied_folder, tmp_path, *flags) as (url, process, _, prefix):
        engine = EngineUnderTest(url, tied_folder, process.pid, prefix)
        alone = [
            engine.request([5, 6, 7], max_new_tokens=8 + seed, sampling_seed=seed, ignore_eos=True)
            for seed in range(6)
        ]

        async def together():
            return await asyncio.gather(*(engine.client.generate(replace(r, group="g")) for r in alone))

        found, expected = run(together()), [run(engine.client.generate(request)) for request in alone]
    assert [(a.ids, a.log_probs) for a in found] == [(a.ids, a.log_probs) for a in expected]


def test_an_engine_that_waits_for_a_group_that_never_comes_ends_when_it_is_asked_to(tied_folder, tmp_path):
    """The wait holds a thread for minutes; the end of the process does not wait for it."""
    flags = ("--max-total-tokens", "512", "--device", "cpu")
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        start_engine(tied_folder, tmp_path, *flags) as (url, process, *_),
    ):
        place = ("127.0.0.1", silent.getsockname()[1], 1, 2, "a-group", "gloo")
        joining = asyncio.run_coroutine_threadsafe(EngineControl(url).join_group(*place), get_loop())
        silent.accept()  # the engine is at the meeting point, where nobody speaks
        process.terminate()
        assert process.wait(LONG_S) == 0
        with pytest.raises(HttpError):
            joining.result(PATIENCE_S)
