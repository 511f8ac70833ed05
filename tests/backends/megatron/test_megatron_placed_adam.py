"""Megatron with Adam's moments in host memory or in fewer bits: the same steps, resume either way, sleep."""

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_helpers import GRPO, in_processes, make_family, megatron_args, save_and_resume, train

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(1800)]
HOSTED = dict(optimizer_cpu_offload=True, overlap_cpu_optimizer_d2h_h2d=True)
SMALL = dict(use_precision_aware_optimizer=True, exp_avg_dtype="bf16", exp_avg_sq_dtype="fp16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("placed")


@pytest.fixture(scope="module")
def model(folder):
    return make_family(folder / "qwen3", "qwen3")


def train_each(rank, world_size, model, cases):
    """Weights after three steps, with moments that pass through a second place as they do on a GPU."""
    from slime.backends.megatron import create_backend
    from slime.backends.megatron.optimizer import members
    from slime.backends.shared import placed_adam

    placed_adam._PIECE = 1024

    def build(args, **place):
        backend = create_backend(args, **place)
        for member in members(backend.optimizer):
            member.optimizer._staged = True
        return backend

    settings = GRPO | dict(optimizer="adam", lr=1e-3)
    return {
        name: train(build, megatron_args(model, **(settings | case)), rank, world_size)["after"]
        for name, case in cases.items()
    }


def test_moments_in_host_memory_give_the_same_bits(folder, model):
    ways = {"plain": {}, "hosted": HOSTED, "half": HOSTED | dict(optimizer_offload_fraction=0.5)}
    cases = {
        f"{way} {sharded}": how | dict(distopt=sharded) for way, how in ways.items() for sharded in (0, 1)
    }
    found = in_processes(2, train_each, folder, model, cases)
    for name, weights in found.items():
        expected = found["plain " + name.split()[1]]
        assert all(torch.equal(value, expected[key]) for key, value in weights.items()), name


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("before", "after"), [({}, HOSTED), (HOSTED, {}), (SMALL, SMALL | HOSTED)])
def test_resume_is_exact_wherever_the_moments_were(folder, model, tmp_path, sharded, before, after):
    ways = before | dict(distopt=sharded), after | dict(distopt=sharded)
    found = in_processes(1, save_and_resume, folder, model, str(tmp_path / "ckpt"), *ways)
    assert found["resumed"]["steps"] == found["went on"]["steps"]
    for name, tensor in found["went on"]["weights"].items():
        assert torch.equal(found["resumed"]["weights"][name], tensor), name
