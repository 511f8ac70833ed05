"""The Megatron trainer on one GPU in bf16: compiled layers, compared with FSDP, and a resume."""

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from megatron_helpers import exported, make_family, megatron_args
from trainer_helpers import meeting_point, random_samples

from slime.backends import fsdp, megatron
from slime.backends.megatron.optimizer import members
from slime.batch.convert import samples_to_batch
from slime.batch.split import split_for_ranks
from slime.step.training_step import TrainingStep

pytestmark = pytest.mark.gpu
DEVICE, BACKEND = "cuda:0", "nccl"
SETTINGS = dict(dtype="bfloat16", use_dynamic_batch_size=True, max_tokens_per_gpu=200, distopt=True)


@pytest.fixture(scope="module", autouse=True)
def process_group():
    if BACKEND == "nccl":
        torch.cuda.set_device(0)
    dist.init_process_group(BACKEND, init_method=meeting_point(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    sizes = dict(hidden_size=256, intermediate_size=512, head_dim=64, initializer_range=0.05)
    return make_family(tmp_path_factory.mktemp("model"), "qwen3", **sizes)


def build(module, args):
    return module.create_backend(args, rank=0, world_size=1, device=DEVICE)


def train(backend, args, seed):
    batch = samples_to_batch(args, random_samples(4, 4, vocab=127, longest=60, seed=seed))
    return TrainingStep(backend, args, 0, split_for_ranks(args, batch, 1)[0]).run().summary


def close(found, expected):
    for name in ("train/entropy_loss", "train/grad_norm"):
        assert found[name] == pytest.approx(expected[name], rel=0.05), name


def test_compiled_layers_train_like_megatrons_own_and_like_fsdp(model):
    metrics = {}
    for name, module, compiled in (
        ("own", megatron, False),
        ("compiled", megatron, True),
        ("fsdp", fsdp, False),
    ):
        args = megatron_args(model, compile=compiled, **SETTINGS)
        # One step: Adam's first update has the size of the rate whatever the
        # gradient, so 16-bit noise decides later ones.
        metrics[name] = train(build(module, args), args, 0)
    close(metrics["compiled"], metrics["own"])
    close(metrics["fsdp"], metrics["own"])


def test_resume_goes_on_as_if_uninterrupted(model, tmp_path):
    args = megatron_args(model, compile=False, **SETTINGS)
    first = build(megatron, args)
    train(first, args, 0)
    first.save(tmp_path / "saved")
    train(first, args, 1)
    second = build(megatron, args)
    second.load(tmp_path / "saved")
    train(second, args, 1)
    expected, found = exported(first), exported(second)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-2, atol=1e-5, msg=name)


def tensors_of(backend):
    """Copies of all weights, fp32 copies and moments, on the host."""
    owners = [member.optimizer for member in members(backend.optimizer)]
    copies = [p for owner in owners for group in owner.param_groups for p in group["params"]]
    state = [
        v for owner in owners for one in owner.state.values() for v in one.values() if torch.is_tensor(v)
    ]
    weights = [p for chunk in backend.model for p in chunk.parameters()]
    return [tensor.detach().to("cpu", copy=True) for tensor in [*weights, *copies, *state]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sleeping_frees_memory_in_locked_pages_and_waking_changes_nothing(model, dtype):
    args = megatron_args(model, compile=False, **{**SETTINGS, "dtype": dtype})
    stayed, left = build(megatron, args), build(megatron, args)
    for seed in range(3):
        train(stayed, args, seed)
        train(left, args, seed)
        before, awake = tensors_of(left), torch.cuda.memory_allocated()
        left.move(params="cpu", optimizer="cpu")
        counted = sum(p.numel() for chunk in left.model for p in chunk.parameters())
        held = {"bfloat16": 2 + 4 + 3 * 4, "float32": 4 + 4 + 2 * 4}[dtype]  # weights, gradients, optimizer
        assert awake - torch.cuda.memory_allocated() >= held * counted
        places = list(left._host._places.values())
        assert places and all(place.is_pinned() for place in places)
        left.move(params="cuda", optimizer="cuda")
        assert all(map(torch.equal, tensors_of(left), before))
        assert [place.data_ptr() for place in left._host._places.values()][: len(places)] == [
            place.data_ptr() for place in places
        ]
    expected, found = exported(stayed), exported(left)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-2, atol=1e-5, msg=name)
