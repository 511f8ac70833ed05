"""Adapters take the same steps however the model is spread over ranks, and leave whole and merged alike."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from devices import DEVICE, SAME
from tiny_model import make_tiny_model
from trainer_helpers import init_process_group, meeting_point, random_samples, trainer_args

from slime.backends.fsdp import create_backend
from slime.batch.convert import samples_to_batch
from slime.batch.split import split_for_ranks
from slime.step.training_step import TrainingStep

VARIANTS = {
    1: {"plain": {}},
    2: {"data": {}, "tensor": dict(tensor_model_parallel_size=2)},
    4: {"data x tensor": dict(tensor_model_parallel_size=2, activation_checkpointing="full")},
}


def work(rank, ranks, address, folder, model):
    torch.set_num_threads(1)
    init_process_group(rank, ranks, address)
    results = {}
    for name, changes in VARIANTS[ranks].items():
        # Two steps: in the first the second factor is zero, and the other does not move.
        args = trainer_args(
            model,
            lora_rank=4,
            lora_alpha=8.0,
            optimizer="sgd",
            lr=0.5,
            weight_decay=0.0,
            global_batch_size=6,
            **changes,
        )
        backend = create_backend(args, rank=rank, world_size=ranks, device=DEVICE)
        shares = split_for_ranks(args, samples_to_batch(args, random_samples(4, 3)), backend.layout.dp_size)
        metrics = TrainingStep(backend, args, 0, shares[backend.layout.dp_rank]).run().summary
        results[name] = {
            "adapters": {n: t.cpu().clone() for bucket in backend.export_adapter() for n, t in bucket},
            "merged": {n: t.cpu().clone() for bucket in backend.export() for n, t in bucket},
            "metrics": {key: metrics[key] for key in ("train/loss", "train/grad_norm", "train/pg_loss")},
        }
        backend.save(folder / name)
        again = create_backend(args, rank=rank, world_size=ranks, device=DEVICE)
        again.load(folder / "plain")
        results[name]["resumed"] = {
            n: t.cpu().clone() for bucket in again.export_adapter() for n, t in bucket
        }
    if rank == 0:
        torch.save(results, folder / f"{ranks}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_adapters_take_the_same_steps_on_any_number_of_ranks(tmp_path):
    model = make_tiny_model(tmp_path / "tiny", hidden=32)
    work(0, 1, meeting_point(), tmp_path, model)
    expected = torch.load(tmp_path / "1.pt")["plain"]
    moved = [
        name
        for name, tensor in expected["adapters"].items()
        if "lora_B" in name and tensor.abs().max() > 1e-3
    ]
    assert len(moved) == 14  # seven layers of each of two
    for ranks in (2, 4):
        mp.spawn(work, args=(ranks, meeting_point(), tmp_path, model), nprocs=ranks, join=True)
        for name, outcome in torch.load(tmp_path / f"{ranks}.pt").items():
            for part in ("adapters", "merged"):
                torch.testing.assert_close(
                    outcome[part],
                    expected[part],
                    rtol=1e-5,
                    atol=SAME["abs"],
                    msg=lambda m, n=name: f"{n}: {m}",
                )
            torch.testing.assert_close(outcome["resumed"], expected["adapters"], rtol=0, atol=0)
            assert outcome["metrics"] == pytest.approx(expected["metrics"], **SAME), name
