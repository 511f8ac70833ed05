"""Who may ask what of which process, and what files of others may do; docs/security.md lists all tests."""

import ast
import enum
import functools
import inspect
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from agent_world import agent_world
from fake_engine import FakeEngine
from patience import PATIENCE_S
from source_trees import nodes_of

import slime
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.backends.shared.checkpoint_errors import CodeInCheckpoint, unreadable_named
from slime.cli import weight_agent, weight_publisher
from slime.cli.inspect import dashboard
from slime.engines.balancer import Balancer
from slime.engines.embedded.__main__ import parse
from slime.utils import http_utils
from slime.utils.async_utils import run
from slime.utils.files.pickled_names import foreign_name
from slime.weight_sync.delta.weight_agent import publisher_app, serve

SLIME = Path(slime.__file__).parent


class Touches:
    """A fake: what it is unpickled from makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


# -- loopback by default, a token for anything else ----------------------------------------------------------


@pytest.mark.parametrize("server", [Balancer.start, run_app_in_thread])
def test_what_serves_without_being_told_where_serves_this_machine(server):
    assert inspect.signature(server).parameters["host"].default == "127.0.0.1"


@pytest.mark.parametrize("command", [dashboard, weight_agent, weight_publisher])
def test_every_command_that_serves_listens_on_loopback_unless_it_is_told_otherwise(command):
    source = inspect.getsource(command)
    assert '"--host"' in source and 'default="127.0.0.1"' in source


def test_an_engine_listens_on_loopback_and_beyond_it_only_with_a_token(tmp_path):
    assert parse(["--model-path", "x"]).host == "127.0.0.1"
    words = [
        sys.executable,
        "-m",
        "slime.engines.embedded",
        "--model-path",
        str(tmp_path),
        "--host",
        "0.0.0.0",
    ]
    env = {name: value for name, value in os.environ.items() if name != http_utils.TOKEN_VARIABLE}
    done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=PATIENCE_S)
    assert done.returncode != 0 and http_utils.TOKEN_VARIABLE in done.stderr


def test_published_weights_and_agents_are_for_this_machine_or_for_who_has_the_token(tmp_path, monkeypatch):
    monkeypatch.delenv(http_utils.TOKEN_VARIABLE, raising=False)
    with pytest.raises(ValueError, match=http_utils.TOKEN_VARIABLE):
        serve(publisher_app(tmp_path), "0.0.0.0", 0)
    monkeypatch.setenv(http_utils.TOKEN_VARIABLE, "secret-7")
    app = publisher_app(tmp_path)
    monkeypatch.setattr("aiohttp.web.run_app", lambda app, sock, print: sock.close())
    serve(app, "0.0.0.0", 0)  # what it adds to the application stays
    (tmp_path / "published.json").write_text("{}")
    handle = run_app_in_thread(app)
    url = f"http://127.0.0.1:{handle.port}/published.json"
    try:
        for given in (None, "Bearer no", "Bearer \xe9"):
            assert status(url, headers={"Authorization": given} if given else {}) == 401
        assert status(url, headers={"Authorization": "Bearer secret-7"}) == 200
    finally:
        handle.stop()


def status(url, method="GET", **options):
    async def ask():
        async with http_utils.get_session().request(method, url, **options) as answer:
            await answer.read()
            return answer.status

    return run(ask())


# -- no pickle from the wire ---------------------------------------------------------------------------------


def test_a_pickle_that_is_sent_runs_nothing(tmp_path):
    body = pickle.dumps(Touches(tmp_path / "ran"))
    kinds = ("application/json", "application/octet-stream", "application/x-python-pickle")
    with FakeEngine(lambda payload, number: 400) as engine, agent_world(lambda prompt: "ok") as agents:
        balancer = Balancer([engine.url])
        url = f"http://127.0.0.1:{run(balancer.start())}"
        try:
            for kind in kinds:
                headers = {"Content-Type": kind, "Authorization": "Bearer key-1"}
                is_json = kind == "application/json"
                for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
                    assert status(agents.url + path, "POST", data=body, headers=headers) == 400
                told = status(f"{url}/pause_generation", "POST", data=body, headers=headers)
                assert told == (404 if is_json else 415)
        finally:
            run(balancer.stop())
    assert not (tmp_path / "ran").exists()


# Between processes that one run starts, over pipes that nobody else has; or read without running anything.
PICKLES = {
    "api.py",  # a notebook's own functions, in its own folder
    "backends/torch_dist/pieces.py",  # stand-ins for every class
    "runtime/local.py",
    "runtime/worker_main.py",
    "utils/errors.py",  # an error of this process, to see whether another one could read it
    "utils/files/pickled_names.py",  # stand-ins for every class
    "utils/machine/warm_start.py",  # writes; the fork server reads it from a pipe that only its parent has
    "weight_sync/sglang_format.py",  # writes
}
LOADS_ANYTHING = {"cli/verify_model/trainer_job.py"}  # what its own trainer has just written


@functools.cache
def sources():
    words = ("pickle", "dill", "marshal", "shelve", "load")
    texts = ((path, path.read_text()) for path in sorted(SLIME.rglob("*.py")))
    return [
        (str(path.relative_to(SLIME)), nodes_of(path))
        for path, text in texts
        if any(word in text for word in words)
    ]


def test_pickles_are_read_between_processes_of_one_run_and_nowhere_else():
    names = ("pickle", "cloudpickle", "dill", "marshal", "shelve")
    found = set()
    for name, nodes in sources():
        for node in nodes:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(module.partition(".")[0] in names for module in modules):
                found.add(name)
    assert found == PICKLES


def test_files_are_loaded_as_plain_values():
    found = set()
    for name, nodes in sources():
        for node in nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "yaml.unsafe_load"):
                safe = {k.arg: ast.unparse(k.value) for k in node.keywords}.get("weights_only") == "True"
                found |= set() if safe else {name}
    assert found == LOADS_ANYTHING


# -- checkpoints of others -----------------------------------------------------------------------------------


def dcp():
    import torch.distributed.checkpoint as module

    return module


def test_a_checkpoint_is_read_and_one_with_code_in_its_metadata_is_refused(tmp_path):
    state = {"a": torch.arange(4.0), "b": torch.zeros(2, dtype=torch.bfloat16)}
    dcp().save(state, checkpoint_id=tmp_path / "ckpt")
    read = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    with unreadable_named(tmp_path / "ckpt"):
        dcp().load(read, checkpoint_id=tmp_path / "ckpt")
    assert all(torch.equal(read[name], state[name]) for name in state)
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    (tmp_path / "ckpt" / ".metadata").write_bytes(pickle.dumps(Touches(tmp_path / "ran")))
    with pytest.raises(CodeInCheckpoint, match=r"would run pathlib"), unreadable_named(tmp_path / "ckpt"):
        dcp().load(read, checkpoint_id=tmp_path / "ckpt")
    assert not (tmp_path / "ran").exists()


def test_plans_of_a_save_which_megatron_keeps_in_its_metadata_are_none_of_what_is_refused(tmp_path):
    from torch.distributed.checkpoint import planner
    from torch.distributed.checkpoint.metadata import MetadataIndex

    item = planner.WriteItem(MetadataIndex("a"), planner.WriteItemType.TENSOR)
    (tmp_path / ".metadata").write_bytes(pickle.dumps([planner.SavePlan([item]), torch.float32, Path("x")]))
    with unreadable_named(tmp_path):
        assert (tmp_path / ".metadata").is_file()


def test_code_among_the_values_of_a_checkpoint_is_not_run(tmp_path):
    dcp().save({"a": Touches(tmp_path / "ran")}, checkpoint_id=tmp_path / "ckpt")
    with pytest.raises(ValueError, match="cannot be read"), unreadable_named(tmp_path / "ckpt"):
        dcp().load({"a": 1}, checkpoint_id=tmp_path / "ckpt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("value", [print, os.system, Path("x"), {"a": {1, 2}}, object()])
def test_names_in_a_pickle_are_found_without_it_being_run(value):
    allowed = {("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"), ("builtins", "set")}
    found = foreign_name(pickle.dumps(value, protocol=4), allowed)
    assert found is None if isinstance(value, (Path, dict)) else found is not None


class Kind(enum.Enum):
    TENSOR = 1


class TakesAttribute:
    """Pickled as a call of getattr, as a member of an enumeration is by the first releases of Python 3.11."""

    def __init__(self, of, name):
        self.of, self.name = of, name

    def __reduce__(self):
        return getattr, (self.of, self.name)


@pytest.mark.parametrize(
    ("of", "name", "refused"),
    [
        (Kind, "TENSOR", None),
        (Kind, "mro", "builtins.getattr"),
        (Kind, "__init_subclass__", "builtins.getattr"),
        (Touches, "TENSOR", "builtins.getattr"),
    ],
)
def test_a_member_of_a_named_enumeration_is_all_that_may_be_taken_by_name(of, name, refused):
    kinds = {(__name__, "Kind")}
    found = foreign_name(pickle.dumps(TakesAttribute(of, name)), {*kinds, (__name__, "Touches")}, kinds)
    assert found == refused


def test_half_a_pickle_is_a_sentence():
    with pytest.raises(ValueError, match="not a complete pickle"):
        foreign_name(pickle.dumps([1, 2, 3])[:-2], set())
