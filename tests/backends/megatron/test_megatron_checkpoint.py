"""A checkpoint of one layout resumes under another with the same curve; hub checkpoints are read strictly."""

import json

import pytest
import torch

pytest.importorskip("megatron.core")

from devices import DEVICE
from megatron_helpers import exported, in_processes, make_family, megatron_args, save_and_resume

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def model(folder):
    return make_family(folder / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def saved(folder, model):
    """Saved with tensor parallelism, resumed as a pipeline; the checkpoint stays."""
    layouts = dict(tp=2, sp=True, distopt=True), dict(pp=2, distopt=True)
    return in_processes(2, save_and_resume, folder, model, str(folder / "ckpt"), *layouts)


def check(resumed, went_on):
    for found, expected in zip(resumed["steps"], went_on["steps"], strict=True):
        assert found == pytest.approx(expected, abs=1e-4)
    for name, tensor in went_on["weights"].items():
        torch.testing.assert_close(resumed["weights"][name], tensor, rtol=0, atol=2e-6)


def test_tensor_parallel_checkpoint_resumes_as_a_pipeline(saved):
    check(saved["resumed"], saved["went on"])


def test_checkpoint_resumes_on_one_rank(folder, model, saved):
    resumed = in_processes(1, save_and_resume, folder, model, str(folder / "ckpt"), None, dict(distopt=True))
    check(resumed["resumed"], saved["went on"])


@pytest.fixture(scope="module")
def saved_experts(folder):
    """A mixture saved in the background under EP while training goes on, and resumed under TP."""
    model = make_family(folder / "moe", "qwen3_moe")
    layouts = dict(ep=2, distopt=True, async_save=True), dict(tp=2, sp=True, distopt=True)
    return model, in_processes(2, save_and_resume, folder, model, str(folder / "experts"), *layouts)


def test_expert_parallel_background_checkpoint_resumes_under_tensor_parallelism(saved_experts):
    check(saved_experts[1]["resumed"], saved_experts[1]["went on"])


@pytest.mark.parametrize(
    "layout", [dict(distopt=True), dict(distopt=True, ep=2, pp=2)], ids=["one", "ep2 pp2"]
)
def test_expert_parallel_checkpoint_resumes_elsewhere(folder, saved_experts, layout):
    model, saved = saved_experts
    ranks = 4 if "ep" in layout else 1
    resumed = in_processes(ranks, save_and_resume, folder, model, str(folder / "experts"), None, layout)
    check(resumed["resumed"], saved["went on"])


@pytest.mark.parametrize(
    ("saved_as", "resumed_as"),
    [(dict(ep=2), dict(tp=2, sp=True)), (dict(tp=2, sp=True), dict(ep=2))],
    ids=["from ep2", "to ep2"],
)
def test_moments_of_experts_cross_layouts_without_the_distributed_optimizer(
    folder, saved_experts, saved_as, resumed_as, tmp_path
):
    """Experts have an optimizer of their own under EP, and share one with the rest without."""
    model = saved_experts[0]
    found = in_processes(2, save_and_resume, folder, model, str(tmp_path / "ckpt"), saved_as, resumed_as)
    check(found["resumed"], found["went on"])
    alone = in_processes(1, save_and_resume, folder, model, str(tmp_path / "ckpt"), None, {})
    check(alone["resumed"], found["went on"])


@pytest.mark.parametrize("distopt", [True, False])
def test_stage_that_trains_nothing_does_not_lose_adams_step(folder, model, tmp_path, distopt):
    frozen = dict(only_train_params_name_list=["layers.3."], distopt=distopt)
    layout = dict(frozen, pp=2)
    found = in_processes(2, save_and_resume, folder, model, str(tmp_path / "ckpt"), layout, layout)
    check(found["resumed"], found["went on"])
    alone = in_processes(1, save_and_resume, folder, model, str(tmp_path / "ckpt"), None, frozen)
    check(alone["resumed"], found["went on"])


def other_parameters_train(rank, world_size, model, folder):
    """Saved where one layer trains; then read where all do, and in the form that older checkpoints have."""
    from slime.backends.megatron import create_backend, dist_checkpoint

    def build(**changes):
        args = megatron_args(model, optimizer="adam", distopt=True, **changes)
        return create_backend(args, rank=rank, world_size=world_size, device=DEVICE)

    one_layer = build(only_train_params_name_list=["layers.3."])
    one_layer.save(folder + "/layer")
    try:
        build().load(folder + "/layer")
        refused = "nothing was refused"
    except ValueError as error:
        refused = str(error)
    build(no_load_optim=True).load(folder + "/layer")
    stacked = {
        name: value for name, value in dist_checkpoint.METADATA.items() if name != "non_homogeneous_layers"
    }
    now, dist_checkpoint.METADATA = dist_checkpoint.METADATA, stacked
    whole = build()
    with torch.no_grad():
        for chunk in whole.model:
            for parameter in chunk.parameters():
                parameter.mul_(1.5)
    whole.save(folder + "/stacked")
    dist_checkpoint.METADATA = now
    again = build()
    again.load(folder + "/stacked")
    expected, found = exported(whole), exported(again)
    return {
        "refused": refused,
        "old form": all(torch.equal(found[name], tensor) for name, tensor in expected.items()),
    }


def test_moments_that_were_not_saved_are_named_and_older_checkpoints_are_read(model, tmp_path):
    found = in_processes(1, other_parameters_train, tmp_path, model, str(tmp_path))
    assert "no Adam state for" in found["refused"] and "--no-load-optim" in found["refused"]
    assert found["old form"]


def without_moments(rank, world_size, model, folder):
    from slime.backends.megatron import create_backend
    from slime.backends.megatron.optimizer import members

    args = megatron_args(model, optimizer="adam", distopt=True, no_load_optim=True, no_load_rng=True)
    backend = create_backend(args, rank=rank, world_size=world_size, device=DEVICE)
    torch.manual_seed(5)
    backend.load(folder)
    drawn = torch.rand(1).item()
    torch.manual_seed(5)
    moments = [len(member.optimizer.state) for member in members(backend.optimizer)]
    found = {"step": backend.step, "moments": moments, "kept seed": drawn == torch.rand(1).item()}
    saved = exported(backend)
    backend.load_hf(model)
    backend.load_model(folder, weights="ref")
    as_reference, own = exported(backend, weights="ref"), exported(backend)
    found["reference"] = all(torch.equal(as_reference[name], tensor) for name, tensor in saved.items())
    found["own kept"] = any(not torch.equal(own[name], tensor) for name, tensor in saved.items())
    return found


def test_moments_and_random_state_may_stay_behind_and_a_reference_comes_from_a_checkpoint(
    folder, model, saved
):
    found = in_processes(1, without_moments, folder, model, str(folder / "ckpt"))
    assert found == {"step": 3, "moments": [0], "kept seed": True, "reference": True, "own kept": True}


def kept_versions(rank, world_size, model, other, folder):
    """Whether a resumed trainer, under another layout, holds the weights of earlier pushes."""
    from pathlib import Path

    from slime.backends.megatron import create_backend
    from slime.backends.shared.old_policy import OldPolicy

    def backend_of(**layout):
        args = megatron_args(model, distopt=True, keep_old_actor=True, **layout)
        return create_backend(args, rank=rank, world_size=world_size, device=DEVICE)

    backend = backend_of(tp=2)
    kept = OldPolicy(backend)
    kept.note_push(1)
    before = exported(backend)
    backend.load_hf(other)
    kept.note_push(2)
    backend.save(Path(folder))
    kept.save(Path(folder))
    after = exported(backend)
    resumed = backend_of(pp=2)
    resumed.load(Path(folder))
    kept = OldPolicy(resumed)
    kept.load(Path(folder))
    held = {tag: exported(resumed, weights=tag) for tag in ("old", "rollout", "actor")}
    expected = {"old": before, "rollout": after, "actor": after}
    return {tag: all(torch.equal(held[tag][n], t) for n, t in expected[tag].items()) for tag in expected}


def test_weights_of_earlier_pushes_are_part_of_a_checkpoint(folder, model):
    other = make_family(folder / "other", "qwen3", seed=1)
    found = in_processes(2, kept_versions, folder, model, other, str(folder / "kept"))
    assert found == {"old": True, "rollout": True, "actor": True}


def broken_checkpoints(rank, world_size, model, other, folder):
    """Messages of what must be refused: other models, missing, extra and wrongly shaped tensors."""
    from pathlib import Path

    from safetensors.torch import load_file, save_file

    from slime.backends.megatron import create_backend

    def message(act):
        try:
            act()
        except ValueError as error:
            return str(error)
        return "nothing was refused"

    def rewritten(name, change):
        path = Path(folder) / name
        path.mkdir()
        (path / "config.json").write_text((Path(model) / "config.json").read_text())
        tensors = load_file(Path(model) / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")
        return str(path)

    place = dict(rank=rank, world_size=world_size, device=DEVICE)
    backend = create_backend(megatron_args(model, distopt=True), **place)
    key = "model.layers.1.mlp.up_proj.weight"
    return {
        "other model": message(
            lambda: create_backend(megatron_args(other), **place).load(Path(folder) / "ckpt")
        ),
        "missing": message(lambda: backend.load_hf(rewritten("missing", lambda t: t.pop(key)))),
        "extra": message(
            lambda: backend.load_hf(rewritten("extra", lambda t: t.update(more=torch.zeros(1))))
        ),
        "shape": message(
            lambda: backend.load_hf(rewritten("shape", lambda t: t.update({key: torch.zeros(3, 32)})))
        ),
    }


def test_checkpoints_that_do_not_fit_are_named(folder, model, saved):
    other = make_family(folder / "wide", "qwen3", intermediate_size=64)
    found = in_processes(1, broken_checkpoints, folder, model, other, str(folder))
    assert "ffn_hidden_size is 48 in it and 64 here" in found["other model"]
    assert "1 tensors are missing: model.layers.1.mlp.up_proj.weight" in found["missing"]
    assert "1 tensors are not in the model: more" in found["extra"]
    assert "model.layers.1.mlp.up_proj.weight [3, 32]" in found["shape"]
    assert json.loads((folder / "ckpt" / "trainer.json").read_text())["backend"] == "megatron"
