"""A rank of FSDP reads from a model's files only its own part, also of experts that transformers stacks."""

import argparse
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from devices import DEVICE
from trainer_helpers import init_process_group, meeting_point, trainer_args

from slime.backends.fsdp import create_backend, loading
from slime.backends.fsdp.model import gather_full
from slime.backends.shared.hub_folder import CheckpointFolder
from slime.backends.shared.placed_adam import local
from slime.cli.convert import fp8_folder
from slime.cli.verify_model import shrink
from slime.utils.models import hub_names
from slime.utils.models.hub_names import parts_of, saved_tensors
from slime.utils.models.model_config import block_size_of

KINDS = ("qwen3_moe", "deepseek_v3", "mixtral")
LAYOUTS = {"data": {}, "tensor": dict(tensor_model_parallel_size=2)}


def make(kind, folder):
    from transformers import CONFIG_MAPPING

    shrink.build(shrink.shrink(CONFIG_MAPPING[kind](), layers=2), folder, "")
    return folder


def whole(folder):
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    how = {"quantization_config": FineGrainedFP8Config(dequantize=True)} if block_size_of(folder) else {}
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)
    return {name: tensor.clone() for name, tensor in saved_tensors(lm)}


def work(rank, world_size, address, models, out):
    torch.set_num_threads(1)
    init_process_group(rank, world_size, address)
    sizes = []
    plain = CheckpointFolder.read

    def read(folder, name, region=None):
        tensor = plain(folder, name, region)
        sizes.append((name, tensor.numel()))
        return tensor

    CheckpointFolder.read = read
    found = {}
    for (name, changes), folder in itertools.product(LAYOUTS.items(), models):
        if world_size == 1 and changes:
            continue
        sizes.clear()
        args = trainer_args(folder, allow_unverified_model=True, **changes)
        backend = create_backend(args, rank=rank, world_size=world_size, device=DEVICE)
        own = sum(local(tensor).numel() for _, tensor in saved_tensors(backend.model.lm))
        found[name, folder.name] = {
            "weights": {n: gather_full(t).cpu() for n, t in saved_tensors(backend.model.lm)},
            "read": sum(size for _, size in sizes),
            "own": own,
            "largest": max(sizes, key=lambda pair: pair[1]),
        }
    CheckpointFolder.read = plain
    torch.save(found, out / f"{world_size}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    made = [make(kind, folder / kind) for kind in KINDS]
    options = argparse.Namespace(block_size=(16, 16), scale_fmt=None)
    fp8_folder.quantize(made[0], folder / "fp8", options)
    return [*made, folder / "fp8"]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_rank_reads_its_own_part_and_nothing_else(ranks, models, tmp_path):
    if ranks == 1:
        work(0, 1, meeting_point(), models, tmp_path)
    else:
        mp.spawn(work, args=(ranks, meeting_point(), models, tmp_path), nprocs=ranks, join=True)
    expected = {folder.name: whole(folder) for folder in models}
    files = {folder.name: CheckpointFolder(folder) for folder in models}
    for rank in range(ranks):
        for (layout, kind), found in torch.load(tmp_path / f"{ranks}-{rank}.pt").items():
            torch.testing.assert_close(
                found["weights"], expected[kind], rtol=0, atol=0, msg=f"{layout} {kind}"
            )
            assert found["read"] == found["own"], (layout, kind)
            # At no time does a rank hold more than its shard and one tensor of the files.
            name, size = found["largest"]
            assert size <= files[kind].shape(name).numel()
            assert ranks == 1 or found["own"] < sum(t.numel() for t in expected[kind].values())


@pytest.mark.parametrize("kind", KINDS)
def test_the_regions_of_any_number_of_ranks_make_the_whole_tensor(kind, models):
    folder = next(path for path in models if path.name == kind)
    held, lm = CheckpointFolder(folder), loading.empty_model(folder)
    expected = whole(folder)
    parts = parts_of(lm, dict(saved_tensors(lm)), held.names)
    assert any(len(own) > 1 for own in parts.values())
    for name, tensor in expected.items():
        for dim, ranks in itertools.product(range(tensor.dim()), (1, 3)):
            pieces = []
            for rank in range(ranks):
                region = [slice(0, size) for size in tensor.shape]
                step = -(-tensor.shape[dim] // ranks)
                region[dim] = slice(
                    min(rank * step, tensor.shape[dim]), min((rank + 1) * step, tensor.shape[dim])
                )
                piece = torch.full([part.stop - part.start for part in region], torch.nan)
                for part in parts[name]:
                    if (found := part.within(tuple(region))) is not None:
                        found[0].of(piece).copy_(held.read(part.name, found[1]))
                pieces.append(piece)
            assert torch.equal(torch.cat(pieces, dim), tensor.float()), (name, dim, ranks)


def test_what_is_no_part_of_one_tensor_is_left_to_transformers(models, monkeypatch):
    """A family may compute a tensor of its files from several in memory: these cannot be read by regions."""
    lm = loading.empty_model(models[0])
    tensors = dict(itertools.islice(saved_tensors(lm), 2))
    monkeypatch.setattr(
        hub_names, "hub_tensors", lambda lm, named, known: [(n, tensor.clone()) for n, tensor in named]
    )
    with pytest.raises(ValueError, match="is not a part of one tensor in memory"):
        parts_of(lm, tensors, frozenset())
