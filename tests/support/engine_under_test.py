"""An engine process under test, with blocking helpers, and the plain forward pass it is held against."""

import asyncio
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from devices import DEVICE
from patience import PATIENCE_S

from slime.arguments.passthrough.sglang_flags import find_python
from slime.catalog.transports import TRANSPORTS
from slime.engines.embedded.command import embedded_command
from slime.engines.engine_process import Command, EngineServer, LaunchPlan
from slime.engines.sglang.command import SGLangOptions, sglang_command
from slime.utils import http_utils
from slime.utils.async_utils import run
from slime.utils.machine import shm
from slime.utils.machine.children import LifePipe, stop_process, thread_environment
from slime.utils.machine.shared_gpu import nccl_on_one_gpu
from slime.weight_sync.base import SenderOptions
from slime.weight_sync.transports import transport_of
from slime.wire.client import EngineClient
from slime.wire.control import EngineControl, Receipt
from slime.wire.manifest import WeightManifest, fill_bucket, plan_bucket
from slime.wire.protocol import EngineInfo, GenerateRequest, Generation, SamplingParams

CONTEXT = 512
_OVER_S = 20.0  # after which an engine without requests has ended those that were sent to it
VOCAB = 128
# What only tests rely on. A strict server answers 400 to whatever is wrong with a request; others may ignore
# it, or end. It also makes the token of a health probe while generation is paused, truncates a response that
# would pass the context, and ends a request at once when its client hangs up.
STRICT = ("embedded",)
T = TypeVar("T")


def small_embedded_command(model: Path, prefix: str, **changes) -> Command:
    """The command line of an embedded engine on one CPU thread, with room for four requests."""
    options = dict(device="cpu", dtype="float32", threads=1, max_running_requests=4, max_total_tokens=4096)
    options |= dict(seed=0, await_weights=False)
    return embedded_command(model_path=str(model), shm_prefix=prefix, **options | changes)


@contextmanager
def served_by_embedded(model: Path, log: Path, **changes) -> Iterator[tuple[EngineControl, EngineInfo, str]]:
    """(control of such an engine, what it says of itself, its prefix of shared memory)."""
    prefix = shm.make_prefix()
    command = small_embedded_command(model, prefix, **changes)
    server = EngineServer(LaunchPlan("engine-0", command, thread_environment(1), log, PATIENCE_S))
    server.launch()
    try:
        server.wait_ready()
        control = EngineControl(server.url)
        yield control, run(control.info()), prefix
    finally:
        server.stop()
        shm.unlink_prefix(prefix)


# Flags and precision of a small server, on either device.
SGLANG_DTYPE = "float32" if DEVICE == "cpu" else "bfloat16"
SMALL_SGLANG = ("--max-running-requests", "8", "--max-total-tokens", "8192")
if DEVICE != "cpu":
    SMALL_SGLANG += ("--attention-backend", "triton", "--sampling-backend", "pytorch", "--disable-cuda-graph")
    SMALL_SGLANG += ("--disable-custom-all-reduce", "--mem-fraction-static", "0.5")


def sglang_python() -> str:
    """The interpreter that has SGLang; a test is skipped where there is none."""
    python = find_python(None)
    if python is None:
        pytest.skip("there is no SGLang: `make sglang-env`")
    return python


def small_sglang_plan(name: str, model: Path, log: Path, *extra: str, **changes: Any) -> LaunchPlan:
    """Return the plan of a real SGLang server on the device of the tests; changes are for SGLangOptions."""
    token, given = changes.pop("token", None), dict(dtype=SGLANG_DTYPE, tensor_parallel=1, seed=0)
    given |= dict(cpu=DEVICE == "cpu", memory_saver=False, extra=(*SMALL_SGLANG, *extra))
    options = SGLangOptions(python=sglang_python(), model_path=str(model), **given | changes)
    env = thread_environment(1) | engine_variables(name)
    return LaunchPlan(name, sglang_command(options), env, log, 900.0, host=options.host, token=token)


def engine_variables(name: str) -> dict[str, str]:
    """Return the environment with which a server shares the tests' GPU with trainer ranks; empty on a CPU."""
    if DEVICE == "cpu":
        return {}
    return nccl_on_one_gpu(name) | {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}


