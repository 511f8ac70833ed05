"""Engines that claim the protocol: the embedded one and SGLang are started here, others are given by url."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from devices import DEVICE
from engine_under_test import (
    CONTEXT,
    VOCAB,
    EngineUnderTest,
    engine_variables,
    load_model,
    small_sglang_plan,
    start_engine,
)
from tiny_model import make_tiny_model

from slime.cluster.serving.engine_weights import EngineWeights
from slime.engines.engine_process import EngineServer
from slime.engines.fleet import EngineFleet, WatchPolicy
from slime.utils.machine import shm

TOKEN = "a-secret-of-this-suite"  # the engines that are started here ask for it, as they do beyond loopback


def pytest_addoption(parser):
    parser.addoption(
        "--engine-url", help="run the engine conformance suite against this running server as well"
    )
    parser.addoption("--engine-model", help="the model folder that --engine-url serves")
    parser.addoption("--engine-device", default=DEVICE, help="where the embedded engine of the suite runs")


def pytest_generate_tests(metafunc):
    if "served_engine" in metafunc.fixturenames:
        given = metafunc.config.getoption("--engine-url", default=None)
        engines = ["embedded", pytest.param("sglang", marks=pytest.mark.sglang), *(["url"] if given else [])]
        metafunc.parametrize("served_engine", engines, indirect=True, scope="session")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("models") / "old", vocab=VOCAB, context=CONTEXT, init_std=0.2
    )


@pytest.fixture(scope="session")
def new_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "new"
    return make_tiny_model(folder, vocab=VOCAB, context=CONTEXT, init_std=0.2, seed=1)


@pytest.fixture(scope="session")
def old_model(tiny_folder):
    return load_model(tiny_folder)


@pytest.fixture(scope="session")
def new_model(new_folder):
    return load_model(new_folder)


@pytest.fixture(scope="session")
def served_engine(request, tiny_folder, tmp_path_factory) -> Iterator[EngineUnderTest]:
    if request.param == "url":
        url = request.config.getoption("--engine-url")
        yield EngineUnderTest(url, Path(request.config.getoption("--engine-model")), None, shm.make_prefix())
        return
    if request.param == "sglang":
        fleet, _ = request.getfixturevalue("sglang_pair")
        yield EngineUnderTest(fleet.urls[0], tiny_folder, None, shm.make_prefix())
        return
    device = request.config.getoption("--engine-device", default=DEVICE)
    flags = ("--max-running-requests", "8", "--max-total-tokens", str(1 << 16), "--dtype", "float32")
    flags += ("--device", device)
    logs = tmp_path_factory.mktemp("engine")
    with start_engine(tiny_folder, logs, *flags, token=TOKEN) as (url, process, _, prefix):
        yield EngineUnderTest(url, tiny_folder, process.pid, prefix)


@pytest.fixture(scope="session")
def sglang_pair(tiny_folder, tmp_path_factory) -> Iterator[tuple[EngineFleet, EngineWeights]]:
    """Two real SGLang servers, restarted when they die, and what keeps their weights."""
    logs = tmp_path_factory.mktemp("sglang")
    os.environ.update(engine_variables("trainer"))
    plans = [
        small_sglang_plan(name, tiny_folder, logs / f"{name}.log", token=TOKEN)
        for name in ("engine-0", "engine-1")
    ]
    args = SimpleNamespace(
        pause_generation_mode="auto",
        check_weight_update_equal=False,
        weight_checksum_interval=1,
        timeouts={"update-weight": 60.0},
    )
    fleet = EngineFleet([EngineServer(plan) for plan in plans], WatchPolicy(8, 3600.0))
    weights = EngineWeights(args, shm.make_prefix(), ((), ()), fleet)
    fleet.launch()
    try:
        fleet.wait_ready()
        yield fleet, weights
    finally:
        fleet.stop()


@pytest.fixture
def engine(served_engine) -> Iterator[EngineUnderTest]:
    """The engine with its first weights, nothing paused, nothing cached; and so it is left."""
    yield served_engine
    served_engine.reset()
