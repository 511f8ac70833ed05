"""An engine process for the tests of hostile requests, one per file."""

import pytest
from engine_under_test import EngineUnderTest, start_engine
from hostile_calls import CONTEXT, VOCAB
from tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), vocab=VOCAB, context=CONTEXT, init_std=0.2)


@pytest.fixture(scope="module")
def engine(folder, tmp_path_factory):
    flags = ("--max-running-requests", "8", "--max-total-tokens", "4096", "--device", "cpu")
    with start_engine(folder, tmp_path_factory.mktemp("engine"), *flags) as (url, process, _, prefix):
        engine = EngineUnderTest(url, folder, process.pid, prefix)
        engine.process = process
        yield engine
