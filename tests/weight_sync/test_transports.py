"""Weights on their way to a real engine: shared memory and disk, receipts, comparison, late engines."""

import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_under_test import served_by_embedded
from safetensors.torch import load_file, safe_open
from tiny_model import make_tiny_model

from slime.utils.async_utils import run
from slime.utils.errors import RunStopped
from slime.utils.machine import shm
from slime.weight_sync.base import SenderOptions, check_receipt
from slime.weight_sync.transports import choose_transport, transport_of
from slime.wire.manifest import byte_checksum


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("sync") / "model")


@pytest.fixture(scope="module")
def state(model) -> dict[str, torch.Tensor]:
    return load_file(model / "model.safetensors")


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory):
    """(control of an engine process, what it says of itself, the run's prefix of shared memory)."""
    log = tmp_path_factory.mktemp("logs") / "engine.log"
    with served_by_embedded(model, log, await_weights=True) as engine:
        yield engine


@pytest.fixture(params=["shared_memory", "disk"])
def transport(request):
    return transport_of(request.param)


@pytest.fixture
def sender(transport, engine, model, tmp_path):
    made = transport.make_sender(SenderOptions(engine[2], tmp_path / "weights", str(model)))
    yield made
    made.close()


def changed(state: dict[str, torch.Tensor], by: float) -> dict[str, torch.Tensor]:
    return {name: tensor + by for name, tensor in state.items()}


