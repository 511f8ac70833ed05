"""Deltas to a real engine: by the trainer's push, and through an agent that pulls over HTTP."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from aiohttp import web
from delta_world import load_folder, make_sender, publish
from engine_under_test import served_by_embedded
from patience import PATIENCE_S
from tiny_model import make_tiny_model

from slime.utils.async_utils import run
from slime.utils.http_utils import HttpError
from slime.utils.machine import shm
from slime.utils.machine.children import stop_process, thread_environment
from slime.weight_sync.base import check_receipt
from slime.weight_sync.delta.local_copy import LocalCopy
from slime.weight_sync.delta.publication import open_source
from slime.weight_sync.delta.transport import DELTA
from slime.weight_sync.delta.weight_agent import WeightAgent, publisher_app
from slime.wire.manifest import WeightManifest, fill_bucket, plan_bucket

pytest.importorskip("zstandard")
pytest.importorskip("xxhash")

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("delta") / "model")


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory):
    """(control, info, prefix of shared memory) of an embedded engine in a process of its own."""
    log = tmp_path_factory.mktemp("logs") / "engine.log"
    with served_by_embedded(model, log, await_weights=True) as engine:
        yield engine


def differing(engine, state: dict[str, torch.Tensor]) -> list[str]:
    """Names of the engine's tensors that are not the trainer's, bit by bit."""
    control, _, prefix = engine
    tensors = list(state.items())
    segment = shm.create_segment(plan_bucket(tensors)[1], prefix)
    try:
        bucket = fill_bucket(segment.name, segment.buffer, tensors)
        return run(control.check_equal(WeightManifest("any", (bucket,), len(tensors), bucket.nbytes)))
    finally:
        segment.unlink()


def moved(state: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: torch.where(torch.rand(t.shape) < 0.02, t + 0.01, t) for name, t in state.items()}


def loads_only_copies(info):
    """The same engine without the trait that it changes its own tensors."""
    return dataclasses.replace(info, dialect=dataclasses.replace(info.dialect, applies_deltas=False))


@pytest.mark.parametrize("encoding, in_place", [("overwrite", True), ("xor", True), ("overwrite", False)])
def test_the_engine_holds_the_trainer_s_bits_after_each_of_several_pushes(
    engine, model, tmp_path, encoding, in_place
):
    """An engine that changes its own tensors needs the copy beside it for the first push alone."""
    control, info, prefix = engine
    info = info if in_place else loads_only_copies(info)
    sender = make_sender(tmp_path / "p", tmp_path / "l", str(model), encoding=encoding)
    state, run_id = load_folder(model), f"push-{encoding}-{in_place}"
    for i in range(1, 5):
        state = moved(state, i)
        bundle = publish(sender, state, f"{run_id}:{i}")
        run(DELTA.prepare(bundle, control, info))
        assert run(control.version()) != bundle.version  # it still serves
        check_receipt(bundle, run(DELTA.deliver(bundle, control, info)), control.url)
        assert LocalCopy(tmp_path / "l").version == f"{run_id}:{1 if in_place else i}"
        assert differing(engine, state) == []
    assert run(DELTA.compare(bundle, control, info, prefix)) == []
    assert differing(engine, moved(state, 9)) != []
    sender.close()


@pytest.mark.parametrize("fault", ["another base", "damage", "not finite"])
def test_an_engine_that_cannot_apply_a_delta_loads_the_whole_copy(engine, model, tmp_path, fault, caplog):
    control, info, _ = engine
    sender = make_sender(tmp_path / "p", tmp_path / "l", str(model))
    before, run_id = load_folder(model), f"fault-{fault[0]}"
    first = publish(sender, before, f"{run_id}:1")
    run(DELTA.deliver(first, control, info))
    after = moved(before, 1)
    if fault == "not finite":
        after["model.norm.weight"] = after["model.norm.weight"].clone().fill_(torch.inf)
    bundle = publish(sender, after, f"{run_id}:2")
    if fault == "another base":
        run(control.set_version("somebody:3"))
    if fault == "damage":
        manifest = json.loads((bundle.written / "weights.json").read_text())
        changed = next(row for row in manifest["tensors"] if row["size"])
        changed["checksum"] = "0" * 32
        (bundle.written / "weights.json").write_text(json.dumps(manifest))
    if fault == "not finite":
        with pytest.raises(HttpError, match="not finite numbers"):
            run(DELTA.deliver(bundle, control, info))
        run(DELTA.deliver(publish(sender, before, f"{run_id}:3"), control, info))
        assert differing(engine, before) == []
    else:
        run(DELTA.deliver(bundle, control, info))
        assert run(control.version()) == bundle.version and differing(engine, after) == []
    assert ("loads the whole copy" in caplog.text) == (fault != "another base")
    sender.close()


# ---- an agent ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(app: web.Application):
    """An application over real HTTP, in this process."""
    runner = web.AppRunner(app)
    run(runner.setup())
    site = web.TCPSite(runner, "127.0.0.1", 0)
    run(site.start())
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    run(runner.cleanup())


@contextlib.contextmanager
def started(*words: str):
    """A `slime` command that serves, in a process of its own; (process, its address)."""
    env = {**os.environ, **thread_environment(1), "PYTHONPATH": str(ROOT)}
    words = (sys.executable, "-m", "slime", *words, "--port", "0")
    process = subprocess.Popen(words, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert line.startswith("listening on http://"), line
        yield process, line.split()[-1]
    finally:
        stop_process(process)
        process.stdout.close()


@pytest.fixture
def sender(model, tmp_path):
    (tmp_path / "p").mkdir()
    made = make_sender(tmp_path / "p", tmp_path / "unused", str(model))
    yield made
    made.close()


def ask(url: str, **payload) -> dict:
    request = urllib.request.Request(f"{url}/pull", data=json.dumps(payload).encode(), method="POST")
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        return {"status": error.code, **json.load(error)}


def test_an_agent_pulls_over_http_and_catches_up_over_a_broken_chain(engine, model, sender, tmp_path):
    state = load_folder(model)
    with serving(publisher_app(tmp_path / "p")) as source:
        agent = WeightAgent(open_source(source), tmp_path / "l", engine[0].url, deadline_s=PATIENCE_S)
        with serving(agent.app()) as url:
            publish(sender, state := moved(state, 1), "pull:1")
            assert ask(url)["route"] == "full"
            assert run(engine[0].version()) == "pull:1" and differing(engine, state) == []
            for i in range(2, 5):
                publish(sender, state := moved(state, i), f"pull:{i}")
            answer = ask(url, version="pull:3")  # at least
            assert (answer["version"], answer["route"], answer["num_deltas"]) == ("pull:4", "delta", 3)
            assert run(engine[0].version()) == "pull:4" and differing(engine, state) == []
            publish(sender, state := moved(state, 5), "pull:5")
            for file in (tmp_path / "p" / "delta-pull-5").glob("*.bin"):
                file.unlink()  # the chain is broken
            assert ask(url, version="pull:5", exact=True)["route"] == "full"
            assert differing(engine, state) == []
            assert ask(url, version="no version")["status"] == 400


def test_a_push_goes_through_the_agent_and_an_agent_that_is_gone_is_an_error(engine, model, tmp_path):
    control, info, prefix = engine
    agent = WeightAgent(open_source(str(tmp_path / "p")), tmp_path / "l", control.url, deadline_s=PATIENCE_S)
    with serving(agent.app()) as url:
        sender = make_sender(tmp_path / "p", tmp_path / "unused", str(model), agents={control.url: url})
        state = moved(load_folder(model), 7)
        bundle = publish(sender, state, "agent:1")
        run(DELTA.prepare(bundle, control, info))
        check_receipt(bundle, run(DELTA.deliver(bundle, control, info)), control.url)
        assert run(DELTA.compare(bundle, control, info, prefix)) == [] == differing(engine, state)
        assert not (tmp_path / "unused").exists()
    with pytest.raises(RuntimeError, match=rf"{url}/pull"):
        run(DELTA.deliver(bundle, control, info))
    sender.close()


def test_a_publisher_shows_published_files_and_nothing_else(sender, tmp_path):
    publish(sender, {"a": torch.ones(3), "b": torch.ones(2)}, "pub:1")
    (tmp_path / "p" / "secret").mkdir()
    (tmp_path / "p" / "secret" / "file").write_text("x")
    (tmp_path / "outside").write_text("x")
    with serving(publisher_app(tmp_path / "p")) as url:
        assert b"pub:1" in urllib.request.urlopen(f"{url}/published.json").read()
        assert urllib.request.urlopen(f"{url}/full-pub-1/weights.json").read()
        for path in (
            "secret/file",
            "full-pub-1/../../outside",
            "full-pub-1/..%2F..%2Foutside",
            "full-pub-1/.hidden",
        ):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"{url}/{path}")


@pytest.mark.slow
def test_agent_and_publisher_as_processes_and_the_agent_is_killed(engine, model, sender, tmp_path):
    state = load_folder(model)
    with started("weight-publisher", str(tmp_path / "p")) as (_, source):
        words = ("weight-agent", "--engine", engine[0].url, "--source", source)
        words += ("--local-checkpoint-dir", str(tmp_path / "l"), "--wait-s", "20")
        publish(sender, state := moved(state, 1), "kill:1")
        with started(*words) as (process, url):
            assert ask(url, version="kill:1")["route"] == "full"
            publish(sender, state := moved(state, 2), "kill:2")
            process.send_signal(signal.SIGKILL)
            process.wait()
        with started(*words) as (_, url):
            held = json.load(urllib.request.urlopen(f"{url}/version"))
            assert held == {"version": "kill:1", "engine_version": "kill:1"}
            assert ask(url, version="kill:2")["route"] == "delta"
            assert differing(engine, state) == []
