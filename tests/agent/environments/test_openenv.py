"""Environments of OpenEnv: real servers of the real package, in processes of their own."""

import asyncio
import os
import socket
import stat
import subprocess
import sys
import textwrap
import urllib.request

import pytest
from fake_engine import FakeEngine
from patience import LONG_S, PATIENCE_S
from rollout_helpers import assert_conserved, make_args, make_source

from slime.agent.environments import openenv
from slime.agent.environments.rows import read_environment
from slime.catalog.environments import read_choices, read_source
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.types import flatten_samples

pytest.importorskip("openenv.core", reason="openenv-core is not installed: make test-environments")

EOS = 2  # <|im_end|> of the tiny tokenizer
SERVER = '''
import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, MCPEnvironment, Observation, State, create_app
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class Say(Action):
    message: str


class Heard(Observation):
    echoed: str
    picture: str | None = None
    pixels: list | None = None


class Echo(Environment):
    """Repeats what it hears three times; a word that was heard before earns nothing."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, word="word", **kwargs):
        self.heard, self._state = [], State(step_count=0)
        return Heard(echoed=f"{word} {seed}", pixels=[[[255, 0, 0]] * 2] * 3 if word == "look" else None)

    def step(self, action, timeout_s=None, **kwargs):
        if action.message == "break":
            raise OSError("the door is stuck")
        reward = float(len(action.message)) if action.message not in self.heard else 0.0
        self.heard.append(action.message)
        self._state.step_count += 1
        return Heard(echoed=action.message, reward=reward, done=self._state.step_count == 3)

    @property
    def state(self):
        return self._state


class Move(Action):
    column: int
    row: int = 0


class Grid(Echo):
    def reset(self, seed=None, episode_id=None, **kwargs):
        super().reset(seed)
        return Observation()

    def step(self, action, timeout_s=None, **kwargs):
        return Observation(reward=float(action.column + 10 * action.row), done=True)


class Shop(MCPEnvironment):
    def __init__(self):
        shop, self._state = FastMCP("shop"), State()
        self.sold = 0

        @shop.tool()
        def sell(amount: int) -> str:
            """Sells so much."""
            self.sold += amount
            return f"{self.sold} sold"

        super().__init__(shop)

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation()

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise ValueError("call a tool")

    @property
    def state(self):
        return self._state


app = {
    "shop": lambda: create_app(Shop, CallToolAction, CallToolObservation, max_concurrent_envs=1),
    "echo": lambda: create_app(Echo, Say, Heard, max_concurrent_envs=8),
    "one": lambda: create_app(Echo, Say, Heard, max_concurrent_envs=1),
    "grid": lambda: create_app(Grid, Move, Observation, max_concurrent_envs=8),
}[sys.argv[1]]()
uvicorn.run(app, fd=int(sys.argv[2]), log_level="warning")
'''


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    file = tmp_path_factory.mktemp("openenv") / "server.py"
    file.write_text(SERVER)
    running = {}

    def address(kind):
        if kind not in running:
            listening = socket.create_server(("127.0.0.1", 0))
            command = [sys.executable, str(file), kind, str(listening.fileno())]
            process = subprocess.Popen(command, pass_fds=[listening.fileno()])
            running[kind] = (process, listening.getsockname()[1])
            listening.close()
        url = f"http://127.0.0.1:{running[kind][1]}"
        with urllib.request.urlopen(f"{url}/health", timeout=PATIENCE_S):
            return url

    yield address
    for process, _ in running.values():
        process.kill()
        process.wait()


def play(tmp_path, url, answer, *flags):
    with FakeEngine(answer) as engine:
        own = ("--env", f"openenv:{url}", "--rollout-max-response-len", "200", *flags)
        args = make_args(tmp_path, engine, *own, "--custom-rm-path", "x.y", max_context_len=800)
        args.custom_rm_path = args.label_key = None
        args.prompt_data = f"env:openenv:{url}#train:50"
        source = make_source(args)
        output = generate_rollout(args, 0, source)
    assert_conserved(source)
    return flatten_samples(output.samples)


def says(*ids):
    finish = {"type": "stop", "matched": EOS}
    return lambda payload, number: {"tokens": [*ids, EOS], "meta": {"finish_reason": finish}}


def test_an_episode_of_a_server_is_trained_as_the_engine_made_it(tmp_path, serve):
    samples = play(tmp_path, serve("echo"), says(20, 21, 22))
    assert len(samples) == 8
    for sample in samples:
        seed = sample.metadata["env_seed"]
        assert sample.prompt == f"word {seed}"
        assert [reward for _, _, reward in sample.turn_rewards] == [3.0, 0.0, 0.0]
        assert sum(sample.loss_mask) == 12 and sample.metadata["episode_end"] == "done"


def test_a_server_that_serves_one_session_at_a_time_plays_all_episodes(tmp_path, serve, caplog):
    openenv._warn_of_capacity.cache_clear()
    samples = play(tmp_path, serve("one"), says(20, 21), "--timeouts", f"env={LONG_S}")
    assert [sample.metadata["env_score"] for sample in samples] == [2.0] * 8
    warnings = [one.getMessage() for one in caplog.records if "no free session" in one.getMessage()]
    assert len(warnings) == 1 and "max_concurrent_envs" in warnings[0]


