"""Adam's moments in host memory and in fewer bits: the same steps, what rounding does, resume, sleep."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from trainer_helpers import (
    backend_of,
    init_process_group,
    meeting_point,
    random_samples,
    train,
    trainer_args,
    weights_of,
)

from slime.backends.fsdp import create_backend
from slime.backends.shared import placed_adam
from slime.backends.shared.host_memory import HostMemory
from slime.backends.shared.moment_formats import BLOCK, FORMATS, pack, unpack
from slime.backends.shared.placed_adam import MomentPlan, PlacedAdamW
from slime.batch.convert import samples_to_batch
from slime.batch.split import split_for_ranks
from slime.step.training_step import TrainingStep

HOSTED = dict(optimizer_cpu_offload=True)
SMALL = dict(exp_avg_dtype="fp8", exp_avg_sq_dtype="bf16")
SETTINGS = dict(lr=1e-2, betas=(0.9, 0.99), eps=1e-8)


def parameters():
    torch.manual_seed(0)
    sizes = [(70, 33), (5,), (300, 11), (0,)]
    return [nn.Parameter(torch.randn(size)) for size in sizes]


def take_steps(optimizer, parameters, count=5, start=0):
    for step in range(start, start + count):
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 0.1
        optimizer.step()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch, request):
    monkeypatch.setattr(placed_adam, "_PIECE", (64 if "trainer" in request.fixturenames else 2) * BLOCK)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("overlap", [False, True])
def test_moments_in_host_memory_give_the_same_bits(staged, share, overlap):
    theirs, ours = parameters(), parameters()
    reference = torch.optim.AdamW([{"params": theirs, "weight_decay": 0.1}], fused=True, **SETTINGS)
    plan = MomentPlan(host_share=share, overlap=overlap)
    optimizer = PlacedAdamW([{"params": ours, "weight_decay": 0.1}], plan, staged=staged, **SETTINGS)
    assert (len(optimizer.hosted) == 4) == (share == 1)
    take_steps(reference, theirs)
    take_steps(optimizer, ours)
    for a, b in zip(theirs[:3], ours, strict=False):
        assert torch.equal(a, b)
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(reference.state[a][name], optimizer.state[b][name])


def plain_adam(weights, moments, gradients, step):
    """One AdamW step in float64, number by number."""
    for i, gradient in enumerate(gradients):
        first, second = moments[i]
        first, second = 0.9 * first + 0.1 * gradient, 0.99 * second + 0.01 * gradient**2
        update = (first / (1 - 0.9**step)) / ((second / (1 - 0.99**step)) ** 0.5 + 1e-8)
        weights[i] -= 1e-2 * update
        moments[i] = (first, second)


@pytest.mark.parametrize(("name", "tolerance"), [("bf16", 0.02), ("fp16", 0.003), ("fp8", 0.3)])
def test_low_precision_follows_plain_adam(name, tolerance):
    """An obvious Adam in float64 beside it: weights stay within what the rounding of moments explains."""
    parameter = nn.Parameter(torch.linspace(-1, 1, 600))
    plan = MomentPlan(host_share=1.0, formats=(name, name))
    optimizer = PlacedAdamW([{"params": [parameter], "weight_decay": 0.0}], plan, staged=True, **SETTINGS)
    weights, moments = parameter.double().tolist(), [(0.0, 0.0)] * 600
    for step in range(1, 21):
        generator = torch.Generator().manual_seed(step)
        parameter.grad = torch.randn(600, generator=generator) + 0.5
        plain_adam(weights, moments, parameter.grad.double().tolist(), step)
        optimizer.step()
    wanted = torch.tensor(weights)
    moved = (wanted - torch.linspace(-1, 1, 600)).norm()
    assert 0 < (parameter.detach() - wanted).norm() / moved < tolerance
    state = optimizer.state[parameter]
    assert state["exp_avg"].dtype == FORMATS[name].dtype
    second = unpack([state[k] for k in ("exp_avg_sq", "exp_avg_sq_scales") if k in state], second=True)
    torch.testing.assert_close(second, torch.tensor([b for _, b in moments]), rtol=10 * tolerance, atol=1e-3)


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("second", [False, True])
def test_rounding_is_to_a_neighbour_and_right_on_average(name, second):
    kept, generator = FORMATS[name], torch.Generator().manual_seed(0)
    values = torch.randn(700, generator=generator) * torch.logspace(-3, 3, 700)
    values = values.square() if second else values
    drawn = [
        unpack(pack(values, kept, second=second, generator=generator), second=second) for _ in range(300)
    ]
    step = 2.0**-kept.mantissa * (2 if second and kept.top else 1)
    assert all(bool(((d - values).abs() <= 1.1 * step * values.abs() + 1e-4).all()) for d in drawn)
    mean = torch.stack(drawn).double().mean(0)
    assert float(((mean - values) / values)[350:].abs().mean()) < step / 10


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("second", [False, True])
def test_what_was_rounded_once_is_never_rounded_again(name, second):
    kept, generator = FORMATS[name], torch.Generator().manual_seed(0)
    for scale in (1e-12, 1.0, 1e6):
        values = torch.randn(1000, generator=generator).exp() * scale * torch.logspace(-6, 0, 1000)
        values[::7] = 0.0
        once = unpack(pack(values, kept, second=second, generator=generator), second=second)
        assert bool((once[::7] == 0).all()) and bool((once[values > 0] > 0).all() or not second)
        for _ in range(3):
            assert torch.equal(
                unpack(pack(once, kept, second=second, generator=generator), second=second), once
            )


def test_a_second_moment_that_decays_does_not_stand_still():
    """To the nearest, 0.999 of a bf16 number is that number."""
    kept, generator = FORMATS["bf16"], torch.Generator().manual_seed(0)
    values = torch.ones(4096)
    for _ in range(1000):
        values = unpack(pack(values * 0.999, kept, second=True, generator=generator), second=True)
    assert float(values.mean()) == pytest.approx(0.999**1000, rel=0.05)


def test_moments_on_the_device_move_and_those_in_host_memory_stay():
    ours = parameters()
    optimizer = PlacedAdamW([{"params": ours, "weight_decay": 0.0}], MomentPlan(host_share=0.3), **SETTINGS)
    take_steps(optimizer, ours, 1)
    asked = []

    class Recorder(HostMemory):
        def move(self, key, tensor, place):
            asked.append(key)
            return tensor

    optimizer.move(torch.device("cuda"), Recorder())
    assert {key[0] for key in asked} == set(ours[1:3])
    assert {key[1] for key in asked} == {"exp_avg", "exp_avg_sq"}


# -- the trainer ---------------------------------------------------------------------------------------------


@pytest.fixture
def trainer(model, process_group):
    def build(**changes):
        args = trainer_args(model, micro_batch_size=4, **changes)
        backend = backend_of(args)
        if isinstance(backend.optimizer, PlacedAdamW):
            backend.optimizer._staged = True
        return backend, args

    return build


def same_weights(a, b):
    theirs = weights_of(b)
    return all(torch.equal(value, theirs[name]) for name, value in weights_of(a).items())


def test_a_trainer_with_moments_in_host_memory_takes_the_same_steps(trainer):
    (plain, args), (hosted, _) = trainer(), trainer(**HOSTED, overlap_cpu_optimizer_d2h_h2d=True)
    for rollout_id in range(2):
        norms = [train(b, args, rollout_id=rollout_id)["train/grad_norm"] for b in (plain, hosted)]
        assert norms[0] == norms[1]
    assert len(hosted.optimizer.hosted) == len(list(hosted.model.parameters()))
    assert same_weights(plain, hosted)


@pytest.mark.parametrize(
    ("before", "after"),
    [({}, HOSTED), pytest.param(HOSTED, {}, marks=pytest.mark.slow), (SMALL | HOSTED, SMALL)],
)
def test_resume_is_exact_wherever_the_moments_were(trainer, tmp_path, before, after):
    first, args = trainer(**before)
    train(first, args)
    first.save(tmp_path / "ckpt")
    second, _ = trainer(**after)
    second.load(tmp_path / "ckpt")
    for backend in (first, second):
        train(backend, args, rollout_id=1)
    assert same_weights(first, second) and first.step == second.step == 2
    moments = [{n: s["exp_avg"] for n, s in enumerate(b.optimizer.state.values())} for b in (first, second)]
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(*(m.values() for m in moments), strict=True))


def test_a_checkpoint_of_fp32_moments_is_rounded_when_it_is_read_in_fewer_bits(trainer, tmp_path):
    first, args = trainer()
    train(first, args)
    first.save(tmp_path / "ckpt")
    second, _ = trainer(**SMALL)
    second.load(tmp_path / "ckpt")
    pairs = zip(first.optimizer.state.values(), second.optimizer.state.values(), strict=True)
    for plain, small in pairs:
        assert small["exp_avg_sq"].dtype == torch.bfloat16
        torch.testing.assert_close(small["exp_avg_sq"].float(), plain["exp_avg_sq"], rtol=0.01, atol=0)
    second.reset_optimizer()
    assert train(second, args)["train/grad_norm"] > 0


def _two_ranks(rank, address, folder, model):
    """Shards of both ranks: the same steps wherever moments are, and a checkpoint that either way reads."""
    torch.set_num_threads(1)
    init_process_group(rank, 2, address)
    found = {}
    for name, changes in {"plain": {}, "hosted": HOSTED, "small": SMALL | HOSTED}.items():
        args = trainer_args(model, micro_batch_size=4, **changes)
        backend = create_backend(args, rank=rank, world_size=2, device="cpu")
        batch = split_for_ranks(args, samples_to_batch(args, random_samples(2, 4)), 2)[rank]
        TrainingStep(backend, args, 0, batch).run()
        backend.save(folder / name)
        TrainingStep(backend, args, 1, batch).run()
        found[name] = weights_of(backend)
        other = args.replace(optimizer_cpu_offload=not args.optimizer_cpu_offload)
        resumed = create_backend(other, rank=rank, world_size=2, device="cpu")
        resumed.load(folder / name)
        TrainingStep(resumed, other, 1, batch).run()
        found[f"{name}, resumed"] = weights_of(resumed)
    if rank == 0:
        torch.save(found, folder / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_shards_of_two_ranks_have_moments_in_host_memory(model, tmp_path):
    mp.spawn(_two_ranks, (meeting_point(), tmp_path, model), nprocs=2)
    found = torch.load(tmp_path / "found.pt")
    pairs = [("plain", "hosted"), *((name, f"{name}, resumed") for name in ("plain", "hosted", "small"))]
    for one, other in pairs:
        assert all(torch.equal(found[one][name], value) for name, value in found[other].items()), (one, other)
