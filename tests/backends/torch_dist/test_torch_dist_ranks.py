"""What megatron-core writes under one layout is read under any other, exactly, and it reads what we write."""

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_helpers import exported, in_processes, make_family, megatron_args

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(1800)]
# How megatron-core names tensors: stacked over layers, one for each layer, one for each part of each expert.
FORMS = {
    "stacked": {},
    "by layer": {"non_homogeneous_layers": True},
    "alone": {"singleton_local_shards": True},
}


def write_by_megatron(rank, world_size, model, folder, settings):
    """Megatron's own saving, in all its forms, of a trainer that has the weights of `model`."""
    from megatron.core import dist_checkpointing

    from slime.backends.megatron import create_backend
    from slime.backends.megatron.fixes import checkpoint_fixes

    args = megatron_args(model, **settings)
    backend = create_backend(args, rank=rank, world_size=world_size, device="cpu")
    checkpoint_fixes.own_results_server()
    for form, metadata in FORMS.items():
        target = folder / form / "iter_0000003"
        if rank == 0:
            target.mkdir(parents=True)
        torch.distributed.barrier()
        state = {"model": backend.model[0].module.sharded_state_dict(metadata=dict(metadata))}
        dist_checkpointing.save(state, str(target), content_metadata=dict(metadata))
    return {}


def read_by_trainers(rank, world_size, model, cases):
    """What trainers hold that start from a torch_dist folder and refer to it; the config is another's."""
    from slime.backends import fsdp, megatron

    found = {}
    for name, (start, settings) in cases.items():
        kind = fsdp if settings.get("fsdp") else megatron
        settings = {key: value for key, value in settings.items() if key != "fsdp"}
        args = megatron_args(model, start_from=start, ref_load=start, use_kl_loss=True, **settings)
        backend = kind.create_backend(args, rank=rank, world_size=world_size, device="cpu")
        found[name] = exported(backend)
        found[name + ", reference"] = exported(backend, weights="ref")
    return found


def read_by_megatron(rank, world_size, model, folder, settings):
    """Megatron's own loading of what we wrote."""
    from megatron.core import dist_checkpointing

    from slime.backends.megatron import create_backend

    backend = create_backend(megatron_args(model, **settings), rank=rank, world_size=world_size, device="cpu")
    module = backend.model[0].module
    # Beside weights its layers ask for states of FP8, which a converted model has none of.
    state = {"model": module.sharded_state_dict(metadata={})}
    loaded = dist_checkpointing.load(state, folder, strict="ignore_all")
    module.load_state_dict(loaded["model"], strict=False)
    return {"read": exported(backend)}


def weights_of(model) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(f"{model}/model.safetensors")


def check(found, model) -> None:
    expected = weights_of(model)
    for case, tensors in found.items():
        assert tensors.keys() == expected.keys(), case
        assert all(torch.equal(tensors[name], expected[name]) for name in expected), case


WRITTEN = {"qwen3": (4, dict(tp=2, pp=2)), "qwen3_moe": (2, dict(ep=2))}


@pytest.fixture(scope="module", params=WRITTEN)
def written(request, tmp_path_factory):
    """(folder, the model that was written, another of the same shape)"""
    folder, kind = tmp_path_factory.mktemp(request.param), request.param
    model = make_family(folder / "model", kind, seed=1)
    other = make_family(folder / "other", kind, seed=2)
    ranks, settings = WRITTEN[kind]
    in_processes(ranks, write_by_megatron, folder, model, folder, settings)
    return folder, model, other


def test_every_form_is_read_bit_for_bit(written):
    from transformers import AutoConfig

    from slime.backends.torch_dist.reading import TorchDistFolder

    folder, model, _ = written
    for form in FORMS:
        found = TorchDistFolder(folder / form / "iter_0000003", AutoConfig.from_pretrained(model))
        check({form: dict(found.tensors())}, model)


def test_trainers_of_other_layouts_start_from_it(written):
    folder, model, other = written
    start = str(folder / "stacked" / "iter_0000003")
    layouts = {"pp2": dict(pp=2), "tp2": dict(tp=2, sp=True), "fsdp": dict(fsdp=True)}
    cases = {name: (start, settings) for name, settings in layouts.items()}
    check(in_processes(2, read_by_trainers, folder, other, cases), model)


def test_megatron_reads_what_we_write(tmp_path):
    from transformers import AutoConfig

    from slime.backends.torch_dist.writing import write

    model = make_family(tmp_path / "model", "qwen3", seed=1)
    other = make_family(tmp_path / "other", "qwen3", seed=2)
    write(model, tmp_path / "ours_torch_dist", AutoConfig.from_pretrained(model))
    release = str(tmp_path / "ours_torch_dist" / "release")
    check(in_processes(2, read_by_megatron, tmp_path, other, release, dict(tp=2)), model)
