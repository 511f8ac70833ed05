"""Experts in FP8: each one multiplies as FP8 linear layers do, near float64; others are refused by name."""

import pytest
import torch
import torch.nn.functional as F
from expert_helpers import outputs, slow, tensors, tiny_mixture
from trainer_helpers import backend_of, random_samples, train, trainer_args

from slime.algorithms.model_parts import decoder_layers
from slime.backends.experts.experts_operator import gated_experts
from slime.backends.experts.fp8_experts import _Layout
from slime.backends.fp8.linear import _Product
from slime.backends.fsdp import grouped_experts

CPU = torch.device("cpu")


def fp8_experts(*inputs):
    return gated_experts(*inputs, fp8=True)


def linear_layers(hidden, gate_up, down, chosen, weights):
    """Each expert as two FP8 linear layers, on the tokens that chose it, in the order of the tokens."""
    total = torch.zeros_like(hidden)
    for expert in range(len(gate_up)):
        token, number = torch.where(chosen == expert)
        if len(token):
            gate, up = _Product.apply(hidden[token], gate_up[expert]).chunk(2, dim=1)
            gated = F.silu(gate) * up * weights[token, number, None]
            total = total.index_add(0, token, _Product.apply(gated, down[expert]))
    return total


def off(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def inputs_of(**sizes):
    """Tokens, experts and routing weights of very different sizes."""
    hidden, gate_up, down, chosen, weights = tensors(
        torch.float32, **dict(tokens=70, width=32, inner=16) | sizes
    )
    sizes = torch.exp2(torch.arange(len(hidden)) % 9 - 4.0)[:, None]
    hidden = (hidden.detach() * sizes).requires_grad_()
    return [hidden, gate_up, down, chosen, weights]


@pytest.mark.parametrize("sizes", [{}, {"experts": 1, "top_k": 1, "nobody": 1}, {"tokens": 3, "top_k": 1}])
def test_each_expert_multiplies_as_fp8_linear_layers_do_and_its_gradients_too(sizes):
    inputs = inputs_of(**sizes)
    for ours, plain in zip(outputs(fp8_experts, inputs), outputs(linear_layers, inputs), strict=True):
        assert torch.isfinite(ours).all()
        if plain.any():
            # Sums in another order move a few numbers to the next one of FP8.
            assert off(ours, plain) < 2e-3
        else:
            assert not ours.any()


def test_output_and_gradients_are_those_of_float64_within_the_error_of_fp8():
    inputs = inputs_of(tokens=200, experts=4, width=64, inner=48)
    exact = [x.detach().double().requires_grad_() if x.is_floating_point() else x for x in inputs]
    for ours, plain in zip(outputs(fp8_experts, inputs), outputs(slow, exact), strict=True):
        assert 1e-3 < off(ours, plain) < 0.12


def test_experts_without_tokens_get_no_gradient_and_tokens_keep_their_order():
    inputs = inputs_of()
    _out, _hidden, gate_up, down, _weights = outputs(fp8_experts, inputs)
    assert not gate_up[2].any() and not down[2].any() and gate_up[1].any()
    hidden, *matrices, chosen, weights = inputs
    turned = fp8_experts(hidden.flip(0), *matrices, chosen.flip(0), weights.flip(0)).flip(0)
    torch.testing.assert_close(turned, fp8_experts(*inputs))


def test_the_size_of_one_expert_does_not_round_another():
    inputs = inputs_of()
    larger = inputs[1].detach().clone()
    larger[0] *= 2.0**14
    plain, changed = (
        outputs(fp8_experts, [inputs[0], w.requires_grad_(), *inputs[2:]]) for w in (inputs[1], larger)
    )
    torch.testing.assert_close(plain[2][1:], changed[2][1:])
    torch.testing.assert_close(plain[3][1:], changed[3][1:])


def test_what_is_not_finite_is_seen_in_its_token_and_its_experts_only():
    hidden, gate_up, down, chosen, weights = inputs_of()
    broken = hidden.detach().clone()
    broken[7, 3] = float("inf")
    out, _grad, grad_gate_up, *_ = outputs(
        fp8_experts, [broken.requires_grad_(), gate_up, down, chosen, weights]
    )
    assert out.isnan().any(1).nonzero().flatten().tolist() == [7]
    touched = {expert for expert in chosen[7].tolist() if expert < len(gate_up)}
    assert set(grad_gate_up.isnan().any(2).any(1).nonzero().flatten().tolist()) == touched


def test_frozen_experts_and_fake_shapes_are_those_of_16_bits():
    inputs = inputs_of()
    hidden, gate_up, down, chosen, weights = inputs
    whole = outputs(fp8_experts, inputs)
    frozen = [hidden, gate_up.detach(), down.detach(), chosen, weights]
    out = fp8_experts(*frozen)
    direction = torch.linspace(-1, 1, out.numel()).view_as(out)
    found = torch.autograd.grad((out * direction).sum(), [hidden, weights])
    torch.testing.assert_close(found, (whole[1], whole[4]))
    torch.library.opcheck(
        torch.ops.slime.gated_experts.default,
        (*inputs, True),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_places_of_a_sum_over_rows_are_padded_by_expert():
    layout = _Layout.of(torch.tensor([3, 3, 20, 36], dtype=torch.int32), 40)
    assert layout.ends.tolist() == [16, 32, 64, 80] and len(layout.rows) % 16 == 0
    rows = layout.rows.tolist()
    assert rows[:17] == [0, 1, 2, *[-1] * 14] and rows[32:49] == list(range(3, 20))
    assert rows[64:80] == list(range(20, 36)) and set(rows[80:]) == {-1}
    for tokens in range(0, 70):
        full = _Layout.of(torch.tensor([tokens // 3, tokens], dtype=torch.int32), tokens)
        assert full.ends[-1] <= len(full.rows)
        assert sorted(row for row in full.rows.tolist() if row >= 0) == list(range(tokens))


def test_families_with_other_experts_and_odd_sizes_are_refused():
    lm = tiny_mixture("gpt_oss")
    with pytest.raises(ValueError, match="--fp8-training: GptOssExperts of gpt_oss is not silu"):
        grouped_experts.use_fp8(lm, decoder_layers(lm), CPU)
    lm = tiny_mixture("qwen3_moe")
    grouped_experts.use_fp8(lm, decoder_layers(lm), CPU)
    experts = next(module for module in lm.modules() if grouped_experts.computes_same(module))
    assert experts.forward.__func__ is grouped_experts._forward_fp8
    experts.down_proj = torch.nn.Parameter(torch.zeros(4, 32, 24))
    with pytest.raises(ValueError, match="experts of qwen3_moe are 32 x 24, and multiples of 16 are needed"):
        grouped_experts.use_fp8(lm, decoder_layers(lm), CPU)


@pytest.mark.usefixtures("process_group")
def test_steps_of_a_mixture_in_fp8_stay_near_those_in_full_precision(tmp_path):
    import transformers

    transformers.Qwen3MoeConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, head_dim=16, initializer_range=0.1,
    ).save_pretrained(tmp_path)  # fmt: skip
    losses = {}
    for name in ("plain", "fp8", "selective"):
        checkpointing = "selective" if name == "selective" else "none"
        args = trainer_args(tmp_path, fp8_training=name != "plain", activation_checkpointing=checkpointing)
        args = args.replace(loss_type="sft_loss", lr=3e-3, micro_batch_size=4)
        backend = backend_of(args, random_weights=True)
        losses[name] = [train(backend, args, random_samples(4, 1))["train/loss"] for _ in range(4)]
    assert losses["plain"][-1] < 0.9 * losses["plain"][0] and losses["fp8"] != losses["plain"]
    assert losses["fp8"] == pytest.approx(losses["plain"], rel=0.02)
    assert losses["selective"] == pytest.approx(losses["fp8"], rel=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(300, 8, 2, 64, 32, 3), (4096, 128, 8, 2048, 768, 7)])
def test_experts_on_a_gpu_are_those_of_the_same_values_in_full_precision(shape):
    tokens, experts, top_k, width, inner, nobody = shape
    half = tensors(torch.bfloat16, "cuda", tokens, experts, top_k, width, inner, nobody)
    found = outputs(fp8_experts, half)
    emulated = outputs(
        fp8_experts,
        [x.detach().cpu().float().requires_grad_() if x.is_floating_point() else x.cpu() for x in half],
    )
    exact = outputs(gated_experts, half)
    for ours, plain, other in zip(found, emulated, exact, strict=True):
        assert torch.isfinite(ours).all()
        # The first product ends in 16 bits on a GPU, which moves some gated values to the next one of FP8.
        assert off(ours.cpu(), plain) < 0.04
        assert off(ours, other) < 0.12
    assert found[2][nobody].abs().max() == 0


@pytest.mark.gpu
def test_kernels_write_the_numbers_that_a_cpu_computes():
    from slime.backends.experts import experts_kernels
    from slime.backends.experts.experts_operator import _Plain
    from slime.backends.fp8 import fp8_kernels
    from slime.backends.fp8.scaling import by_rows, turn

    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(70, 3072, generator=generator) * torch.exp2(torch.arange(70) % 20 - 10.0)[:, None]
    matrix[2] = 0
    broken = matrix.clone()
    broken[3, 5], broken[4, 2900] = float("inf"), float("nan")
    for source in (matrix, matrix.bfloat16()):
        values, factors = fp8_kernels.by_rows(source.cuda())
        expected = by_rows(source)
        assert torch.equal(values.cpu().view(torch.uint8), expected.values.view(torch.uint8))
        assert torch.equal(factors.cpu(), expected.factors)
    assert fp8_kernels.by_rows(broken.cuda())[1].isnan().flatten().nonzero().flatten().tolist() == [3, 4]
    scaled = by_rows(matrix)
    index = torch.randint(-1, 70, (208,), generator=generator, dtype=torch.int32)
    for picked, rows in ((index, 208), (None, 70)):
        shares = torch.exp2(-torch.randint(0, 9, (rows, 1), generator=generator).float())
        picked = picked if picked is None else picked.cuda()
        found = fp8_kernels.turn(scaled.values.cuda(), shares.cuda(), picked, -(-rows // 16) * 16)
        expected = turn(scaled.values, shares, picked if picked is None else picked.cpu())
        assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))
    both, grad = torch.randn(40, 2 * 768, generator=generator), torch.randn(40, 768, generator=generator)
    weights, order = torch.rand(10, 4, generator=generator), torch.randperm(40, generator=generator).int()
    on_gpu = [x.cuda() for x in (both, weights, order, grad)]
    wide, narrow, by_choice = _Plain.gate_backward(both, weights, order, grad)
    grads, gated, sums = experts_kernels.gate_backward(*on_gpu, fp8=True)
    torch.testing.assert_close(sums.cpu(), by_choice)
    for pair, plain in (
        (experts_kernels.gate(*on_gpu[:3], fp8=True), narrow),
        (grads, wide),
        (gated, narrow),
    ):
        expected = by_rows(plain)
        assert torch.equal(pair[1].cpu(), expected.factors)
        # Sigmoids of a GPU differ in their last bits, which moves few numbers to the next one of FP8.
        same = (pair[0].cpu().view(torch.uint8) == expected.values.view(torch.uint8)).float().mean()
        assert same > 0.99
