"""What takes the place of slow code in Megatron and torch computes the same."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("megatron.core")

pytestmark = pytest.mark.megatron


def test_the_norm_of_a_list_is_that_of_all_its_numbers():
    from slime.backends.megatron.fixes.list_kernels import norm_of_list

    parts = [torch.randn(size) for size in (3, 1, 70)]
    norm, _ = norm_of_list(0, parts[0], [parts], False)
    torch.testing.assert_close(norm, torch.cat(parts).norm().view(1))


def test_tensors_that_follow_one_another_are_joined():
    from slime.backends.megatron.fixes.list_kernels import joined

    buffer, other = torch.randn(60), torch.randn(4)
    parts = [buffer[20:40].view(4, 5), other, buffer[:12], buffer[12:20], buffer[45:60], buffer[41:45]]
    runs = joined(parts)
    assert sorted(run.numel() for run in runs) == [4, 19, 40]
    for run in runs:
        run.zero_()
    assert not any(part.any() for part in parts)
    assert buffer[40] != 0
    apart = [buffer.view(6, 10)[:, :5], buffer[5:7]]
    assert all(run is part for run, part in zip(joined(apart), apart, strict=True))


def _trained(make_step, shrink):
    torch.manual_seed(0)
    parameters = [torch.randn(size, requires_grad=True) for size in (5, 3, 40)]
    groups = [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:], "lr": 0.02}]
    adam = torch.optim.AdamW(groups, lr=0.01, fused=True)
    step = make_step(adam)
    for index in range(4):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        if index == 2:
            parameters[1].grad = None
        step(parameters, shrink if index else None)
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("shrink", [None, 3.0])
def test_a_step_over_known_lists_is_that_of_torch(shrink):
    from slime.backends.megatron.optimizer import FusedStep

    def ours(adam):
        fused = FusedStep(adam)

        def step(parameters, by):
            fused.shrink = by
            fused()

        return step

    def theirs(adam):
        def step(parameters, by):
            for parameter in parameters:
                if by and parameter.grad is not None:
                    parameter.grad /= by
            adam.step()

        return step

    for found, expected in zip(_trained(ours, shrink), _trained(theirs, shrink), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_the_hook_of_a_gradient_adds_it_once(overlap, fused):
    from megatron.core.distributed import DistributedDataParallel

    from slime.backends.megatron.fixes import list_kernels

    list_kernels.install()
    ready = []
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros(3), fused
    group = SimpleNamespace(register_grad_ready=lambda found, force: ready.append(found))
    ddp = SimpleNamespace(
        param_to_bucket_group={parameter: group},
        ddp_config=SimpleNamespace(overlap_grad_reduce=overlap),
        force_all_reduce=False,
    )
    hook = DistributedDataParallel._make_backward_post_hook(ddp, parameter)
    for _ in range(2):
        parameter.grad = torch.tensor([1.0, 2.0, 3.0])
        hook()
        assert parameter.grad is None
    # A product that adds to the sum itself leaves a gradient that counts for nothing.
    assert parameter.main_grad.tolist() == ([0.0, 0.0, 0.0] if fused else [2.0, 4.0, 6.0])
    assert parameter.grad_added_to_main_grad == fused
    assert len(ready) == (2 if overlap else 0)


def test_sums_are_known_to_be_zero_until_a_gradient_is_added(monkeypatch):
    from slime.backends.megatron.fixes import list_kernels

    monkeypatch.setitem(list_kernels._THEIRS, "zero", lambda ddp: None)
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    assert not list_kernels.take_empty(parameters)
    for _ in range(2):
        list_kernels.zero_gradients(SimpleNamespace(params_with_grad=parameters))
        assert list_kernels.take_empty(parameters[:1])
        assert not list_kernels.take_empty(parameters)
        assert not list_kernels.take_empty(parameters[1:])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_logits_of_16_bit_factors_are_those_of_megatrons_fp32_product(device):
    from megatron.core.transformer.moe.moe_utils import router_gating_linear

    from slime.backends.megatron.fixes import without_transformer_engine
    from slime.backends.megatron.modules.router_logits import RouterLogits

    without_transformer_engine.install()
    torch.manual_seed(0)
    hidden = torch.randn(300, 64, device=device).bfloat16()
    weight = torch.randn(16, 64, device=device).bfloat16()
    found = {}
    for name, compute in (
        ("ours", RouterLogits.apply),
        ("theirs", lambda hidden, weight: router_gating_linear(hidden, weight, None, torch.float32)),
    ):
        factors = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logits = compute(*factors)
        torch.softmax(logits, dim=-1)[:, 3].sum().backward()
        assert logits.dtype == torch.float32
        found[name] = [logits.detach(), *(factor.grad for factor in factors)]
    torch.testing.assert_close(found["ours"][0], found["theirs"][0], rtol=1e-5, atol=1e-4)
    for ours, theirs in zip(found["ours"][1:], found["theirs"][1:], strict=True):
        assert ours.dtype == torch.bfloat16
        # One of them may round up where the other rounds down.
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-5)
