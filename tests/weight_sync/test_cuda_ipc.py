"""Handles for engines of several GPUs: one per engine rank, and no buffer is reused before it was read.

Two processes stand for trainer ranks and shared memory of the host for that of devices: what CUDA
itself does with a handle is not covered here.
"""

import asyncio
import inspect
import json

import pytest
import torch
from aiohttp import web
from live_rank import NUM_BUCKETS
from live_ranks import push_from_ranks
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from slime.arguments import parse_args
from slime.cluster.serving.served_model import takes_handles
from slime.runtime.placement import Placement, Slot
from slime.utils.async_utils import run
from slime.utils.machine import shm
from slime.weight_sync.sglang_format import seen_by_reader


class SlowEngine:
    """Maps what it is handed a while after the request came, as late as an engine may."""

    def __init__(self):
        self.read: list[list[tuple[int, float]]] = []  # per request, per rank of the engine: (device, value)
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/update_weights_from_tensor", self._update)
        self._runner = web.AppRunner(app)

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        await asyncio.sleep(0.15)
        handles = [json.loads(text) for text in body["serialized_named_tensors"]]
        self.read.append([(handle["device"], read_value(handle["segment"])) for handle in handles])
        return web.json_response({"success": True, "message": ""})

    async def start(self) -> str:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()


def read_value(name: str) -> float:
    segment = shm.open_segment(name)
    values = segment.buffer[:4000].view(torch.float32).unique()
    assert len(values) == 1, "a buffer was written to while it was read"
    return float(values[0])


@pytest.fixture
def engine():
    made = SlowEngine()
    yield made, run(made.start())
    run(made.stop())


@pytest.fixture
def prefix():
    made = shm.make_prefix()
    yield made
    shm.unlink_prefix(made)


def test_an_engine_of_two_gpus_gets_a_handle_of_each_gpu_and_no_buffer_changes_before_it_answered(
    engine, prefix
):
    engine, url = engine
    job = {"targets": [(url, [0, 1])], "version": "run:1", "segments": prefix}
    reports = push_from_ranks(2, job)
    assert reports == [{"failures": {}, "num_tensors": NUM_BUCKETS}] * 2
    assert engine.read == [[(0, 10.0 * b), (1, 10.0 * b + 1)] for b in range(NUM_BUCKETS)]


def test_one_engine_of_two_gpus_that_refuses_does_not_hold_up_another(engine, prefix):
    """Both push at once: engine one on GPUs 0 and 1 is not there, engine two on GPU 2 gets everything."""
    engine, url = engine
    job = {"targets": [("http://127.0.0.1:9", [0, 1]), (url, [2])], "version": "run:1", "segments": prefix}
    first, second, third = push_from_ranks(3, job)
    assert list(first["failures"]) == ["http://127.0.0.1:9"] and second["failures"] == third["failures"] == {}
    assert engine.read == [[(0, 10.0 * b + 2)] for b in range(NUM_BUCKETS)]


def test_a_handle_names_the_device_by_the_number_that_its_reader_gives_it():
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    assert names[6] == "storage_device"
    arguments = tuple(names)
    assert seen_by_reader(arguments, 3) == (*arguments[:6], 3, *arguments[7:])


@pytest.mark.parametrize(
    ("engines", "served"), [(((0, 1), (2, 3)), True), (((0, 1), (2, 4)), False), (((),), True)]
)
def test_handles_are_used_where_every_gpu_of_an_engine_has_a_trainer_rank(tmp_path, engines, served):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]})
    )
    (tmp_path / "p.jsonl").write_text('{"input": "a"}\n')
    words = [
        "--hf-checkpoint",
        str(tmp_path),
        "--prompt-data",
        str(tmp_path / "p.jsonl"),
        "--num-rollout",
        "1",
    ]
    words += [
        "--rollout-batch-size",
        "1",
        "--rollout-max-response-len",
        "4",
        "--rm-type",
        "math",
        "--n-samples-per-prompt",
        "2",
    ]
    args = parse_args([*words, "--rollout-num-gpus", str(len(engines))])
    trainer = tuple(Slot(i, (i,)) for i in range(4))
    placement = Placement(trainer, tuple(Slot(i, gpus) for i, gpus in enumerate(engines)))
    assert takes_handles(args, placement) is served
