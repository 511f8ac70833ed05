"""Engines, transports and trainers are rows: one more is a row and its code, and nobody asks for names."""

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import slime
from slime.arguments.groups.topology import plain_topology
from slime.catalog.backends import BACKENDS
from slime.catalog.engines import ENGINES, Dialect, EngineKind
from slime.catalog.transports import TRANSPORT_CHOICES, TRANSPORTS, TransportRow
from slime.cluster.run_opening import Run
from slime.cluster.serving.served_model import plan_engines
from slime.runtime.placement import Slot
from slime.utils.misc import load_function
from slime.weight_sync.transports import choose_transport, transport_of
from slime.wire.dialects import dialect_of

HERE = Path(__file__)


TOY_COMMAND = """
def run_command(args, site):
    return lambda port, ready_file, life_fd: ["toy-engine", site.model_path, args.toy_flag, str(port)]

def run_environment(args, site):
    return {"TOY": "1"}

def num_threads(model, cores):
    return 1
"""
TOY_TRANSPORT = transport_of("disk")


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """An engine of its own, as a folder of slime/engines would have it."""
    (tmp_path / "toy_engine").mkdir()
    (tmp_path / "toy_engine" / "command.py").write_text(TOY_COMMAND)
    monkeypatch.syspath_prepend(tmp_path)
    dialect = Dialect(name="toy", transports=("toy_way",))
    kind = EngineKind("toy_engine", "for this test", "toy", dialect)
    monkeypatch.setitem(ENGINES, "toy", kind)
    row = TransportRow(f"{HERE}:TOY_TRANSPORT", "for this test", "disk", "toy_way", 9, 9)
    monkeypatch.setitem(TRANSPORTS, "toy", row)
    return dialect


def test_an_engine_kind_is_a_row_and_its_code(toy, tmp_path):
    args = SimpleNamespace(
        rollout_engine="toy",
        toy_flag="red",
        engine_threads=None,
        timeouts={"engine-start": 1.0},
        engine_topology=plain_topology("org/model", 1, 1),
        rollout_quantization="none",
    )
    [plan] = plan_engines(args, Run("id", tmp_path, "slime-x"), (Slot(),))
    assert plan.command(7, tmp_path, 3) == ["toy-engine", "org/model", "red", "7"]
    assert plan.env["TOY"] == "1"
    assert "PYTHONPATH" in plan.env, "it runs in our Python, with our modules"
    assert dialect_of({"engine": "toy", "version": "1"}) is toy


def test_a_transport_is_a_row_and_its_code(toy):
    assert choose_transport("auto", toy.transports) == "toy"
    assert choose_transport("disk", toy.transports) == "toy"
    assert hasattr(transport_of("toy"), "deliver")


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_transport_is_where_its_row_says(name):
    assert callable(
        load_function(TRANSPORTS[name].code) if TRANSPORTS[name].live else transport_of(name).deliver
    )
    assert TRANSPORTS[name].choice in TRANSPORT_CHOICES


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_is_where_its_row_says(name):
    kind = ENGINES[name]
    assert callable(kind.command.run_command) and callable(kind.command.num_threads)
    assert callable(kind.rules.make_reproducible)
    needs = {row.engine_needs for row in TRANSPORTS.values()}
    assert {*kind.dialect.transports, kind.dialect.adapters_by} - {None} <= needs


@pytest.mark.parametrize("name", BACKENDS)
def test_every_trainer_is_where_its_row_says(name):
    package, _, _ = BACKENDS[name].create.rpartition(".")
    assert importlib.util.find_spec(package) is not None


def test_nobody_asks_for_the_name_of_an_engine_or_a_trainer():
    asked = re.compile(r"(rollout_engine|train_backend|dialect\.name) *([!=]=|in \()")
    sources = Path(slime.__file__).parent.rglob("*.py")
    assert [str(path) for path in sources if asked.search(path.read_text())] == []