@contextmanager
def served_by_sglang(model: Path, log: Path, *extra: str) -> Iterator[str]:
    """A real SGLang server: its address."""
    server = EngineServer(small_sglang_plan("engine-0", model, log, *extra))
    server.launch()
    try:
        server.wait_ready()
        yield server.url
    finally:
        server.stop()


@contextmanager
def address_of(engine: str, model: Path, log: Path, *extra: str) -> Iterator[str]:
    """Of an engine by its name; `extra` are words for SGLang."""
    if engine == "sglang":
        with served_by_sglang(model, log, *extra) as url:
            yield url
    else:
        with served_by_embedded(model, log) as (control, _, _):
            yield control.url


@contextmanager
def start_engine(
    model: Path, folder: Path, *flags: str, token: str | None = None
) -> Iterator[tuple[str, subprocess.Popen, LifePipe, str]]:
    """An embedded engine: (url, process, life pipe, shared-memory prefix). `token`: what it asks for."""
    ready, life, prefix = folder / f"ready-{secrets.token_hex(4)}", LifePipe(), shm.make_prefix()
    command = [
        sys.executable,
        "-m",
        "slime.engines.embedded",
        "--model-path",
        str(model),
        "--ready-file",
        str(ready),
    ]
    command += ["--life-fd", str(life.read_fd), "--shm-prefix", prefix, "--threads", "1", *flags]
    env = {**os.environ, **thread_environment(1), **({http_utils.TOKEN_VARIABLE: token} if token else {})}
    process = subprocess.Popen(command, pass_fds=(life.read_fd,), env=env)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not ready.exists():
            assert process.poll() is None, f"the engine ended with {process.returncode} before it served"
            assert time.monotonic() < deadline, "the engine never became ready"
            time.sleep(0.05)
        url = f"http://127.0.0.1:{json.loads(ready.read_text())['port']}"
        http_utils.authorize(url, token)
        yield url, process, life, prefix
    finally:
        stop_process(process)
        life.close()
        shm.unlink_prefix(prefix)


class Missed(Exception):
    """What a test wanted to meet under way had ended by then: the test was held up."""


def met(in_time: bool) -> None:
    if not in_time:
        raise Missed


def until_met(attempt: Callable[[], T], before_the_next: Callable[[], None]) -> T:
    """What the first attempt gives that is in time."""
    for _ in range(20):
        try:
            return attempt()
        except Missed:
            before_the_next()
    raise AssertionError("it had always ended before the test met it")


