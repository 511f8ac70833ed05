"""The Megatron trainer on one GPU in bf16: compiled layers, compared with FSDP, and a resume."""

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from megatron_helpers import exported, make_family, megatron_args
from trainer_helpers import meeting_point, random_samples

from slime.backends import fsdp, megatron
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
