"""Small mixtures of experts for tests, and their slow sum over choices."""

import torch
import torch.nn.functional as F


def slow(hidden, gate_up, down, chosen, weights):
    rows = []
    for token, experts, shares in zip(hidden, chosen.tolist(), weights, strict=True):
        total = torch.zeros_like(token)
        for expert, share in zip(experts, shares, strict=True):
            if expert < len(gate_up):
                gate, up = (gate_up[expert] @ token).chunk(2)
                total = total + share * (down[expert] @ (F.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)


def tensors(dtype, device="cpu", tokens=37, experts=5, top_k=3, width=16, inner=8, nobody=2):
    """Routing in which one expert gets no token, and some choices fall on none of the experts."""
    torch.manual_seed(0)
    made = dict(dtype=dtype, device=device)
    hidden = torch.randn(tokens, width, **made)
    gate_up = torch.randn(experts, 2 * inner, width, **made) * width**-0.5
    down = torch.randn(experts, width, inner, **made) * inner**-0.5
    scores = torch.rand(tokens, experts + 1, device=device)
    scores[:, nobody] = -1.0
    chosen = scores.topk(top_k).indices
    weights = torch.rand(tokens, top_k, **made)
    return [x.requires_grad_() for x in (hidden, gate_up, down)] + [chosen, weights.requires_grad_()]


def outputs(function, inputs):
    out = function(*inputs)
    direction = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)
    grads = torch.autograd.grad((out * direction).sum(), [x for x in inputs if x.is_floating_point()])
    return [out, *grads]


def tiny_mixture(family, **sizes):
    import transformers

    shared = dict(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
    )
    if family == "qwen3_moe":
        plain = dict(moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, head_dim=16)
        config = transformers.Qwen3MoeConfig(**shared | plain | sizes)
    elif family == "glm4_moe":
        config = transformers.Glm4MoeConfig(
            **shared, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
            topk_group=1, first_k_dense_replace=1, head_dim=16,
        )  # fmt: skip
    else:
        config = transformers.GptOssConfig(
            **shared, intermediate_size=16, num_local_experts=4, num_experts_per_tok=2, head_dim=16
        )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
