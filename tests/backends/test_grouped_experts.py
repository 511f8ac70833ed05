"""The operator of gated experts against a slow sum over choices, and inside models of transformers."""

import pytest
import torch
from expert_helpers import outputs, slow, tensors, tiny_mixture

from slime.backends.experts.experts_operator import gated_experts
from slime.backends.fsdp import grouped_experts
from slime.backends.fsdp.expert_parallel import is_experts


def test_operator_and_its_gradients_equal_a_slow_sum():
    for ours, plain in zip(
        outputs(gated_experts, tensors(torch.float64)), outputs(slow, tensors(torch.float64)), strict=True
    ):
        torch.testing.assert_close(ours, plain)


def test_frozen_experts_get_no_gradient_and_tokens_the_same():
    hidden, gate_up, down, chosen, weights = tensors(torch.float64)
    whole = outputs(gated_experts, [hidden, gate_up, down, chosen, weights])
    frozen = [gate_up.detach(), down.detach()]
    out = gated_experts(hidden, *frozen, chosen, weights)
    direction = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    found = torch.autograd.grad((out * direction).sum(), [hidden, weights])
    torch.testing.assert_close(found[0], whole[1])
    torch.testing.assert_close(found[1], whole[4])


def test_fake_shapes_are_those_of_the_operator():
    inputs = tensors(torch.float64)
    torch.library.opcheck(
        torch.ops.slime.gated_experts.default,
        inputs,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.parametrize(("family", "covered"), [("qwen3_moe", True), ("glm4_moe", True), ("gpt_oss", False)])
def test_only_families_with_plain_gated_experts_use_the_operator(family, covered):
    lm = tiny_mixture(family)
    assert grouped_experts.covers(lm) == covered
    found = [module for module in lm.modules() if grouped_experts.computes_same(module)]
    assert bool(found) == covered


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_a_layers_own_experts_and_the_operator_agree(family):
    lm = tiny_mixture(family)
    experts = next(module for module in lm.modules() if is_experts(module))
    hidden = torch.randn(9, 32)
    chosen = torch.rand(9, 4).topk(2).indices
    weights = torch.rand(9, 2)
    own = experts(hidden, chosen, weights)
    ours = gated_experts(hidden, experts.gate_up_proj, experts.down_proj, chosen, weights)
    torch.testing.assert_close(ours, own, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(300, 8, 2, 64, 32, 3), (4096, 128, 8, 2048, 768, 7)])
def test_kernels_agree_with_plain_torch_on_a_gpu(shape):
    tokens, experts, top_k, width, inner, nobody = shape
    half = tensors(torch.bfloat16, "cuda", tokens, experts, top_k, width, inner, nobody)
    full = [x.detach().double() if x.is_floating_point() else x for x in half]
    from slime.backends.experts import experts_operator

    fused = outputs(gated_experts, half)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts_operator, "_steps", lambda hidden, fp8: experts_operator._Plain)
        plain = outputs(gated_experts, [x.requires_grad_() if x.is_floating_point() else x for x in full])
    for ours, exact in zip(fused, plain, strict=True):
        assert torch.isfinite(ours).all()
        assert (ours.double() - exact).norm() / exact.norm() < 0.02
    assert fused[2][nobody].abs().max() == 0  # the expert without tokens has no gradient


@pytest.mark.gpu
def test_compiled_layers_of_a_mixture_train_like_plain_ones():
    import torch.distributed as dist
    from trainer_helpers import meeting_point, random_samples, trainer_args

    from slime.backends.fsdp import create_backend
    from slime.batch.convert import samples_to_batch
    from slime.batch.split import split_for_ranks
    from slime.step.training_step import TrainingStep

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=meeting_point(), rank=0, world_size=1)
    try:
        import tempfile

        import transformers

        config = transformers.Qwen3MoeConfig(
            vocab_size=128, hidden_size=256, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2,
            head_dim=64,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            norms = {}
            for compiled in (False, True):
                args = trainer_args(folder, dtype="bfloat16", compile=compiled)
                backend = create_backend(
                    args, rank=0, world_size=1, device=torch.device("cuda", 0), random_weights=True
                )
                data = split_for_ranks(args, samples_to_batch(args, random_samples(12)), 1)[0]
                norms[compiled] = TrainingStep(backend, args, 0, data).run().summary["train/grad_norm"]
        assert norms[True] == pytest.approx(norms[False], rel=0.05)
        assert norms[True] > 0
    finally:
        dist.destroy_process_group()
