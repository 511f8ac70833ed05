"""Products of linear layers in FP8: what is rounded and how, both gradients, whole steps, refusals."""

import pytest
import torch
from tiny_model import make_tiny_model
from torch import nn
from trainer_helpers import backend_of, random_samples, train, trainer_args, weights_of

from slime.backends.fp8.linear import FP8Linear, use_fp8
from slime.backends.fp8.scaling import FP8, Scaled, by_rows, product, turned

CPU = torch.device("cpu")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes, one of them zero."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-12, 12, (shape[0], 1), generator=generator).float())
    matrix = torch.randn(*shape, generator=generator) * sizes
    matrix[min(2, shape[0] - 1)] = 0
    return matrix


def read(matrix: Scaled) -> torch.Tensor:
    return matrix.values.float() * matrix.factors


def layer_and_twin(inputs: int, outputs: int, bias: bool = False) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(1)
    plain, layer = nn.Linear(inputs, outputs, bias=bias), nn.Linear(inputs, outputs, bias=bias)
    layer.load_state_dict(plain.state_dict())
    assert use_fp8([nn.ModuleList([layer])], CPU, torch.float32) == 1
    return layer, plain


def gradients(layer: nn.Linear, rows: torch.Tensor, direction: torch.Tensor) -> list[torch.Tensor]:
    rows = rows.clone().requires_grad_()
    out = layer(rows)
    return [out, *torch.autograd.grad((out * direction).sum(), [rows, *layer.parameters()])]


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def test_factors_are_powers_of_two_and_the_largest_of_a_row_uses_the_whole_range():
    matrix = drawn(37, 48)
    scaled = by_rows(matrix)
    assert scaled.values.dtype == FP8
    fraction, _ = torch.frexp(scaled.factors)
    assert (fraction == 0.5).all()
    largest = scaled.values.float().abs().amax(1)[matrix.abs().amax(1) > 0]
    assert (largest >= 224).all() and (largest <= 448).all()
    allowed = torch.maximum(matrix.abs() * 2**-4, scaled.factors * 2**-10)
    assert ((read(scaled) - matrix).abs() <= allowed).all()


@pytest.mark.parametrize("largest", [448.0, 449.0, 224.0, 1.75, 1.7500001, 1.0, 3.0e38, 1e-37, 0.0])
def test_a_row_stays_in_the_range_of_fp8(largest):
    scaled = by_rows(torch.tensor([[largest, -largest, largest / 3, 0.0]]))
    assert scaled.values.float().isfinite().all()
    assert read(scaled)[0, 0] == pytest.approx(largest, rel=2**-4)


def test_what_is_not_finite_is_seen():
    assert read(by_rows(torch.tensor([[1.0, float("inf")], [float("nan"), 1.0]]))).isnan().any(1).all()


def test_a_turned_matrix_holds_the_same_numbers_but_for_those_that_are_tiny_beside_the_largest():
    matrix = by_rows(drawn(37, 48))
    other = turned(matrix)
    assert other.values.shape == (48, 48) and other.values.is_contiguous() and other.factors.dim() == 0
    assert (other.values.float()[:, 37:] == 0).all()
    found, expected = read(other)[:, :37], read(matrix).T
    normal = expected.abs() >= other.factors * 2**-6
    assert torch.equal(found[normal], expected[normal])
    assert ((found - expected).abs() <= other.factors * 2**-10).all()


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_multiplies_what_was_rounded_and_its_gradients_do_too(bias):
    layer, plain = layer_and_twin(48, 64, bias)
    rows, direction = drawn(2 * 19, 48, seed=2).view(2, 19, 48), drawn(2 * 19, 64, seed=3).view(2, 19, 64)
    out, grad_rows, grad_weight, *grad_bias = gradients(layer, rows, direction)
    x, w, g = (by_rows(t.flatten(0, -2)) for t in (rows, plain.weight.detach(), direction))
    added = plain.bias.detach() if bias else 0.0
    torch.testing.assert_close(out.flatten(0, 1), read(x) @ read(w).T + added)
    torch.testing.assert_close(grad_rows.flatten(0, 1), read(g) @ read(turned(w)).T)
    torch.testing.assert_close(grad_weight, read(turned(g)) @ read(turned(x)).T)
    if bias:
        torch.testing.assert_close(grad_bias[0], direction.sum((0, 1)))
    exact = gradients(plain, rows, direction)
    assert all(off(a, b) < 0.05 for a, b in zip((out, grad_rows, grad_weight), exact, strict=False))


def test_a_frozen_weight_gets_no_gradient_and_16_bits_stay_16_bits():
    layer, _ = layer_and_twin(32, 64)
    layer = layer.to(torch.bfloat16).requires_grad_(False)
    rows = torch.randn(5, 32, dtype=torch.bfloat16, requires_grad=True)
    out = layer(rows)
    out.sum().backward()
    assert out.dtype == rows.grad.dtype == torch.bfloat16 and layer.weight.grad is None