def send(sender, state: dict[str, torch.Tensor], version: str):
    """The whole model in two buckets."""
    items = list(state.items())
    sender.send(items[: len(items) // 2])
    sender.send(items[len(items) // 2 :])
    return sender.finish(version)


def test_a_push_is_received_whole_and_compares_equal(transport, sender, engine, state):
    control, info, prefix = engine
    bundle = send(sender, changed(state, 0.25), "run:1")
    receipt = run(transport.deliver(bundle, control, info))
    check_receipt(bundle, receipt, control.url)
    assert receipt.version == run(control.version()) == "run:1"
    assert bundle.num_tensors == len(state)
    assert run(transport.compare(bundle, control, info, prefix)) == []


def test_perturbed_tensors_are_named_by_the_comparison(transport, sender, engine, state):
    control, info, prefix = engine
    run(transport.deliver(send(sender, state, "run:2"), control, info))
    other = dict(state)
    names = ["model.layers.0.self_attn.q_proj.weight", "model.norm.weight"]
    for name in names:
        other[name] = state[name].clone()
        other[name].view(-1)[-1] += 1e-6 + other[name].view(-1)[-1].abs() * 1e-3
    bundle = send(sender, other, "run:3")  # made, but not delivered
    assert sorted(run(transport.compare(bundle, control, info, prefix))) == sorted(names)


def test_an_engine_with_other_weights_is_caught_by_its_receipt(sender, transport, engine, state):
    control, info, _ = engine
    old = send(sender, state, "run:4")
    receipt = run(transport.deliver(old, control, info))
    new = send(sender, changed(state, 1.0), "run:5")
    with pytest.raises(
        RuntimeError, match=r"holds other weights than were pushed: version run:5 sent but run:4 loaded"
    ):
        check_receipt(new, receipt, control.url)


def test_a_checksum_that_differs_is_caught_although_the_version_agrees(engine, model, state, tmp_path):
    shared_memory = transport_of("shared_memory")
    sender = shared_memory.make_sender(SenderOptions(engine[2], tmp_path, str(model)))
    bundle = send(sender, state, "run:6")
    receipt = run(shared_memory.deliver(bundle, *engine[:2]))
    assert receipt.checksum == bundle.checksum
    with pytest.raises(RuntimeError, match=r"checksum \d+ sent but \d+ loaded"):
        check_receipt(bundle, replace(receipt, checksum=receipt.checksum ^ 1), "engine-0")
    sender.close()


def test_an_engine_that_comes_late_takes_the_bundle_while_the_next_is_written(
    transport, sender, engine, state
):
    control, info, prefix = engine
    current = send(sender, changed(state, 0.5), "run:7")
    items = list(changed(state, 2.0).items())
    sender.send(items[:5])  # the next version is on its way when an engine restarts
    check_receipt(current, run(transport.deliver(current, control, info)), control.url)
    assert run(transport.compare(current, control, info, prefix)) == []
    sender.send(items[5:])
    check_receipt(nxt := sender.finish("run:8"), run(transport.deliver(nxt, control, info)), control.url)


# ---- senders -----------------------------------------------------------------------------------------------


@pytest.fixture
def prefix():
    name = shm.make_prefix()
    yield name
    shm.unlink_prefix(name)


def options(prefix: str, folder: Path, model: str = "hub/name") -> SenderOptions:
    return SenderOptions(prefix, folder, model)


def segments(bundle) -> list[str]:
    return [bucket.segment for bucket in bundle.payload.buckets]


def is_whole(bundle) -> bool:
    found = [shm.open_segment(bucket.segment).buffer[: bucket.nbytes] for bucket in bundle.payload.buckets]
    return [byte_checksum(b) for b in found] == [bucket.checksum for bucket in bundle.payload.buckets]


def test_shared_memory_takes_turns_between_two_sets_of_segments(prefix, tmp_path):
    sender = transport_of("shared_memory").make_sender(options(prefix, tmp_path))
    bundles = [send(sender, {"a": torch.ones(8) * i, "b": torch.ones(9) * i}, f"run:{i}") for i in range(5)]
    assert segments(bundles[0]) == segments(bundles[2]) == segments(bundles[4])
    assert segments(bundles[1]) == segments(bundles[3])
    assert not set(segments(bundles[0])) & set(segments(bundles[1]))
    assert len(shm.list_segments(prefix)) == 4
    for bucket in (*bundles[4].payload.buckets, *bundles[3].payload.buckets):  # the last two are still whole
        assert byte_checksum(shm.open_segment(bucket.segment).buffer[: bucket.nbytes]) == bucket.checksum
    sender.close()
    assert shm.list_segments(prefix) == []


def test_a_segment_that_became_too_small_is_replaced_and_removed(prefix, tmp_path):
    sender = transport_of("shared_memory").make_sender(options(prefix, tmp_path))
    for version, size in enumerate((8, 8, 800, 800, 8)):
        bundle = send(sender, {"a": torch.ones(size), "b": torch.ones(size)}, f"run:{version}")
    assert bundle.nbytes == 2 * 32
    assert len(shm.list_segments(prefix)) == 4
    sender.close()


def test_the_disk_keeps_two_versions_that_can_be_read_back(prefix, tmp_path):
    sender = transport_of("disk").make_sender(options(prefix, tmp_path / "w"))
    for version in range(4):
        bundle = send(sender, {"a": torch.ones(2) * version, "b": torch.ones(3)}, f"run:{version}")
    assert sorted(p.name for p in (tmp_path / "w").iterdir()) == ["weights-run-2", "weights-run-3"]
    [file, _] = sorted(bundle.payload.glob("*.safetensors"))
    with safe_open(file, "pt") as opened:
        assert opened.get_tensor("a").tolist() == [3.0, 3.0]
    sender.close()
    assert list((tmp_path / "w").iterdir()) == []


def test_the_disk_shows_no_half_written_version_and_the_next_sender_clears_it(prefix, tmp_path):
    folder = tmp_path / "w"
    crashed = transport_of("disk").make_sender(options(prefix, folder))
    crashed.send([("a", torch.ones(2))])  # and never finishes
    assert [p.name for p in folder.iterdir()] == ["incoming.tmp"]
    sender = transport_of("disk").make_sender(options(prefix, folder))
    bundle = send(sender, {"b": torch.ones(1), "c": torch.ones(1)}, "run:1")
    assert [p.name for p in folder.iterdir()] == ["weights-run-1"]
    assert sorted(name for file in bundle.payload.glob("*.safetensors") for name in load_file(file)) == [
        "b",
        "c",
    ]
    sender.close()


def test_a_full_disk_ends_the_run_with_the_folder_and_leaves_the_version_before(prefix, tmp_path):
    """A fake full disk: no file of this process may pass a size."""
    sender = transport_of("disk").make_sender(options(prefix, tmp_path / "w"))
    first = send(sender, {"a": torch.ones(2), "b": torch.ones(3)}, "run:1")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(RunStopped, match=r"no room for weights in .*/w .*--update-weight-disk-dir"):
            send(sender, {"a": torch.ones(2000), "b": torch.ones(3)}, "run:2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert load_file(first.payload / "model-00001.safetensors")["a"].tolist() == [1.0, 1.0]
    sender.close()


# ---- which transport ---------------------------------------------------------------------------------------


def test_auto_takes_shared_memory_where_every_engine_does():
    assert choose_transport("auto", ["disk", "shared_memory"]) == "shared_memory"
    assert choose_transport("tensor", ["disk", "shared_memory"]) == "shared_memory"
    assert choose_transport("auto", ["disk"]) == "disk"


def test_a_transport_that_the_engines_do_not_take_is_refused_by_flag():
    assert choose_transport("disk", ["disk", "shared_memory"]) == "disk"
    with pytest.raises(
        ValueError, match=r"--update-weight-transport tensor needs .*'shared_memory'.*; these take disk"
    ):
        choose_transport("tensor", ["disk"])
    with pytest.raises(
        ValueError,
        match=r"--update-weight-transport auto needs engines that take .*; these take smoke_signals",
    ):
        choose_transport("auto", ["smoke_signals"])