def test_an_environment_that_breaks_is_a_failure_and_never_a_score(tmp_path, serve):
    async def work(environment, first):
        with pytest.raises(RuntimeError, match="the door is stuck"):
            await environment.step("break")

    in_session(serve("echo"), {}, work)


def in_session(url, options, work):
    async def inner():
        environment = openenv.make(url, options)
        try:
            return await work(environment, await environment.reset(openenv.Item(seed=7)))
        finally:
            await environment.close()

    asyncio.run(inner())


def test_actions_of_several_fields_are_read_from_json_and_a_mistake_is_said(serve):
    async def work(environment, first):
        assert first.text == "{}"
        wrong = await environment.step("left!")
        assert (wrong.reward, wrong.tool_errors, wrong.done) == (-0.1, 1, False)
        assert '"column"' in wrong.observation
        misfit = await environment.step('{"column": "left"}')
        assert misfit.tool_errors == 1
        right = await environment.step('I go {"column": 3, "row": 2} now')
        assert (right.reward, right.done, right.observation) == (23.0, True, None)

    in_session(serve("grid"), {}, work)

    async def one_field(environment, first):
        assert (await environment.step("nowhere")).tool_errors == 1
        assert (await environment.step("column 4, or rather 5")).reward == 5.0

    in_session(serve("grid"), {"action": "column"}, one_field)


def test_tools_of_a_server_are_described_and_called(serve):
    async def work(environment, first):
        assert first.text.startswith("Call a tool with ") and '"name": "sell"' in first.text
        assert '"amount"' in first.text and "Sells so much." in first.text
        for sold in (2, 4):
            result = await environment.step('{"tool_name": "sell", "arguments": {"amount": 2}}')
            assert f"{sold} sold" in result.observation.text
        assert (await environment.step("sell 2")).tool_errors == 1

    in_session(serve("shop"), {}, work)


def test_options_reach_the_reset_and_pictures_are_shown(serve):
    async def work(environment, first):
        assert first.text == "Look well.\nlook 7" and first.system == "be brief"
        [picture] = first.images
        assert picture.size == (2, 3) and picture.getpixel((0, 0)) == (255, 0, 0)
        assert environment.deterministic

    options = {"reset": {"word": "look"}, "images": ["pixels"], "prompt": "Look well.", "system": "be brief"}
    in_session(serve("echo"), {**options, "deterministic": True}, work)
    with pytest.raises(ValueError, match="has no option promt"):
        openenv.make(serve("echo"), {"promt": "x"})


def test_a_server_that_is_not_there_is_named_before_anything_starts(monkeypatch):
    with pytest.raises(ValueError, match=r"no OpenEnv server is there: .*refused"):
        next(read_environment("env:openenv:http://127.0.0.1:9#train:2"))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="an image needs docker"):
        next(read_environment("env:openenv:echo-env:latest#train:2"))


def test_addresses_and_images_are_tasks():
    [choice] = read_choices("openenv:http://127.0.0.1:8000")
    assert (choice.task, choice.short) == ("http://127.0.0.1:8000", "127.0.0.1:8000")
    [image] = read_source("env:openenv:registry.example/echo-env:latest#train:5")[0]
    assert (image.task, image.short) == ("registry.example/echo-env:latest", "echo-env:latest")


FAKE_DOCKER = '''#!{python}
"""Takes the place of docker: `run` serves the environment on the port that is asked for."""
import subprocess, sys, socket
with open({log!r}, "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
if sys.argv[1] == "run":
    port = int(sys.argv[sys.argv.index("-p") + 1].split(":")[0])
    listening = socket.create_server(("127.0.0.1", port))
    process = subprocess.Popen(
        [{python!r}, {server!r}, "echo", str(listening.fileno())], pass_fds=[listening.fileno()],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )
    print(process.pid)
if sys.argv[1] == "stop":
    import os, signal
    os.kill(int(sys.argv[2]), signal.SIGKILL)
'''


def test_a_container_is_started_once_and_stopped_at_the_end(tmp_path):
    """What slime asks of docker, with a fake one: there is no container here."""
    (tmp_path / "server.py").write_text(SERVER)
    log = tmp_path / "log"
    fake = tmp_path / "docker"
    fake.write_text(
        FAKE_DOCKER.format(python=sys.executable, log=str(log), server=str(tmp_path / "server.py"))
    )
    fake.chmod(fake.stat().st_mode | stat.S_IEXEC)
    program = """
        import asyncio
        from slime.agent.environments import openenv

        async def play(seed):
            environment = openenv.make("echo-env:latest", {"env_vars": {"A": "b"}})
            first = await environment.reset(openenv.Item(seed=seed))
            await environment.close()
            print(first.text)

        for seed in (1, 2):
            asyncio.run(play(seed))
    """
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=environment, capture_output=True, text=True
    )
    assert done.stdout.split("\n")[:2] == ["word 1", "word 2"], done.stderr
    kinds = [line.split()[0] for line in log.read_text().splitlines()]
    assert kinds == ["version", "run", "stop", "rm"]
    assert "-e A=b" in log.read_text()
