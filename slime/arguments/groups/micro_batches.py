"""Rules of micro-batches: they are filled by tokens, up to a limit that fits the device, by default."""

import contextlib
from collections.abc import Mapping
from typing import Any

from slime.arguments.core.devices import gpu_bytes
from slime.arguments.core.draft import Draft
from slime.arguments.groups.run import resumed_settings
from slime.catalog.backends import BACKENDS
from slime.utils.models.model_config import read_config

ON_CPU = 4096  # tokens: more per pass gains no speed, and a small model stays below 2 GiB
LEAST, MOST = 1024, 16384
_ROUND = 1024
_USED = 0.6  # share of a GPU's memory; the rest is for an engine's remains, collectives and fragments
_MASTER, _GRADIENT, _MOMENTS = 4, 4, 8  # bytes of one parameter
_LOGITS = 1 << 30  # one block of them with its gradient
_PACKING = ("use_dynamic_batch_size", "max_tokens_per_gpu", "micro_batch_size")


def micro_batches(draft: Draft) -> None:
    """Fill micro-batches by tokens, many times faster for short samples, unless a flag forbids it."""
    if draft.use_dynamic_batch_size is None:
        by_samples = draft.was_given("micro_batch_size")
        because = "micro_batch_size is given" if by_samples else "the default (--no-use-dynamic-batch-size)"
        draft.derive("use_dynamic_batch_size", not by_samples, because)
    if draft.balance_by_flops and not draft.use_dynamic_batch_size:
        raise ValueError("--balance-by-flops balances by tokens; it needs --use-dynamic-batch-size.")
    if draft.balance_by_flops:
        draft.derive("balance_data", True, "balance_by_flops")


def token_limit(draft: Draft) -> None:
    """Derive --max-tokens-per-gpu, if it is not given, from the GPU's memory and the model's size."""
    if not draft.use_dynamic_batch_size or draft.max_tokens_per_gpu is not None:
        return
    memory, config = gpu_bytes(), _text_config(draft.hf_checkpoint)
    if memory is None or not config:
        why = "no GPU visible" if memory is None else "the model's config is not on this machine"
        draft.derive("max_tokens_per_gpu", ON_CPU, f"{why}: the constant for a CPU")
        return
    ranks = draft.actor_num_nodes * (draft.actor_num_gpus_per_node or 1)
    split = draft.tensor_model_parallel_size * draft.pipeline_model_parallel_size
    tokens = tokens_that_fit(
        config,
        memory,
        item_bytes=4 if draft.dtype == "float32" else 2,
        ranks=ranks,
        copies_over=split if BACKENDS[draft.train_backend].has_pipeline else ranks,
        recompute=draft.activation_checkpointing,
        trained=not draft.lora_rank,
    )
    why = f"fits next to the model in a GPU of {memory / (1 << 30):.0f} GiB"
    draft.derive("max_tokens_per_gpu", tokens, why)


def tokens_that_fit(
    config: Mapping[str, Any],
    memory: int,
    *,
    item_bytes: int,
    ranks: int,
    copies_over: int,
    recompute: str,
    trained: bool = True,
) -> int:
    """Return the tokens whose activations fit into a GPU next to its share of weights, gradients and moments.

    This is a rough, safe count; the plan before the start makes a finer one. `copies_over`: ranks over which
    weights and gradients are spread; moments are spread over all `ranks`.
    """
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    width = config.get("intermediate_size") or 4 * hidden
    experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts")
    each = config.get("moe_intermediate_size") or width
    chosen = config.get("num_experts_per_tok") or 1
    block = 4 * hidden * hidden + 3 * hidden * (each * experts if experts else width)
    ends = 1 if config.get("tie_word_embeddings") else 2
    parameters = layers * block + ends * hidden * config.get("vocab_size", 0)
    static = parameters * (_MASTER + item_bytes + (_GRADIENT if trained else 0)) / copies_over
    static += parameters * (_MOMENTS if trained else 0) / ranks
    kept = 16 * hidden + 3 * (each * chosen if experts else width)  # numbers per token and layer
    per_token = item_bytes * (kept + layers * hidden if recompute == "full" else layers * kept)
    tokens = int((_USED * memory - static - _LOGITS) / per_token)
    return max(LEAST, min(MOST, tokens // _ROUND * _ROUND))


def _text_config(model: str | None) -> dict[str, Any]:
    """Return the sizes in a model's config.json; empty if it is not on this machine, or has none."""
    config: dict[str, Any] = {}
    with contextlib.suppress(ValueError):  # a damaged one is reported where it is needed
        config = read_config(model) if model else {}
    config = config.get("text_config") or config
    return config if {"hidden_size", "num_hidden_layers"} <= config.keys() else {}


def keep_micro_batches(draft: Draft) -> None:
    """Fill micro-batches as the resumed run did: packing decides the last bits of what is trained."""
    settings = resumed_settings(draft)
    had = {name: settings[name]["value"] for name in _PACKING if name in settings}
    by_user = draft.was_given("use_dynamic_batch_size") or draft.was_given("micro_batch_size")
    if by_user and not (draft.use_dynamic_batch_size and had.get("use_dynamic_batch_size")):
        return
    for name, value in had.items():
        if not draft.was_given(name):
            draft.derive(name, value, "the run that is resumed had it")