def test_a_compiled_layer_computes_the_same_for_any_number_of_tokens():
    layer, _ = layer_and_twin(32, 64)
    compiled = torch.compile(layer, dynamic=True, backend="aot_eager")
    for tokens in (7, 16, 33):
        rows, direction = drawn(tokens, 32, seed=tokens), drawn(tokens, 64, seed=1)
        expected = gradients(layer, rows, direction)
        x = rows.clone().requires_grad_()
        out = compiled(x)
        found = [out, *torch.autograd.grad((out * direction).sum(), [x, layer.weight])]
        torch.testing.assert_close(found, expected)


def test_layers_that_do_not_fit_are_refused_and_gates_left_alone():
    block = nn.ModuleDict({"wide": nn.Linear(32, 64), "gate": nn.Linear(32, 1), "norm": nn.LayerNorm(32)})
    assert use_fp8([block], CPU, torch.float32) == 1
    assert [type(m) for m in block.values()] == [FP8Linear, nn.Linear, nn.LayerNorm]
    with pytest.raises(ValueError, match="odd is 72 x 32, and FP8 products take multiples of 16"):
        use_fp8([nn.ModuleDict({"odd": nn.Linear(32, 72)})], CPU, torch.float32)
    with pytest.raises(ValueError, match="no linear layers that it knows"):
        use_fp8([nn.ModuleDict({"norm": nn.LayerNorm(32)})], CPU, torch.float32)


@pytest.mark.usefixtures("process_group")
def test_steps_in_fp8_stay_near_those_in_full_precision_and_recomputing_changes_nothing(tmp_path):
    folder = make_tiny_model(tmp_path / "model")
    losses, weights = {}, {}
    for name in ("plain", "none", "selective", "full"):
        checkpointing = "none" if name == "plain" else name
        args = trainer_args(folder, fp8_training=name != "plain", activation_checkpointing=checkpointing)
        args = args.replace(loss_type="sft_loss", lr=3e-3, micro_batch_size=4)
        backend = backend_of(args)
        steps = [train(backend, args, random_samples(4, 1)) for _ in range(4 if name != "full" else 1)]
        losses[name], weights[name] = [step["train/loss"] for step in steps], weights_of(backend)
    assert losses["none"] != losses["plain"] and losses["plain"][-1] < 0.9 * losses["plain"][0]
    assert losses["none"] == pytest.approx(losses["plain"], rel=0.02)
    assert losses["selective"] == pytest.approx(losses["none"], rel=1e-6)
    assert losses["full"] == pytest.approx(losses["none"][:1], rel=1e-6)
    torch.testing.assert_close(weights["selective"], weights["none"])
    assert all(tensor.dtype == torch.float32 for tensor in weights["none"].values())


def three_pairs(left: torch.Tensor, right: torch.Tensor) -> list[tuple[Scaled, Scaled]]:
    """As a layer multiplies for its output, its input's gradient and its weight's."""
    a, b = by_rows(left), by_rows(right)
    return [(a, b), (a, turned(by_rows(right[: left.shape[1]]))), (turned(a), turned(a))]


@pytest.mark.gpu
def test_products_on_a_gpu_are_those_of_the_same_values_in_full_precision():
    left, right = drawn(200, 256), drawn(512, 256, seed=1)
    for ours, plain in zip(three_pairs(left.cuda(), right.cuda()), three_pairs(left, right), strict=True):
        for a, b in zip(ours, plain, strict=True):
            assert torch.equal(a.values.cpu().view(torch.uint8), b.values.view(torch.uint8))
            assert torch.equal(a.factors.cpu(), b.factors)
        found, expected = product(*ours, torch.bfloat16).cpu(), product(*plain, torch.bfloat16)
        assert off(found.float(), expected.float()) < 0.01


@pytest.mark.gpu
def test_a_compiled_layer_on_a_gpu_is_compiled_once_for_all_numbers_of_tokens():
    torch._dynamo.reset()
    layer, _ = layer_and_twin(64, 128)
    layer = layer.to("cuda", torch.bfloat16)
    compiled = torch.compile(layer, dynamic=True)
    torch._dynamo.utils.counters.clear()
    for tokens in (50, 77, 160, 333):
        rows = drawn(tokens, 64, seed=tokens).bfloat16().cuda()
        direction = drawn(tokens, 128, seed=1).bfloat16().cuda()
        expected = gradients(layer, rows, direction)
        x = rows.clone().requires_grad_()
        out = compiled(x)
        found = [out, *torch.autograd.grad((out * direction).sum(), [x, layer.weight])]
        for ours, plain in zip(found, expected, strict=True):
            assert off(ours.float(), plain.float()) < 0.02
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
