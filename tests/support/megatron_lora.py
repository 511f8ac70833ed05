"""Shared by tests of adapters on Megatron: GRPO steps with adapters, and the obvious version of a step."""

import torch
from megatron_helpers import GRPO, end_groups, exported, megatron_args, training_step
from trainer_helpers import random_samples

LORA = dict(lora_rank=3, lora_alpha=6.0, optimizer="sgd", lr=0.5, weight_decay=0.0)
_RATE = 0.05  # gradients of `simple_steps` are large
ATTENTION = dict(lora_target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])


def adapters_of(backend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for bucket in backend.export_adapter() for name, tensor in bucket}


def lora_cases(rank: int, world_size: int, cases: dict[str, tuple[str, dict]], folder: str) -> dict:
    """For each (model, settings): losses and norms of three steps, the adapters and the merged model."""
    from slime.backends import fsdp, megatron

    results = {}
    for name, (model, settings) in cases.items():
        settings = dict(settings)
        module = fsdp if settings.pop("fsdp", False) else megatron
        saved = settings.pop("save", None)
        args = megatron_args(model, **(GRPO | LORA | settings))
        end_groups()
        backend = module.create_backend(args, rank=rank, world_size=world_size, device="cpu")
        result = {"before": exported(backend), "start": adapters_of(backend)}
        report = training_step(backend, args, random_samples(5, 3, vocab=127)).run()
        result["steps"] = [(s["train/loss"], s["train/grad_norm"]) for s in report.steps]
        result["kl"] = [s["train/kl_loss"] for s in report.steps]
        results[name] = result | {"adapters": adapters_of(backend), "after": exported(backend)}
        results[name]["config"] = backend.adapter_config()
        if saved:
            backend.save_hf(f"{folder}/{saved}")
    return results


def simple_steps(rank: int, world_size: int, model: str, settings: dict) -> dict:
    """Two SGD steps on the negative log-probs of all response tokens, whose mean is over samples."""
    from slime.backends.base import Denominators, Loss
    from slime.backends.megatron import create_backend
    from slime.backends.shared.microbatch import build_micro_batches
    from slime.batch.convert import samples_to_batch

    args = megatron_args(model, **(GRPO | LORA | dict(clip_grad=0.0, lr=_RATE) | settings))
    backend = create_backend(args, rank=rank, world_size=world_size, device="cpu")
    samples = random_samples(2, 2, vocab=127)
    mbs = build_micro_batches(samples_to_batch(args, samples), [[0, 1], [2, 3]])
    start = adapters_of(backend)
    loss = Loss(lambda out, mb: (-out.log_probs.sum(), {}), masked=False)
    norms = [backend.train_step(mbs, loss, Denominators(4, 1)).grad_norm for _ in range(2)]
    return {"start": start, "norms": norms, "adapters": adapters_of(backend)}


def obvious_steps(model: str, start: dict[str, torch.Tensor]) -> dict:
    """`simple_steps` by autograd through transformers' model, its weights written out as W + s * B A."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    factors = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
    scale, norms = LORA["lora_alpha"] / LORA["lora_rank"], []
    for _ in range(2):
        weights = _with_adapters(dict(lm.named_parameters()), factors, scale)
        total = torch.zeros(())
        for sample in random_samples(2, 2, vocab=127):
            ids = torch.tensor(sample.tokens)
            logits = torch.func.functional_call(lm, weights, (ids[None],)).logits[0, :-1]
            rows = torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), ids[1:]]
            total = total - rows[-sample.response_length :].sum() / 4
        gradients = torch.autograd.grad(total, list(factors.values()))
        norms.append(torch.stack([g.norm() for g in gradients]).norm().item())
        with torch.no_grad():
            for tensor, gradient in zip(factors.values(), gradients, strict=True):
                tensor -= _RATE * gradient
    return {"norms": norms, "adapters": {name: tensor.detach() for name, tensor in factors.items()}}


def _with_adapters(weights: dict, factors: dict, scale: float) -> dict:
    def added(layer):
        a, b = (factors.get(f"base_model.model.{layer}.{factor}.weight") for factor in ("lora_A", "lora_B"))
        return 0.0 if a is None else scale * (b @ a)

    def merged(name, weight):
        layer, _, leaf = name.rpartition(".")
        if leaf == "weight":
            return weight + added(layer)
        numbers = range(len(weight)) if weight.ndim == 3 else ()
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(leaf, ())
        products = [[added(f"{layer}.{e}.{part}") for part in parts] for e in numbers]
        if not any(torch.is_tensor(p) for row in products for p in row):
            return weight
        return weight + torch.stack([torch.cat(row) for row in products])

    return {name: merged(name, weight) for name, weight in weights.items()}
