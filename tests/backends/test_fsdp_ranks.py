"""Two ranks do what one does: same loss and weights after SGD steps, checkpoints exchangeable both ways."""

import errno
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from devices import DEVICE, SAME
from tiny_model import make_tiny_model
from trainer_helpers import init_process_group, meeting_point, random_samples, trainer_args

from slime.backends.fsdp import create_backend
from slime.backends.fsdp.model import gather_full
from slime.backends.shared import hf_folder
from slime.batch.convert import samples_to_batch
from slime.batch.split import split_for_ranks
from slime.step.training_step import TrainingStep
from slime.utils.files.safetensors_files import all_files, read_index, read_tensors


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
        **changes,
    )


# An odd number of samples, so that one rank runs a micro-batch of weight zero.
VARIANTS = {
    "rollout means": dict(use_dynamic_batch_size=True, max_tokens_per_gpu=40, global_batch_size=8),
    "token means": dict(micro_batch_size=2, calculate_per_token_loss=True, balance_data=True),
    "critic": dict(
        advantage_estimator="ppo", micro_batch_size=4, global_batch_size=8, critic_lr=0.1, lambd=0.9
    ),
    "teacher": dict(
        use_opd=True, opd_type="trainer", opd_kl="full", opd_teacher_load="wide", micro_batch_size=4
    ),
    "weights of samples": dict(use_tis=True, tis_level="sequence", micro_batch_size=2),
}


def work(rank, world_size, address, folder, model):
    if world_size > 1:
        torch.set_num_threads(1)
    init_process_group(rank, world_size, address)
    samples = random_samples(5, 3)
    results = {}
    for name, changes in VARIANTS.items():
        args = settings(model, **changes)
        args = args.replace(opd_teacher_load=args.opd_teacher_load and str(folder / args.opd_teacher_load))
        backend = create_backend(args, rank=rank, world_size=world_size, device=DEVICE)
        data = split_for_ranks(args, samples_to_batch(args, samples), world_size)[rank]
        metrics = TrainingStep(backend, args, 0, data).run().summary
        models = {"actor": backend.model.lm} | ({"critic": backend.critic.model.lm} if backend.critic else {})
        named = {f"{role} {n}": p.data for role, lm in models.items() for n, p in lm.named_parameters()}
        results[name] = {
            "metrics": metrics,
            "weights": {n: gather_full(p).cpu().clone() for n, p in named.items()},
        }
    results["adam"] = save_and_resume(rank, world_size, folder, model, samples)
    backend.save_hf(folder / f"hf_{world_size}")
    results["written"] = save_by_buckets(backend, folder / f"split_{world_size}")
    if rank == 0:
        torch.save(results, folder / f"results_{world_size}.pt")
    dist.barrier()
    dist.destroy_process_group()


def save_by_buckets(backend, path):
    """Save the model in many files; return the number that each rank wrote, and errors of a full disk."""
    backend.args = backend.args.replace(update_weight_buffer_size=20_000)
    plain, own = hf_folder.write_tensors, []
    with mock.patch.object(hf_folder, "write_tensors", lambda *a: (own.append(a[0].name), plain(*a))[1]):
        backend.save_hf(path)

    def full(file, tensors):
        raise OSError(errno.ENOSPC, "No space left on device", str(file))

    failing = full if backend.rank == dist.get_world_size() - 1 else plain
    with mock.patch.object(hf_folder, "write_tensors", failing), pytest.raises(OSError) as raised:
        backend.save_hf(path.with_name("full"))
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, (len(own), raised.value.errno))
    return found


def save_and_resume(rank, world_size, folder, model, samples):
    """One Adam step, save; a second step. Then the second step again
    from the other world's checkpoint, if there.
    """
    args = trainer_args(model, micro_batch_size=4)
    losses = {}
    data = split_for_ranks(args, samples_to_batch(args, samples), world_size)[rank]
    backend = create_backend(args, rank=rank, world_size=world_size, device=DEVICE)
    TrainingStep(backend, args, 0, data).run()
    backend.save(folder / f"ckpt_{world_size}")
    losses["own"] = TrainingStep(backend, args, 1, data).run().summary
    other = folder / f"ckpt_{3 - world_size}"
    if other.exists():
        resumed = create_backend(args, rank=rank, world_size=world_size, device=DEVICE)
        resumed.load(other)
        losses["from other"] = TrainingStep(resumed, args, 1, data).run().summary
    return losses


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    model = make_tiny_model(folder / "tiny")
    make_tiny_model(folder / "wide", hidden=96, seed=3)
    work(0, 1, meeting_point(), folder, model)
    mp.spawn(work, args=(2, meeting_point(), folder, model), nprocs=2, join=True)
    return {n: torch.load(folder / f"results_{n}.pt") for n in (1, 2)}, folder


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_take_the_same_steps_as_one(outcome, variant):
    one, two = (outcome[0][n][variant] for n in (1, 2))
    torch.testing.assert_close(two["weights"], one["weights"], rtol=1e-5, atol=SAME["abs"])
    for name, value in one["metrics"].items():
        if not name.startswith("perf/"):
            assert two["metrics"][name] == pytest.approx(value, **SAME), name


def test_a_checkpoint_resumes_on_another_number_of_ranks(outcome):
    results = outcome[0]
    resumed = results[2]["adam"]["from other"]
    for name in ("train/loss", "train/grad_norm", "train/entropy_loss"):
        assert resumed[name] == pytest.approx(results[1]["adam"]["own"][name], **SAME)


def test_two_ranks_write_a_whole_hf_folder(outcome):
    from safetensors.torch import load_file

    results, folder = outcome
    saved = load_file(folder / "hf_2" / "model.safetensors")
    assert saved.keys() == load_file(folder / "tiny" / "model.safetensors").keys()
    trained = {f"actor {name}": tensor for name, tensor in saved.items()}
    torch.testing.assert_close(trained, results[2][list(VARIANTS)[-1]]["weights"], rtol=0, atol=0)


def test_ranks_write_the_files_of_a_model_side_by_side(outcome):
    results, folder = outcome
    for ranks in (1, 2):
        parts = dict(read_tensors(all_files(folder / f"split_{ranks}")))
        whole = dict(read_tensors(all_files(folder / f"hf_{ranks}")))
        torch.testing.assert_close(parts, whole, rtol=0, atol=0)
        assert set(read_index(folder / f"split_{ranks}")) == set(whole)
        counts = [count for count, _ in results[ranks]["written"]]
        assert sum(counts) == len(all_files(folder / f"split_{ranks}")) > 4
        assert max(counts) - min(counts) <= 1
        # A disk that is full for one rank is an error on all, and nothing appears.
        assert [number for _, number in results[ranks]["written"]] == [errno.ENOSPC] * ranks
    assert not (folder / "full").exists()
