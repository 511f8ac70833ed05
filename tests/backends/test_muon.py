"""--optimizer muon: steps of torch's Muon and AdamW on one rank, and the same weights on sharded ranks."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from argument_helpers import parse
from devices import DEVICE
from tiny_model import make_tiny_model
from torch import nn
from trainer_helpers import init_process_group, meeting_point, random_samples, trainer_args

from slime.backends.fsdp import create_backend, loading
from slime.backends.fsdp.backend import build_optimizer
from slime.backends.fsdp.model import gather_full
from slime.backends.fsdp.muon import Muon
from slime.batch.convert import samples_to_batch
from slime.batch.split import split_for_ranks
from slime.step.training_step import TrainingStep


def slow_direction(update):
    """Newton-Schulz in float64: odd polynomials of the matrix that push its singular values towards 1."""
    x = update.double() / update.double().norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return x


def test_a_step_is_that_of_torch_and_of_the_definition():
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.randn(12, 20)) for _ in range(2))
    theirs.data.copy_(ours.data)
    slow, kept = ours.detach().double().clone(), torch.zeros(12, 20, dtype=torch.float64)
    group = {"params": [ours], "weight_decay": 0.1}
    muon = Muon(group, [], lr=0.02)
    torchs = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        gradient = torch.randn(12, 20)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        muon.step()
        torchs.step()
        kept = 0.95 * kept + 0.05 * gradient.double()
        direction = slow_direction(0.05 * gradient.double() + 0.95 * kept)
        slow = slow * (1 - 0.02 * 0.1) - 0.02 * 0.2 * 20**0.5 * direction
    assert torch.equal(ours, theirs)
    # torch multiplies in bfloat16, which the step of 0.018 per number shows in its third digit.
    torch.testing.assert_close(ours.double(), slow, rtol=0, atol=1.5e-3)


def test_experts_are_orthogonalised_one_by_one():
    torch.manual_seed(0)
    stacked = nn.Parameter(torch.randn(3, 8, 4))
    single = [nn.Parameter(part.clone()) for part in stacked.data]
    stacked.grad = torch.randn(3, 8, 4)
    for parameter, gradient in zip(single, stacked.grad, strict=True):
        parameter.grad = gradient.clone()
    for parameters in ([stacked], single):
        Muon({"params": parameters, "weight_decay": 0.1}, [], lr=0.02).step()
    assert torch.equal(stacked, torch.stack(single))


def test_adam_updates_embeddings_head_and_vectors(tmp_path):
    model = make_tiny_model(tmp_path / "tiny")
    lm = loading.empty_model(model)
    optimizer = build_optimizer(trainer_args(model, optimizer="muon"), lm)
    by_muon = {id(parameter) for parameter in optimizer.matrices["params"]}
    for name, parameter in lm.named_parameters():
        assert (id(parameter) in by_muon) == name.endswith("proj.weight"), name


def work(rank, world_size, address, folder, model):
    if world_size > 1:
        torch.set_num_threads(1)
    init_process_group(rank, world_size, address)
    args = trainer_args(model, optimizer="muon", lr=0.02, micro_batch_size=4)
    samples = random_samples(4, 3)
    backend = create_backend(args, rank=rank, world_size=world_size, device=DEVICE)
    data = split_for_ranks(args, samples_to_batch(args, samples), world_size)[rank]
    TrainingStep(backend, args, 0, copy.deepcopy(data)).run()
    backend.save(folder / f"saved_{world_size}")
    if world_size > 1:  # the moments of one rank, read by several
        backend.load(folder / "saved_1")
    TrainingStep(backend, args, 1, data).run()
    weights = {n: gather_full(p.data).cpu().clone() for n, p in backend.model.lm.named_parameters()}
    if rank == 0:
        torch.save(weights, folder / f"weights_{world_size}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_sharded_ranks_take_the_steps_of_one(tmp_path):
    model = make_tiny_model(tmp_path / "tiny")
    work(0, 1, meeting_point(), tmp_path, model)
    mp.spawn(work, args=(2, meeting_point(), tmp_path, model), nprocs=2, join=True)
    one, two = (torch.load(tmp_path / f"weights_{n}.pt") for n in (1, 2))
    for name, value in one.items():
        # Gradients of other sums differ in the last bits, and bfloat16 products round these up now and then.
        torch.testing.assert_close(two[name], value, rtol=0, atol=3e-4, msg=name)


def test_trainers_without_whole_matrices_are_refused():
    with pytest.raises(ValueError, match="--optimizer muon with --train-backend megatron"):
        parse("--optimizer", "muon", "--train-backend", "megatron")
    with pytest.raises(ValueError, match="--optimizer muon with --fsdp-cpu-offload"):
        parse("--optimizer", "muon", "--fsdp-cpu-offload")
    for layout in ("--tensor-model-parallel-size", "--fsdp-shard-size"):
        with pytest.raises(ValueError, match=f"--optimizer muon with {layout}: not shown to be exact"):
            parse("--optimizer", "muon", layout, "2", "--actor-num-gpus-per-node", "2")
    with pytest.raises(ValueError, match="--exp-avg-dtype"):
        parse("--optimizer", "muon", "--exp-avg-dtype", "bf16", "--strict")
    assert parse("--optimizer", "muon", "--adam-beta2", "0.95", "--strict").adam_beta2 == 0.95
