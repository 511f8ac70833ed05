"""Megatron with Adam's moments, and fp32 copies of weights, in host memory or in fewer bits."""

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_helpers import GRPO, exported, in_processes, make_family, megatron_args, train, training_step
from trainer_helpers import random_samples

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(1800)]
HOSTED = dict(optimizer_cpu_offload=True, overlap_cpu_optimizer_d2h_h2d=True)
SMALL = dict(exp_avg_dtype="bf16", exp_avg_sq_dtype="fp16")
WAYS = {"plain": {}, "hosted": HOSTED, "half": HOSTED | dict(optimizer_offload_fraction=0.5)}
SHARDED = (False, True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("placed")


@pytest.fixture(scope="module")
def model(folder):
    return make_family(folder / "qwen3", "qwen3")


def build(args, **place):
    """A trainer whose moments and copies leave their places between steps, as they do on a GPU."""
    from slime.backends.megatron import create_backend
    from slime.backends.megatron.optimizer import main_copies, members
    from slime.backends.shared import placed_adam

    placed_adam._PIECE = 1024
    backend = create_backend(args, **place)
    for member in members(backend.optimizer):
        if isinstance(member.optimizer, placed_adam.PlacedAdamW):
            member.optimizer._staged = True
            member.optimizer.park(main_copies(member))
            copies = args.dtype == "bfloat16" and args.optimizer_cpu_offload
            assert bool(member.optimizer.parked) == copies
            assert not any(p.untyped_storage().nbytes() for p in member.optimizer.parked)
    return backend


def settings(model, **changes):
    return megatron_args(model, **(GRPO | dict(optimizer="adam", lr=1e-3) | changes))


def train_each(rank, world_size, model, cases):
    return {
        name: train(build, settings(model, **case), rank, world_size)["after"] for name, case in cases.items()
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_host_memory_gives_the_same_bits(folder, model, dtype):
    cases = {
        f"{way} {sharded}": changes | dict(distopt=sharded, dtype=dtype)
        for way, changes in WAYS.items()
        for sharded in SHARDED
    }
    found = in_processes(2, train_each, folder, model, cases)
    for name, weights in found.items():
        expected = found["plain " + name.split()[1]]
        assert all(torch.equal(value, expected[key]) for key, value in weights.items()), name


def resume_each(rank, world_size, model, folder, cases):
    """Per case: what training goes on to, and what it comes to when it is resumed another way."""
    place = dict(rank=rank, world_size=world_size, device="cpu")
    found = {}
    for number, (before, after) in enumerate(cases):
        args = settings(model, **before)
        first = train(build, args, rank, world_size)["backend"]
        first.save(f"{folder}/{number}")
        changed = settings(model, **after)
        second = build(changed, **place)
        second.load(f"{folder}/{number}")
        results = []
        for backend, own in ((first, args), (second, changed)):
            training_step(backend, own, random_samples(5, 3, vocab=127, seed=1), 1).run()
            results.append(exported(backend))
        second.load_hf(model)  # weights from elsewhere: the copies follow, wherever they lie
        training_step(second, changed, random_samples(5, 3, vocab=127, seed=1), 2).run()
        moved = [exported(second)["lm_head.weight"], exported(first)["lm_head.weight"]]
        found[number] = results, bool((moved[0] - moved[1]).abs().max() > 1e-4)
    return found


def test_resume_is_exact_wherever_moments_and_copies_were(folder, model, tmp_path):
    ways = [({}, HOSTED), (HOSTED, {}), (SMALL, SMALL | HOSTED)]
    cases = [
        (before | dict(distopt=sharded, dtype=dtype), after | dict(distopt=sharded, dtype=dtype))
        for before, after in ways
        for sharded, dtype in ((False, "bfloat16"), (True, "bfloat16"), (True, "float32"))
    ]
    found = in_processes(1, resume_each, folder, model, str(tmp_path), cases)
    for number, ((went_on, resumed), changed) in found.items():
        same = all(torch.equal(resumed[name], value) for name, value in went_on.items())
        assert same and changed, cases[number]