@dataclass
class EngineUnderTest:
    """One engine and the model folder it serves, with blocking helpers."""

    url: str
    model: Path
    pid: int | None  # None: not ours
    prefix: str

    def __post_init__(self):
        self.control = EngineControl(self.url, deadline_s=60)
        self.client = EngineClient(self.url, timeout_s=120, max_retries=0)
        self.can: EngineInfo = run(self.control.info())  # a test of more than this is skipped
        self.is_strict = self.can.dialect.name in STRICT

    @property
    def headers(self) -> dict[str, str]:
        """For clients of a test's own."""
        return http_utils.with_token(self.url, None)

    def need(self, promised: bool, what: str) -> None:
        if not promised:
            pytest.skip(f"this engine does not promise {what}")

    def info(self) -> dict:
        return run(http_utils.get(f"{self.url}/server_info"))

    def known_counter(self, name: str) -> int | None:
        """None: this engine does not count it."""
        return self.info().get(name)

    def counter(self, name: str) -> int:
        info = self.info()
        if name not in info:
            pytest.skip(f"this engine does not count {name}")
        return info[name]

    def request(self, ids, *, rid=None, **sampling) -> GenerateRequest:
        if "sampling_seed" in sampling:
            self.need(self.can.has_seeds, "that a seed decides the tokens")
        return GenerateRequest(ids, SamplingParams(**sampling), rid=rid or secrets.token_hex(8))

    async def agenerate(self, ids, *, rid=None, **sampling) -> Generation:
        return await self.client.generate(self.request(ids, rid=rid, **sampling))

    def generate(self, ids, **sampling) -> Generation:
        return run(self.agenerate(ids, **sampling))

    def post(self, endpoint: str, payload) -> object:
        return run(http_utils.post(f"{self.url}/{endpoint}", payload, max_retries=0))

    @contextmanager
    def published(
        self, state: dict[str, torch.Tensor], version: str
    ) -> Iterator[tuple[WeightManifest, list]]:
        """The tensors in two shared segments, and their manifest."""
        self.need("shared_memory" in self.can.transports, "to take weights from shared memory")
        items = list(state.items())
        halves = [items[: len(items) // 2], items[len(items) // 2 :]]
        segments = [shm.create_segment(plan_bucket(half)[1], self.prefix) for half in halves]
        buckets = tuple(fill_bucket(s.name, s.buffer, half) for s, half in zip(segments, halves, strict=True))
        try:
            yield WeightManifest(version, buckets, len(items), sum(b.nbytes for b in buckets)), segments
        finally:
            for segment in segments:
                segment.unlink()
                segment.close()

    async def push(self, model, version: str) -> Receipt:
        """Push by the first transport that leaves a bundle, and have the engine empty its cache."""
        fetched = (name for name, row in TRANSPORTS.items() if not row.live)
        transport = transport_of(
            next(name for name in fetched if TRANSPORTS[name].engine_needs in self.can.transports)
        )
        sender = transport.make_sender(
            SenderOptions(self.prefix, self.model.parent / "pushed", str(self.model))
        )
        try:
            items = list(model.state_dict().items())
            sender.send(items[: len(items) // 2])
            sender.send(items[len(items) // 2 :])
            receipt = await transport.deliver(sender.finish(version), self.control, self.can)
            if not self.can.dialect.flush_while_running:
                await self.control.flush()
            return receipt
        finally:
            sender.close()

    def meet(self, scenario: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What a scenario gives that meets requests under way."""
        return until_met(lambda: run(scenario()), self.reset)

    async def abort_all(self) -> None:
        """End every request of the engine, as its `/abort_request` promises."""
        await self.control._post("abort_request", {"abort_all": True})

    def reset(self) -> None:
        """Its first weights, nothing paused, nothing cached."""
        if self.can.memory_saver:  # others may end over memory that was never released
            run(self.control.restore())
        run(self.control.resume())
        run(self.abort_all())
        run(self.idle())
        run(self.control.update_from_disk(str(self.model), "default"))
        run(self.control.flush())

    async def running(self, *, tokens: int) -> None:
        """Wait until requests in flight have made about that many tokens since now."""
        info = await http_utils.get(f"{self.url}/server_info")
        if "num_generated_tokens" not in info:
            await self._running_by_load(tokens)
            return
        start, seen = info["num_generated_tokens"], time.monotonic()
        while time.monotonic() < seen + _OVER_S:
            info = await http_utils.get(f"{self.url}/server_info")
            if info["num_running_reqs"]:
                seen = time.monotonic()
                if info["num_generated_tokens"] - start >= tokens:
                    return
        raise Missed

    async def idle(self) -> None:
        """Wait until no request is left."""
        async with asyncio.timeout(PATIENCE_S):
            while await self.control.load() != (0, 0):
                await asyncio.sleep(0.01)

    async def _running_by_load(self, tokens: int) -> None:
        """For an engine without that counter: its requests hold that many tokens of cache."""
        seen = time.monotonic()
        while time.monotonic() < seen + _OVER_S:
            loads = (await http_utils.get(f"{self.url}/v1/loads"))["loads"]
            if loads[0]["num_running_reqs"]:
                seen = time.monotonic()
                if loads[0]["num_used_tokens"] >= tokens + 10:
                    return
            await asyncio.sleep(0.005)
        raise Missed


def load_model(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def plain_log_probs(model, prompt, ids, temperature: float = 1.0) -> list[float]:
    """Log-probs of `ids` after `prompt` by one plain forward pass."""
    tokens = torch.tensor([[*prompt, *ids]])
    logits = model(tokens).logits[0, len(prompt) - 1 : -1].float() / (temperature or 1.0)
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).squeeze(1).tolist()


def largest_difference(a, b) -> float:
    assert len(a) == len(b)
    return max(abs(x - y) for x, y in zip(a, b, strict=True))
