"""A model whose checkpoint is FP8: the trainer reads its values, and engines get FP8 again."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from engine_under_test import largest_difference, load_model, plain_log_probs, served_by_embedded
from safetensors.torch import load_file, save_file
from tiny_model import make_tiny_model
from trainer_helpers import init_process_group, trainer_args

from slime.backends.fsdp import create_backend
from slime.cluster.training.rank_sender import RankSender
from slime.engines.embedded.runner import ModelRunner
from slime.engines.embedded.weight_update import DiskSource, WeightStore
from slime.utils.async_utils import run
from slime.utils.models.fp8_blocks import FP8, dequantize_blocks
from slime.weight_sync.base import SenderOptions, check_receipt
from slime.weight_sync.fp8 import checkpoint_format, quantize_state
from slime.weight_sync.transports import transport_of
from slime.wire.client import EngineClient
from slime.wire.protocol import GenerateRequest, SamplingParams

CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 16]}
PROMPT = [5, 9, 20, 33]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("fp8") / "plain", init_std=0.2)


@pytest.fixture(scope="module")
def model(plain) -> Path:
    """The same model as an FP8 checkpoint; blocks that its matrices hold several of."""
    folder = plain.with_name("fp8")
    shutil.copytree(plain, folder)
    tensors = dict(quantize_state(load_file(plain / "model.safetensors").items(), CONFIG))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": CONFIG}))
    return folder


@pytest.fixture(scope="module")
def meant(model) -> dict[str, torch.Tensor]:
    """What the checkpoint stands for."""
    held, block = load_file(model / "model.safetensors"), tuple(CONFIG["weight_block_size"])
    return {
        name: dequantize_blocks(t, held[name + "_scale_inv"], block, torch.float32) if t.dtype == FP8 else t
        for name, t in held.items()
        if not name.endswith("_scale_inv")
    }


@pytest.fixture(scope="module")
def backend(model):
    init_process_group()
    yield create_backend(trainer_args(model), rank=0, world_size=1, device="cpu")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory):
    log = tmp_path_factory.mktemp("logs") / "engine.log"
    with served_by_embedded(model, log) as (control, _, prefix):
        yield control, prefix


def sent_by(backend, model: Path) -> list[list]:
    """The buckets as a trainer rank sends them to engines of that checkpoint."""
    sender = RankSender.__new__(RankSender)
    topology = SimpleNamespace(policy=SimpleNamespace(model_path=str(model)))
    flags = dict(rollout_quantization="none", rollout_engine="embedded", fp8_rounding="nearest")
    sender._args = SimpleNamespace(engine_topology=topology, **flags)
    sender._backend, sender._content = backend, "model"
    sender._quantization, sender._convert = sender._conversion()
    return [sender._in_engine_format(bucket) for bucket in sender._stream(None)]


def said(url: str):
    request = GenerateRequest(PROMPT, SamplingParams(temperature=1.0, max_new_tokens=16, ignore_eos=True))
    return run(EngineClient(url, timeout_s=60, max_retries=0).generate(request))


def test_the_trainer_reads_the_weights_that_an_fp8_checkpoint_stands_for(backend, meant):
    exported = {name: tensor.clone() for bucket in backend.export() for name, tensor in bucket}
    torch.testing.assert_close(exported, meant, rtol=0, atol=0)


def test_an_untrained_model_leaves_as_the_bytes_of_its_checkpoint(backend, model):
    held = load_file(model / "model.safetensors")
    sent = {name: tensor for bucket in sent_by(backend, model) for name, tensor in bucket}
    assert sent.keys() == held.keys()
    for name, tensor in sent.items():
        assert tensor.dtype == held[name].dtype
        if tensor.dtype == FP8:
            assert torch.equal(tensor.view(torch.uint8), held[name].view(torch.uint8)), name
        else:
            torch.testing.assert_close(tensor, held[name], rtol=1e-6, atol=0)


def test_the_engine_serves_and_takes_fp8_and_says_what_it_stands_for(
    engine, backend, model, plain, meant, tmp_path
):
    control, prefix = engine
    reference = load_model(plain)
    reference.load_state_dict(meant, strict=False)
    answer = said(control.url)
    assert largest_difference(plain_log_probs(reference, PROMPT, answer.ids), answer.log_probs) < 1e-4
    # It is not the model that was quantised.
    assert largest_difference(plain_log_probs(load_model(plain), PROMPT, answer.ids), answer.log_probs) > 1e-3
    changed = {
        name: tensor + 0.05 * torch.sin(torch.arange(tensor.numel()).float()).view(tensor.shape)
        for name, tensor in meant.items()
    }
    transport = transport_of("shared_memory")
    sender = transport.make_sender(SenderOptions(prefix, tmp_path, str(model)))
    sender.send(list(quantize_state(changed.items(), CONFIG)))
    bundle = sender.finish("run:1")
    info = run(control.info())
    check_receipt(bundle, run(transport.deliver(bundle, control, info)), control.url)
    assert run(transport.compare(bundle, control, info, prefix)) == []
    pushed, block = dict(quantize_state(changed.items(), CONFIG)), tuple(CONFIG["weight_block_size"])
    state = {
        name: dequantize_blocks(t, pushed[name + "_scale_inv"], block, torch.float32) if t.dtype == FP8 else t
        for name, t in pushed.items()
        if not name.endswith("_scale_inv")
    }
    reference.load_state_dict(state, strict=False)
    answer = said(control.url)
    assert answer.weight_version == "run:1"
    assert largest_difference(plain_log_probs(reference, PROMPT, answer.ids), answer.log_probs) < 1e-4
    sender.close()


def test_a_saved_model_says_nothing_of_a_quantisation_that_it_has_not(backend, meant, tmp_path):
    backend.save_hf(tmp_path / "out", torch.float32)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    torch.testing.assert_close(load_file(tmp_path / "out" / "model.safetensors"), meant, rtol=0, atol=0)


def test_engines_of_a_plain_checkpoint_get_plain_weights(backend, plain):
    assert all(t.dtype == torch.float32 for bucket in sent_by(backend, plain) for _, t in bucket)


def test_an_engine_of_a_16_bit_checkpoint_takes_fp8_where_it_is_told_to(plain, tmp_path):
    """What --rollout-quantization fp8 starts; a push with one factor changed is found by the comparison."""
    runner = ModelRunner(
        str(plain), device="cpu", dtype="float32", max_running=1, max_total_tokens=64, fp8_block=(32, 16)
    )
    pushed = dict(quantize_state(load_file(plain / "model.safetensors").items(), CONFIG))
    assert any(tensor.dtype == FP8 for tensor in pushed.values())
    store = WeightStore(runner.model, runner.fp8_block)
    save_file(pushed, tmp_path / "model.safetensors")
    store.check(source := DiskSource(str(tmp_path)))
    store.apply(source)
    assert store.differing(DiskSource(str(tmp_path))) == []
    name = next(name for name in pushed if name.endswith("_scale_inv"))
    save_file({**pushed, name: pushed[name] * 1.01}, tmp_path / "model.safetensors")
    assert store.differing(DiskSource(str(tmp_path))) == [name.removesuffix("_scale_inv")]


def test_the_copy_of_a_16_bit_checkpoint_in_fp8_says_so(plain, tmp_path):
    sender = transport_of("disk").make_sender(
        SenderOptions("slime-x", tmp_path, str(plain), quantization=CONFIG)
    )
    sender.send(list(quantize_state(load_file(plain / "model.safetensors").items(), CONFIG)))
    folder = sender.finish("run:1").payload
    assert checkpoint_format(folder).block == (32, 16)
    sender.close()
