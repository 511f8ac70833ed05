"""Decoding from the pages where they lie, in passes of fixed shapes, makes what padded copies make."""

import random

import pytest
import torch
from tiny_model import make_tiny_model

from slime.engines.embedded.attention import attend_to_copies
from slime.engines.embedded.engine import Engine
from slime.engines.embedded.graphs import bucket_of, decides_on_host
from slime.engines.embedded.norms import fuse_norms
from slime.engines.embedded.runner import ModelRunner
from slime.engines.embedded.sequence import Sequence
from slime.engines.embedded.text import Detokenizer
from slime.engines.embedded.weight_update import DiskSource
from slime.wire.protocol import SamplingParams

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), context=256, init_std=0.2)


def make_engine(folder, *, device: str, paged: bool, max_total_tokens=4096, max_running=8) -> Engine:
    runner = ModelRunner(
        str(folder),
        device=device,
        dtype="float32",
        max_running=max_running,
        max_total_tokens=max_total_tokens,
        paged=paged,
    )
    return Engine(runner, Detokenizer.load(str(folder)), max_running=max_running)


def make_requests(count: int) -> list[Sequence]:
    rng = random.Random(0)
    made = []
    for index in range(count):
        prompt = [rng.randrange(4, 100) for _ in range(rng.randint(1, 60))]
        new = rng.randint(1, 60)
        params = SamplingParams(max_new_tokens=new, ignore_eos=True)
        made.append(Sequence(str(index), prompt, params, index, max_new_tokens=new, stop_ids=frozenset()))
    return made


def run_all(engine: Engine, count: int) -> list[Sequence]:
    sequences = make_requests(count)
    for sequence in sequences:
        engine.add(sequence)
    while engine.scheduler.has_work:
        engine.step()
    assert all(s.finish["type"] == "length" for s in sequences), [s.finish for s in sequences]
    return sequences


def assert_same(made: list[Sequence], expected: list[Sequence]) -> None:
    assert [s.output for s in made] == [s.output for s in expected]
    for one, other in zip(made, expected, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("max_total_tokens", [pytest.param(4096, marks=pytest.mark.slow), 192])
def test_recorded_passes_make_the_tokens_of_padded_ones(folder, device, max_total_tokens):
    plain = make_engine(folder, device=device, paged=False, max_total_tokens=max_total_tokens)
    paged = make_engine(folder, device=device, paged=True, max_total_tokens=max_total_tokens)
    assert_same(run_all(paged, 20), run_all(plain, 20))
    assert paged.runner._graphs is not None and 4 in paged.runner._graphs._replays
    assert plain.runner._graphs is None


@pytest.mark.parametrize("device", DEVICES)
def test_new_weights_and_memory_given_back_reach_recorded_passes(folder, device, tmp_path):
    other = make_tiny_model(tmp_path / "other", context=256, init_std=0.2, seed=1)
    engine = make_engine(folder, device=device, paged=True)
    before = run_all(engine, 6)
    engine.update_weights(DiskSource(other), "1")
    expected = run_all(make_engine(other, device=device, paged=False), 6)
    assert_same(run_all(engine, 6), expected)
    engine.release(("weights", "kv_cache"))
    assert engine.runner._graphs is None
    engine.restore(("weights", "kv_cache"))
    assert_same(run_all(engine, 6), expected)
    assert [s.output for s in before] != [s.output for s in expected]


def test_a_batch_is_padded_to_the_next_power_of_two():
    assert [bucket_of(count) for count in (1, 2, 3, 5, 64, 65)] == [1, 2, 4, 8, 64, 128]


def test_models_that_decide_on_the_host_are_not_recorded():
    from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

    stretched = LlamaConfig(rope_scaling={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    assert decides_on_host(Qwen3MoeConfig()) and decides_on_host(stretched)
    assert not decides_on_host(Qwen3Config()) and not decides_on_host(LlamaConfig())


def pages(device, dtype, *, count, kv_heads=2, group=2, key_dim=16, value_dim=16, longest=100):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    lengths = torch.randint(1, longest + 1, (count,), generator=generator, dtype=torch.int32)
    lengths[0] = longest
    width = -(-longest // 16)
    order = torch.randperm(count * width, generator=generator) + 1
    rows = (count * width + 1) * 16
    return (
        normal(count, kv_heads * group, key_dim),
        normal(rows, kv_heads, key_dim),
        normal(rows, kv_heads, value_dim),
        order.view(count, width).int().to(device),
        lengths.to(device),
    )


def plain_norm(hidden, weight, epsilon):
    scaled = hidden.float() * torch.rsqrt(hidden.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * scaled.to(hidden.dtype)


def test_norms_that_compute_something_else_are_left_alone(folder):
    from transformers import AutoModelForCausalLM

    model, tokens = AutoModelForCausalLM.from_pretrained(folder), torch.tensor([[3, 1, 4]])
    expected = model(tokens).logits
    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]
    assert fuse_norms(model, lambda hidden, weight, epsilon: hidden * (1 + weight)) == 0
    assert fuse_norms(model, plain_norm) == len(norms) > 0
    torch.testing.assert_close(model(tokens).logits, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_normalizes_as_plain_code_does(dtype):
    from slime.engines.embedded.decode_kernels import rms_norm

    hidden, weight = (
        torch.randn(2, 5, 96, device="cuda", dtype=dtype),
        torch.rand(96, device="cuda").to(dtype),
    )
    torch.testing.assert_close(rms_norm(hidden, weight, 1e-6), plain_norm(hidden, weight, 1e-6))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [
    dict(count=1, longest=700),
    dict(count=3, longest=5),
    dict(count=64, kv_heads=8, key_dim=128, value_dim=128, longest=300),
    dict(count=5, kv_heads=1, group=7, key_dim=80, value_dim=48, longest=333),
])  # fmt: skip
def test_the_kernel_attends_as_copies_do(shape):
    from slime.engines.embedded.decode_kernels import paged_decode

    inputs = pages("cuda", torch.float32, **shape)
    expected = attend_to_copies(*(x.cpu() for x in inputs), 16, 0.3)
    made = paged_decode(*inputs, 16, 0.3)
    torch.testing.assert_close(made.cpu(), expected, atol=1e-4, rtol=1e-4)
    half = [x.bfloat16() if x.is_floating_point() else x for x in inputs]
    made = paged_decode(*half, 16, 0.3)
    assert (made.cpu().float() - expected).norm() < 0.02 * expected.norm()
