"""Parts of SGLang's weight paths that need no SGLang: format, choice of transport, live bookkeeping."""

import base64
import io
import pickle
from dataclasses import dataclass

import pytest
import torch
from aiohttp import web

from slime.utils.async_utils import run
from slime.weight_sync.base import SenderOptions, Site, Target
from slime.weight_sync.cuda_ipc import CudaIpcSender
from slime.weight_sync.sglang_format import pack_bucket
from slime.weight_sync.transports import choose_transport
from slime.weight_sync.verify import differing
from slime.wire.manifest import fill_bucket, plan_bucket

SGLANG = ("disk", "tensor", "distributed")


@dataclass
class Metadata:
    """The fields of SGLang's own class, in its order."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


class Reader(pickle.Unpickler):
    """Reads as SGLang does: only the names that it allows."""

    def find_class(self, module, name):
        if (module, name) == ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"):
            return Metadata
        assert module.split(".")[0] in ("torch", "collections"), (module, name)
        return super().find_class(module, name)


def read_bucket(text: str) -> dict[str, torch.Tensor]:
    content = Reader(io.BytesIO(base64.b64decode(text))).load()
    flat = content["flattened_tensor"]
    return {m.name: flat[m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape) for m in content["metadata"]}


def named_tensors(seed: int = 0):
    torch.manual_seed(seed)
    return [("a.weight", torch.randn(3, 5)), ("b", torch.randn(7).bfloat16()), ("c", torch.randn(()))]


def test_a_bucket_in_sglang_s_format_is_read_back_bit_by_bit():
    tensors = named_tensors()
    buffer = torch.zeros(plan_bucket(tensors)[1], dtype=torch.uint8)
    bucket = fill_bucket("slime-x", buffer, tensors)
    read = read_bucket(pack_bucket(buffer, bucket.tensors))
    assert all(
        torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in tensors
    )


@pytest.mark.parametrize(
    ("wanted", "site", "name"),
    [
        ("auto", Site(), "http_tensor"),
        ("tensor", Site(), "http_tensor"),
        ("distributed", Site(), "distributed"),
        ("disk", Site(), "disk"),
        ("auto", Site(cuda=True, colocated=True), "cuda_ipc"),
        ("tensor", Site(cuda=True, colocated=True), "cuda_ipc"),
        ("auto", Site(cuda=True, colocated=True, every_gpu_trains=False), "disk"),
        ("tensor", Site(cuda=True, colocated=True, every_gpu_trains=False), "http_tensor"),
        ("auto", Site(cuda=True), "distributed"),
        ("disk", Site(cuda=True), "disk"),
    ],
)
def test_sglang_gets_the_fastest_transport_that_its_place_allows(wanted, site, name):
    assert choose_transport(wanted, SGLANG, site) == name


def test_our_own_engine_keeps_shared_memory_wherever_it_stands():
    for site in (Site(), Site(cuda=True), Site(cuda=True, colocated=True)):
        assert choose_transport("auto", ("shared_memory", "disk"), site) == "shared_memory"


def test_a_process_group_over_one_shared_device_is_refused():
    with pytest.raises(ValueError, match="same GPUs"):
        choose_transport("distributed", SGLANG, Site(cuda=True, colocated=True))


@pytest.fixture
def receiver():
    """(url, list of received buckets); refuses version "bad"."""
    received = []

    async def update(request: web.Request) -> web.Response:
        body = await request.json()
        if body["weight_version"] == "bad":
            return web.json_response({"success": False, "message": "no room"}, status=400)
        received.append(read_bucket(body["serialized_named_tensors"][0]))
        return web.json_response({"success": True, "message": ""})

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/update_weights_from_tensor", update)
    runner = web.AppRunner(app)

    async def start() -> str:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield run(start()), received
    run(runner.cleanup())


def live_push(sender, targets, version, buckets):
    sender.open(version, targets)
    for bucket in buckets:
        sender.send(bucket)
    return sender.finish()


def test_buffers_in_turn_never_mix_buckets_and_only_the_engine_on_the_rank_s_device_is_served(
    receiver, tmp_path
):
    url, received = receiver
    sender = CudaIpcSender(SenderOptions("slime-x", tmp_path, "model", rank=1))
    targets = (Target("http://127.0.0.1:9", 1, 1, (0,)), Target(url, 2, 1, (1,)))
    buckets = [named_tensors(seed) for seed in range(5)]
    report = live_push(sender, targets, "run:1", buckets)
    assert report.failures == {} and report.num_tensors == 15
    for sent, held in zip(buckets, received, strict=True):
        assert all(torch.equal(held[name], tensor) for name, tensor in sent)
    sender.close()


def test_an_engine_that_refuses_a_live_push_is_reported_and_the_next_push_is_free(receiver, tmp_path):
    url, received = receiver
    sender = CudaIpcSender(SenderOptions("slime-x", tmp_path, "model"))
    targets = (Target(url, 2, 1, (0,)),)
    assert "no room" in live_push(sender, targets, "bad", [named_tensors()]).failures[url]
    assert live_push(sender, targets, "run:2", [named_tensors()]).failures == {}
    assert len(received) == 1
    sender.close()


def test_engines_that_differ_are_told_with_their_tensors():
    assert differing({"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}) == ["b", "c"]
