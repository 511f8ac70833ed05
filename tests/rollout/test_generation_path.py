"""One path from the loop to the engine: `generate` runs once per sample, and the docs list the functions."""

import asyncio
import re
import sys
import threading
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from rollout_helpers import make_args, make_source

import slime
from slime.arguments import parse_args
from slime.rollout import sglang_rollout
from slime.rollout.base_types import call_rollout_fn
from slime.rollout.rm_hub.scoring import reset_breaker
from slime.simulation.clock import Strand, VirtualLoop
from slime.simulation.costs import Costs, EngineCost, TrainerCost
from slime.simulation.modelled_session import ModelledSession
from slime.simulation.simulated_run import Simulation
from slime.simulation.simulated_settings import simulated_args
from slime.simulation.workload import LengthModel, Workload
from slime.utils.types import flatten_samples

ROOT = Path(slime.__file__).parent.parent
HEADING = "## From the loop to the HTTP request"


@pytest.fixture(autouse=True)
def fresh():
    reset_breaker()


@pytest.fixture
def called(monkeypatch):
    """The indices of samples for which `generate` was called, in order."""
    seen, own = [], sglang_rollout.generate

    async def counted(args, sample, sampling_params):
        seen.append(sample.index)
        return await own(args, sample, sampling_params)

    monkeypatch.setattr(sglang_rollout, "generate", counted)
    return seen


def test_an_ordinary_rollout_calls_generate_once_per_sample(tmp_path, called):
    with FakeEngine() as engine:
        args = make_args(tmp_path, engine)
        source = make_source(args)
        output = call_rollout_fn(sglang_rollout.generate_rollout, args, 0, source, evaluation=False)
    indices = [sample.index for sample in flatten_samples(output.samples)]
    assert sorted(called) == indices == list(range(8))
    assert engine.paths.count("/generate") == len(engine.group_sizes) == 4  # one HTTP request per group


def stack_of_slime() -> list[tuple[str, str]]:
    """(function, file) of the running call, outermost first, up to the event loop that drives it."""
    found, frame = [], sys._getframe(1)
    while frame is not None and frame.f_code is not asyncio.BaseEventLoop._run_once.__code__:
        path = Path(frame.f_code.co_filename)
        name = frame.f_code.co_qualname
        if path.is_relative_to(ROOT / "slime") and not name.endswith("comp>"):
            found.append((name, path.relative_to(ROOT).as_posix()))
        frame = frame.f_back
    return found[::-1]


def chain_to_http(tmp_path, monkeypatch) -> list[tuple[str, str]]:
    """The functions from `loop.train` to the first generate request, across tasks and threads."""
    came_from: dict[object, list[tuple[str, str]]] = {}  # task or thread -> the chain that started it
    found: list[list[tuple[str, str]]] = []

    def chain() -> list[tuple[str, str]]:
        try:
            owner = asyncio.current_task()
        except RuntimeError:
            owner = None
        return [*came_from.get(owner or threading.current_thread(), []), *stack_of_slime()]

    class RecordedTask(asyncio.Task):
        def __init__(self, coro, **kwargs):
            super().__init__(coro, **kwargs)
            came_from[self] = chain()

    def make_loop(self):
        own_init(self)
        self.set_task_factory(lambda loop, coro, **kwargs: RecordedTask(coro, loop=loop, **kwargs))

    def make_strand(self, *args):
        own_strand(self, *args)
        came_from[self._thread] = chain()

    def post(self, url, **kwargs):
        if url.endswith("/generate") and not found:
            found.append(chain())
        return own_post(self, url, **kwargs)

    own_init, own_strand, own_post = VirtualLoop.__init__, Strand.__init__, ModelledSession.post
    monkeypatch.setattr(VirtualLoop, "__init__", make_loop)
    monkeypatch.setattr(Strand, "__init__", make_strand)
    monkeypatch.setattr(ModelledSession, "post", post)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"input": "a"}\n')
    words = f"--hf-checkpoint none --prompt-data {prompts} --rm-type math --rollout-batch-size 2 "
    words += "--n-samples-per-prompt 2 --num-rollout 1 --rollout-max-response-len 40"
    costs = Costs(1, EngineCost(0.1, 0.0, 0.0, 0.0, 64), TrainerCost(1, 3.0, 0.0, push_s=0.5))
    args = simulated_args(parse_args(words.split()), steps=1, unit=1, keeps=False)
    workload = Workload(LengthModel("fixed", (20.0,), 40.0), 4.0)
    Simulation(args, costs, workload, overlapped=False).run()
    functions = [one for one in found[0] if not one[1].startswith("slime/simulation/")]
    return functions[functions.index(("train", "slime/loop.py")) :]


def test_the_docs_list_every_function_from_the_loop_to_the_http_request(tmp_path, monkeypatch):
    text = (ROOT / "docs" / "architecture.md").read_text()
    listed = re.findall(
        r"^\d+\. `([\w.<>]+)`, `(slime/[\w/]+\.py)`", text.partition(HEADING)[2], re.MULTILINE
    )
    assert chain_to_http(tmp_path, monkeypatch) == listed
