"""The first push to real SGLang servers, proven by what they had loaded: no files, whatever came wrong."""

import pytest
import torch
from devices import CLOSE
from engine_under_test import EngineUnderTest, largest_difference, plain_log_probs

from slime.utils.async_utils import run
from slime.utils.machine import shm
from slime.weight_sync.base import SenderOptions
from slime.weight_sync.distributed import DistributedSender
from slime.weight_sync.transports import transport_of
from slime.wire.control import EngineControl

pytestmark = pytest.mark.sglang
PROMPT = [10, 20, 30, 40, 50]


@pytest.fixture
def first(sglang_pair, tiny_folder, monkeypatch):
    """(fleet, its weights, who was evicted and why): as if nothing had been pushed yet; nobody is killed."""
    fleet, weights = sglang_pair
    evicted: dict[str, str] = {}
    for name, value in (("_num_pushes", 0), ("bundle", None)):
        monkeypatch.setattr(weights, name, value)
    monkeypatch.setattr(fleet, "evict", lambda url, cause: evicted.setdefault(url, str(cause)))
    for url in fleet.urls:
        run(EngineControl(url).update_from_disk(str(tiny_folder), "default"))
    yield fleet, weights, evicted
    for url in fleet.urls:
        run(EngineControl(url).update_from_disk(str(tiny_folder), "default"))
        run(EngineControl(url).resume())


@pytest.fixture
def options(tiny_folder, tmp_path):
    made = SenderOptions(shm.make_prefix(), tmp_path / "weights", str(tiny_folder))
    yield made
    shm.unlink_prefix(made.shm_prefix)


@pytest.fixture
def loads(monkeypatch):
    """Folders that servers loaded after the push."""
    folders, load = [], EngineControl.update_from_disk

    async def counted(control, path, version):
        folders.append(path)
        return await load(control, path, version)

    monkeypatch.setattr(EngineControl, "update_from_disk", counted)
    return folders


def bundle_of(options, weights: dict[str, torch.Tensor]):
    sender = transport_of("http_tensor").make_sender(options)
    items = list(weights.items())
    for bucket in (items[: len(items) // 2], items[len(items) // 2 :]):
        sender.send(bucket)
    return sender, sender.finish("run:1")


def assert_serves(url: str, model, folder) -> None:
    made = EngineUnderTest(url, folder, None, "").generate(PROMPT, max_new_tokens=30, ignore_eos=True)
    assert made.weight_version == "run:1"
    assert largest_difference(made.log_probs, plain_log_probs(model, PROMPT, made.ids)) < CLOSE


def test_a_bundle_restores_all_that_was_overwritten(first, options, old_model, tiny_folder, loads):
    fleet, weights, evicted = first
    weights.note_loaded()
    sender, bundle = bundle_of(options, old_model.state_dict())
    assert weights.receive(bundle)["perf/engines_evicted"] == 0 and evicted == {} and loads == []
    for url in fleet.urls:
        assert_serves(url, old_model, tiny_folder)
    sender.close()


def test_a_live_push_restores_all_that_was_overwritten(first, options, old_model, tiny_folder, loads):
    fleet, weights, evicted = first
    weights.note_loaded()
    loaded = [run(EngineControl(url).checksums()) for url in fleet.urls]
    live, targets = DistributedSender(options), weights.begin_live()
    noise = [run(EngineControl(url).checksums()) for url in fleet.urls]
    assert all(
        before[name] != after[name] for before, after in zip(loaded, noise, strict=True) for name in before
    )
    live.open("run:1", targets)
    live.send(list(old_model.state_dict().items()))
    weights.finish_live("run:1", targets, live.finish())
    sender, bundle = bundle_of(options, old_model.state_dict())
    assert weights.receive(bundle)["perf/engines_evicted"] == 0 and evicted == {} and loads == []
    for url in fleet.urls:
        assert_serves(url, old_model, tiny_folder)
    sender.close()
    live.close()


@pytest.mark.parametrize("fault", ["wrong", "missing", "part of a fused one missing"])
def test_a_bundle_with_a_fault_is_noticed_and_the_tensor_named(first, options, old_model, loads, fault):
    fleet, weights, evicted = first
    weights.note_loaded()
    sent = dict(old_model.state_dict())
    name, held = next(
        (name, f"0:{name}") for name in sent if name.endswith("layers.1.post_attention_layernorm.weight")
    )
    if fault == "wrong":
        sent[name] = sent[name] + 0.1  # also another number in bf16
    if fault == "missing":
        del sent[name]
    if fault == "part of a fused one missing":
        del sent[next(name for name in sent if name.endswith("layers.1.self_attn.v_proj.weight"))]
        held = "0:model.layers.1.self_attn.qkv_proj.weight"
    sender, bundle = bundle_of(options, sent)
    weights.receive(bundle)
    assert set(evicted) == set(fleet.urls) and all(held in why for why in evicted.values())
    sender.close()


def test_a_trainer_with_other_weights_is_compared_with_files(first, options, new_model, new_folder, loads):
    """As after a checkpoint: nothing is noted, nothing overwritten."""
    fleet, weights, evicted = first
    sender, bundle = bundle_of(options, new_model.state_dict())
    assert weights.receive(bundle)["perf/engines_evicted"] == 0 and evicted == {} and len(loads) == 1
    for url in fleet.urls:
        assert_serves(url, new_model, new_folder)
    sender.close()
