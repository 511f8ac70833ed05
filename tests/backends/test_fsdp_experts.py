"""A mixture of experts on the FSDP trainer: the same steps however it is spread,
cut and recomputed, with a balance loss.
"""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from devices import DEVICE, SAME
from trainer_helpers import init_process_group, meeting_point, random_samples, trainer_args

from slime.backends.fsdp import create_backend, loading, tensor_parallel
from slime.backends.fsdp.model import gather_full
from slime.batch.convert import samples_to_batch
from slime.batch.split import split_for_ranks
from slime.step.training_step import TrainingStep

TENSOR, FULL = dict(tensor_model_parallel_size=2), dict(activation_checkpointing="full")
VARIANTS = {
    "one rank": {"plain": {}, "recomputed, other micro-batches": {**FULL, "micro_batch_size": 5}},
    "two ranks": {"data": {}, "tensor": {**TENSOR, **FULL}},
    "four ranks": {
        "data x tensor": {**TENSOR, "micro_batch_size": 3},
        "offloaded": dict(fsdp_cpu_offload=True),
        "replicas of two shards": dict(fsdp_shard_size=2),
    },
}
RANKS = {"one rank": 1, "two ranks": 2, "four ranks": 4}


def make_moe(path, *, experts: int = 4, **changes):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=experts,
        num_experts_per_tok=2,
        mlp_only_layers=[1],
        initializer_range=0.2,
        **changes,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


def settings(model, **changes):
    values = dict(optimizer="sgd", lr=0.1, weight_decay=0.0)
    return trainer_args(model, **(values | changes))


def take_step(backend, args):
    batch = samples_to_batch(args, random_samples(3, 3))
    shares = split_for_ranks(args, batch, backend.layout.dp_size)
    return TrainingStep(backend, args, 0, shares[backend.layout.dp_rank]).run().summary


def work(rank, matrix, address, folder, model):
    torch.set_num_threads(1)
    init_process_group(rank, RANKS[matrix], address)
    results = {}
    for name, changes in VARIANTS[matrix].items():
        args = settings(model, **changes)
        backend = create_backend(args, rank=rank, world_size=RANKS[matrix], device=DEVICE)
        metrics = take_step(backend, args)
        weights = {name: gather_full(p.data).cpu().clone() for name, p in backend.model.lm.named_parameters()}
        exported = {name: tensor.cpu().clone() for bucket in backend.export() for name, tensor in bucket}
        results[name] = {"metrics": metrics, "weights": weights, "exported": exported}
    if rank == 0:
        torch.save(results, folder / f"{matrix}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    model = make_moe(folder / "moe")
    work(0, "one rank", meeting_point(), folder, model)
    return folder, model, torch.load(folder / "one rank.pt")["plain"]


@pytest.mark.parametrize(
    "matrix",
    ["one rank", *(pytest.param(matrix, marks=pytest.mark.slow) for matrix in ("two ranks", "four ranks"))],
)
def test_experts_take_the_same_steps_however_they_are_spread(world, matrix):
    folder, model, reference = world
    if matrix != "one rank":
        mp.spawn(work, args=(matrix, meeting_point(), folder, model), nprocs=RANKS[matrix], join=True)
    for name, outcome in torch.load(folder / f"{matrix}.pt").items():
        for part in ("weights", "exported"):
            torch.testing.assert_close(
                outcome[part],
                reference[part],
                rtol=1e-5,
                atol=SAME["abs"],
                msg=lambda m, n=name, p=part: f"{n} {p}: {m}",
            )
        for key, value in reference["metrics"].items():
            if not key.startswith("perf/"):
                assert outcome["metrics"][key] == pytest.approx(value, **SAME), f"{name}: {key}"


def test_experts_that_cannot_be_shared_out_evenly_are_refused(tmp_path):
    lm = loading.empty_model(make_moe(tmp_path / "odd", experts=3))
    with pytest.raises(
        ValueError, match="--tensor-model-parallel-size 2 does not divide the number of experts = 3"
    ):
        tensor_parallel.plan_of(lm, 2)
    assert len(tensor_parallel.plan_of(loading.empty_model(make_moe(tmp_path / "even")), 2)[1]) == 2
