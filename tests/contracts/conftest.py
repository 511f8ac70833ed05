"""Engines that claim the protocol: the embedded one is started here, others are given by url."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_under_test import CONTEXT, VOCAB, EngineUnderTest, load_model, start_engine
from tiny_model import make_tiny_model

from slime.utils import shm
from slime.utils.async_utils import run


def pytest_addoption(parser):
    parser.addoption("--engine-url", help="run the engine conformance suite against this running server as well")
    parser.addoption("--engine-model", help="the model folder that --engine-url serves")
    parser.addoption("--engine-device", default="cpu", help="where the embedded engine of the suite runs")


def pytest_generate_tests(metafunc):
    if "served_engine" in metafunc.fixturenames:
        given = metafunc.config.getoption("--engine-url", default=None)
        metafunc.parametrize(
            "served_engine", ["embedded", *(["url"] if given else [])], indirect=True, scope="session"
        )


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "old", vocab=VOCAB, context=CONTEXT, init_std=0.2)


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
    device = request.config.getoption("--engine-device", default="cpu")
    flags = ("--max-running-requests", "8", "--max-total-tokens", str(1 << 16), "--dtype", "float32")
    flags += ("--device", device)
    with start_engine(tiny_folder, tmp_path_factory.mktemp("engine"), *flags) as (url, process, _, prefix):
        yield EngineUnderTest(url, tiny_folder, process.pid, prefix)


@pytest.fixture
def engine(served_engine) -> Iterator[EngineUnderTest]:
    """The engine with its first weights, nothing paused, nothing cached; and so it is left."""
    yield served_engine
    run(served_engine.control.restore())
    run(served_engine.control.resume())
    run(served_engine.control.abort())
    run(served_engine.control.update_from_disk(str(served_engine.model), "default"))
    run(served_engine.control.flush())
