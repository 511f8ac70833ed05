"""The trainer on one GPU: variable-length attention, bf16 next to
fp32, sleeping frees memory, resume is exact.
"""

import pytest
import torch
import torch.distributed as dist
from tiny_model import make_tiny_model
from trainer_helpers import meeting_point, random_samples, trainer_args

from slime.backends.attention import packed_documents
from slime.backends.attention.documents import PackedDocuments
from slime.backends.attention.packed_documents import (
    OPERATORS,
    packed_attention,
    varlen_attention,
)
from slime.backends.attention.trial import why_wrong
from slime.backends.fsdp import create_backend
from slime.backends.shared import placed_adam
from slime.backends.shared.placed_adam import MomentPlan, PlacedAdamW
from slime.batch.convert import samples_to_batch
from slime.batch.split import split_for_ranks
from slime.step.training_step import TrainingStep

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def process_group():
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=meeting_point(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", hidden=256)


def train(backend, args, samples):
    data = split_for_ranks(args, samples_to_batch(args, samples), 1)[0]
    return TrainingStep(backend, args, 0, data).run().summary


@pytest.mark.parametrize("lengths", [[5, 300, 17, 64, 1], [5, 4500, 17, 4096, 4095, 64, 5000], [4700]])
def test_variable_length_attention_matches_grouped_sdpa(lengths):
    torch.manual_seed(0)
    heads = [torch.randn(sum(lengths), n, 64, device="cuda", requires_grad=True) for n in (8, 2, 2)]
    documents = PackedDocuments.from_lengths(lengths).to(torch.device("cuda"))
    direction = torch.randn(sum(lengths), 8, 64, device="cuda")
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        out = packed_attention(*(x.to(dtype) for x in heads), documents, scale=0.2)
        results.append((out.float(), *torch.autograd.grad((out.float() * direction).sum(), heads)))
    for half, full in zip(*results, strict=True):
        assert (half - full).norm() / full.norm() < 0.02


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(("ratio", "width"), [(1, 64), (4, 64), (2, 128), (4, 128)])
def test_packed_operators_compute_right(name, ratio, width):
    reason = why_wrong(OPERATORS[name], ratio, width, torch.device("cuda"))
    if reason == "":
        pytest.skip(f"{name} is not installed")
    assert reason is None


def test_a_chunk_sees_the_prefix_of_its_document():
    """What context parallelism relies on: with fewer queries than
    keys the causal mask is aligned at the end.
    """
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(40, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2)
    )
    cu = torch.tensor([0, 40], dtype=torch.int32, device="cuda")
    cu_query = torch.tensor([0, 10], dtype=torch.int32, device="cuda")
    whole = varlen_attention(query, key, value, cu, cu, 64, 64, 0.2)
    tail = varlen_attention(query[30:], key, value, cu_query, cu, 64, 64, 0.2)
    torch.testing.assert_close(tail, whole[30:], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_compiled_layers_train_like_plain_ones(model, checkpointing):
    metrics = {}
    for compiled in (False, True):
        args = trainer_args(
            model,
            dtype="bfloat16",
            use_dynamic_batch_size=True,
            max_tokens_per_gpu=200,
            compile=compiled,
            activation_checkpointing=checkpointing,
        )
        backend = create_backend(args, rank=0, world_size=1, device="cuda:0")
        for seed in range(2):
            metrics[compiled] = train(backend, args, random_samples(4, 4, longest=60, seed=seed))
    for name in ("train/entropy_loss", "train/grad_norm"):
        assert metrics[True][name] == pytest.approx(metrics[False][name], rel=0.05)


def test_the_first_pass_may_be_one_of_recomputed_layers(model, monkeypatch):
    """How to attend is tried out within it: nothing of the trial belongs to the layer."""
    monkeypatch.setattr(packed_documents, "_CHOSEN", {})
    changes = dict(compile=False, activation_checkpointing="full", loss_type="sft_loss")
    args = trainer_args(model, dtype="bfloat16", micro_batch_size=4, **changes)
    backend = create_backend(args, rank=0, world_size=1, device="cuda:0")
    assert train(backend, args, random_samples(4, 4))["train/grad_norm"] > 0


@pytest.mark.parametrize("changes", [dict(fsdp_cpu_offload=True), dict(lora_rank=4)])
def test_offload_and_adapters_train_on_gpu(model, changes):
    args = trainer_args(model, dtype="bfloat16", micro_batch_size=4, compile=False, **changes)
    backend = create_backend(args, rank=0, world_size=1, device="cuda:0")
    assert train(backend, args, random_samples(4, 4))["train/grad_norm"] > 0


@pytest.mark.parametrize("size", [1, 4095, 4096, 100_003])
def test_a_16_bit_gradient_is_added_to_its_sum_as_torch_adds_it(size):
    from slime.backends.shared import add_kernel

    total, part = torch.randn(size, device="cuda"), torch.randn(size, device="cuda").bfloat16()
    expected = total + part
    add_kernel.add_(total, part)
    assert torch.equal(total, expected)


def test_16_bit_gradients_are_added_to_rows_that_stand_apart():
    from slime.backends.shared import add_kernel

    buffer, part = torch.randn(5, 3, 7000, device="cuda"), torch.randn(5, 7000, device="cuda").bfloat16()
    expected = buffer.clone()
    expected[:, 1] += part
    add_kernel.add_rows_(buffer[:, 1].view(5, 70, 100), part.view(5, 70, 100))
    assert torch.equal(buffer, expected)
    expected[:, 2] = part.float()
    add_kernel.add_rows_(buffer[:, 2], part, empty=True)
    assert torch.equal(buffer, expected)


def test_bf16_on_gpu_trains_like_fp32_on_gpu(model):
    metrics = {}
    for dtype in ("float32", "bfloat16"):
        args = trainer_args(model, dtype=dtype, micro_batch_size=4, use_kl_loss=True, kl_loss_coef=0.1)
        backend = create_backend(args, rank=0, world_size=1, device="cuda:0")
        metrics[dtype] = train(backend, args, random_samples(4, 4, longest=60))
    for name in ("train/entropy_loss", "train/grad_norm"):
        assert metrics["bfloat16"][name] == pytest.approx(metrics["float32"][name], rel=0.05)


def tensors_of(backend):
    """Copies of all weights and moments, on the host."""
    state = [v for state in backend.optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
    return [tensor.detach().to("cpu", copy=True) for tensor in [*backend.model.parameters(), *state]]


def test_sleeping_frees_memory_and_waking_changes_nothing(model, tmp_path):
    args = trainer_args(model, dtype="bfloat16", micro_batch_size=4)
    samples = random_samples(2, 4)
    backend = create_backend(args, rank=0, world_size=1, device="cuda:0")
    train(backend, args, samples)
    backend.save(tmp_path / "ckpt")
    before = tensors_of(backend)
    awake = torch.cuda.memory_allocated()
    backend.move(params="cpu", optimizer="cpu")
    # Weights and two moments in fp32; what stays is the matrix library's workspace.
    held = 3 * sum(p.numel() * 4 for p in backend.model.parameters())
    assert awake - torch.cuda.memory_allocated() >= held
    backend.move(params="cuda", optimizer="cuda")
    after = tensors_of(backend)
    assert len(after) == len(before) and all(map(torch.equal, after, before))
    after_sleep = train(backend, args, samples)
    resumed = create_backend(args, rank=0, world_size=1, device="cuda:0")
    resumed.load(tmp_path / "ckpt")
    after_load = train(resumed, args, samples)
    assert after_sleep["train/loss"] == pytest.approx(after_load["train/loss"], rel=1e-3, abs=1e-6)
    assert after_sleep["train/grad_norm"] == pytest.approx(after_load["train/grad_norm"], rel=1e-2)
    # The optimizer still steps the weights that are trained, not a copy left behind by the move. Two steps in
    # bf16 differ by the order in which a GPU adds.
    second = [train(b, args, samples)["train/entropy_loss"] for b in (backend, resumed)]
    assert second[0] == pytest.approx(second[1], rel=5e-3)
    assert not all(map(torch.equal, tensors_of(backend), after))
    names = [name for bucket in resumed.export(torch.bfloat16) for name, _ in bucket]
    assert len(names) == len(set(names)) == len(list(resumed.model.lm.named_parameters()))
    resumed.save_hf(tmp_path / "hf")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("share", [0.4, 1.0])
def test_moments_in_host_memory_give_the_same_bits(overlap, share, monkeypatch):
    monkeypatch.setattr(placed_adam, "_PIECE", 1 << 16)  # many pieces on their way at once
    sizes = [(700, 1003), (31,), (2048, 512), (5, 5)]
    torch.manual_seed(0)
    start = [torch.randn(size, device="cuda") for size in sizes]
    weights = [[torch.nn.Parameter(tensor.clone()) for tensor in start] for _ in range(2)]
    plan = MomentPlan(host_share=share, overlap=overlap)
    optimizers = [
        torch.optim.AdamW(weights[0], lr=1e-2, weight_decay=0.1, fused=True),
        PlacedAdamW([{"params": weights[1], "weight_decay": 0.1}], plan, lr=1e-2),
    ]
    for _ in range(6):
        gradients = [torch.randn_like(tensor) for tensor in start]
        for parameters, optimizer in zip(weights, optimizers, strict=True):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
    for plain, placed in zip(*weights, strict=True):
        assert torch.equal(plain, placed)
        there, here = optimizers[0].state[plain], optimizers[1].state[placed]
        assert all(torch.equal(there[name].cpu(), here[name].cpu()) for name in ("exp_avg", "exp_avg_sq"))
    hosted = [optimizers[1].state[p]["exp_avg"] for p in optimizers[1].hosted]
    assert hosted and all(moment.is_pinned() for moment in hosted)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8"])
def test_a_trainer_with_moments_in_host_memory_sleeps_wakes_and_resumes(model, tmp_path, dtype):
    changes = dict(exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
    changes |= dict(optimizer_cpu_offload=True, overlap_cpu_optimizer_d2h_h2d=True)
    args = trainer_args(model, dtype="bfloat16", micro_batch_size=4, compile=False, **changes)
    samples = random_samples(2, 4)
    backend = create_backend(args, rank=0, world_size=1, device="cuda:0")
    train(backend, args, samples)
    states = [value for state in backend.optimizer.state.values() for value in state.values()]
    assert {value.device.type for value in states} == {"cpu"}
    backend.save(tmp_path / "ckpt")
    resumed = create_backend(args, rank=0, world_size=1, device="cuda:0")
    resumed.load(tmp_path / "ckpt")
    backend.move(params="cpu", optimizer="cpu")
    backend.move(params="cuda", optimizer="cuda")
    for kept, read in zip(backend.optimizer.state.values(), resumed.optimizer.state.values(), strict=True):
        assert all(torch.equal(kept[name].float(), read[name].float()) for name in ("step", "exp_avg"))
        assert kept["exp_avg"].device.type == "cpu"
    after = [train(b, args, samples)["train/loss"] for b in (backend, resumed)]
    assert after[0] == pytest.approx(after[1], rel=1e-3, abs=1e-6)
