"""However a model is spread over ranks, it takes the same steps: data, context and
tensor parallel, offload, recomputation.
"""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from devices import DEVICE, SAME
from tiny_model import make_tiny_model
from trainer_helpers import init_process_group, meeting_point, random_samples, trainer_args, with_nuclei

from slime.backends.fsdp import create_backend
from slime.backends.fsdp.model import gather_full
from slime.backends.shared.microbatch import build_micro_batches
from slime.batch.convert import samples_to_batch
from slime.batch.split import split_for_ranks
from slime.step.training_step import TrainingStep

CONTEXT, TENSOR = "context_parallel_size", "tensor_model_parallel_size"
SHARDS = "fsdp_shard_size"
FULL, SELECTIVE = dict(activation_checkpointing="full"), dict(activation_checkpointing="selective")
VARIANTS = {
    "one rank": {
        "plain": {},
        "full recomputation": FULL,
        "selective recomputation": SELECTIVE,
        "one rank, offloaded": dict(fsdp_cpu_offload=True),
        "small chunks": dict(log_probs_chunk_size=3),
    },
    "two ranks": {
        "data": {},
        "context": {CONTEXT: 2},
        # In few micro-batches: DTensor plans every operator anew for each number of tokens.
        "tensor": {TENSOR: 2, "max_tokens_per_gpu": 400, **FULL},
        "replicas": {SHARDS: 1},
    },
    "two ranks, more": {
        "data, recomputation": SELECTIVE,
        "data, offloaded": dict(fsdp_cpu_offload=True),
        "context, small chunks": {CONTEXT: 2, "log_probs_chunk_size": 2, **FULL},
        "tensor, nothing recomputed": {TENSOR: 2},
    },
    "four ranks": {
        "four data": {},
        "data x context": {CONTEXT: 2},
        "data x tensor": {TENSOR: 2},
        "context x tensor": {CONTEXT: 2, TENSOR: 2},
        "four context": {CONTEXT: 4},
        "replicas of two shards": {SHARDS: 2},
        "replicas of two shards, context": {SHARDS: 2, CONTEXT: 2},
        "replicas x tensor": {SHARDS: 1, TENSOR: 2},
    },
}
COMPARED = ("train/loss", "train/grad_norm", "train/entropy_loss", "train/logprob_abs_diff/lag_0")
RANKS = {"one rank": 1, "two ranks": 2, "two ranks, more": 2, "four ranks": 4}
slow = pytest.mark.slow


def settings(model, **changes):
    return trainer_args(
        model,
        optimizer="sgd",
        lr=0.2,
        weight_decay=0.0,
        clip_grad=1.0,
        entropy_coef=0.01,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        kl_loss_type="k3",
        normalize_advantages=True,
        use_dynamic_batch_size=True,
        logprob_diff_threshold=0.0,  # the samples' log-probs are random
        **{"global_batch_size": 8, "max_tokens_per_gpu": 40, **changes},
    )


def take_steps(backend, args, samples):
    shares = split_for_ranks(
        args, samples_to_batch(args, samples), backend.layout.dp_size, cp_size=backend.layout.cp_size
    )
    return TrainingStep(backend, args, 0, shares[backend.layout.dp_rank], weight_version=1).run().summary


def weights_of(backend):
    return {name: gather_full(p.data).cpu().clone() for name, p in backend.model.lm.named_parameters()}


def work(rank, matrix, address, folder, model):
    world_size = RANKS[matrix]
    if world_size > 1:
        torch.set_num_threads(1)
    init_process_group(rank, world_size, address)
    samples = with_nuclei(random_samples(5, 3))
    results = {}
    for name, changes in VARIANTS[matrix].items():
        args = settings(model, **changes)
        backend = create_backend(args, rank=rank, world_size=world_size, device=DEVICE)
        metrics = take_steps(backend, args, samples)
        mbs = build_micro_batches(samples_to_batch(args, samples), [[0, 3, 14], [7]])
        found = backend.log_probs(mbs, entropy=True)
        results[name] = {
            "metrics": metrics,
            "weights": weights_of(backend),
            "exported": {n: t.cpu().clone() for bucket in backend.export() for n, t in bucket},
            "log_probs": found.log_probs + found.entropy,
        }
        backend.save(folder / name)
        args = settings(
            model, global_batch_size=15, **changes
        )  # one step: no pass before it records log-probs
        results[name]["next"] = take_steps(backend, args, samples)
        if world_size > 1:
            results[name]["next from one rank"] = next_from(folder / "plain", args, rank, world_size)
    if rank == 0:
        torch.save(results, folder / f"{matrix}.pt")
    dist.barrier()
    dist.destroy_process_group()


def next_from(path, args, rank, world_size):
    """The step after the one that a checkpoint was written behind."""
    backend = create_backend(args, rank=rank, world_size=world_size, device=DEVICE)
    backend.load(path)
    return take_steps(backend, args, with_nuclei(random_samples(5, 3)))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    model = make_tiny_model(folder / "tiny", layers=2, hidden=32)
    work(0, "one rank", meeting_point(), folder, model)
    return folder, model, torch.load(folder / "one rank.pt")["plain"]


@pytest.mark.parametrize(
    "matrix",
    [
        "one rank",
        "two ranks",
        pytest.param("two ranks, more", marks=slow),
        pytest.param("four ranks", marks=slow),
    ],
)
def test_every_way_to_spread_a_model_takes_the_same_steps(world, matrix):
    folder, model, reference = world
    assert reference["metrics"]["train/grad_norm"] > 0.01
    if matrix != "one rank":
        mp.spawn(work, args=(matrix, meeting_point(), folder, model), nprocs=RANKS[matrix], join=True)
    for name, outcome in torch.load(folder / f"{matrix}.pt").items():
        for part in ("weights", "log_probs"):
            torch.testing.assert_close(
                outcome[part],
                reference[part],
                rtol=1e-5,
                atol=SAME["abs"],
                msg=lambda m, name=name, part=part: f"{name} {part}: {m}",
            )
        torch.testing.assert_close(outcome["exported"], outcome["weights"], rtol=0, atol=0)
        for key, value in reference["metrics"].items():
            if not key.startswith("perf/"):
                assert outcome["metrics"][key] == pytest.approx(value, **SAME), f"{name}: {key}"
        for key in COMPARED:
            for step in ("next", "next from one rank"):
                if step in outcome:
                    expected = pytest.approx(reference["next"][key], rel=1e-3, abs=1e-5)
                    assert outcome[step][key] == expected, f"{name}, {step}: {key}"


@pytest.mark.parametrize("written_by", ["data", "context", "tensor", "replicas"])
def test_one_rank_continues_from_the_checkpoint_of_two(world, written_by):
    folder, model, reference = world
    if not (folder / "two ranks.pt").exists():
        mp.spawn(work, args=("two ranks", meeting_point(), folder, model), nprocs=2, join=True)
    init_process_group()
    metrics = next_from(folder / written_by, settings(model, global_batch_size=15), 0, 1)
    dist.destroy_process_group()
    for key in COMPARED:
        assert metrics[key] == pytest.approx(reference["next"][key], rel=1e-3, abs=1e-5)
