"""GPUs and models for which runs can be planned; rates are those of large operations."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class GpuRow:
    """The speed of one GPU. `network`: its share of the bandwidth to other machines, in bytes per second."""

    flops: float  # bf16 matrix products
    memory: float  # bytes per second
    capacity: float  # bytes
    link: float  # to the other GPUs of its machine, each way
    network: float
    per_node: int = 8

    def among(self, gpus: int) -> GpuRow:
        """Return the rates of this GPU as one of `gpus` that work on one run.

        All wait for the slowest one, and no layout is perfect: published steps on 16 GPUs and more take about
        twice as long as the rates of a single GPU allow. Between 1 and 16 GPUs the factor is interpolated.
        """
        slower = 1 + (_MANY_GPUS - 1) * min(1.0, math.log2(max(1, gpus)) / 4)
        rates = {name: getattr(self, name) / slower for name in ("flops", "memory", "link", "network")}
        return replace(self, **rates)


_MANY_GPUS = 2.2  # fitted on two published steps (benchmarks/scaling.py), tested on the others

GPUS = {
    "h200": GpuRow(flops=760e12, memory=3.9e12, capacity=139 * 2**30, link=360e9, network=40e9),
    "h100": GpuRow(flops=700e12, memory=2.7e12, capacity=79 * 2**30, link=360e9, network=40e9),
    "h20": GpuRow(flops=125e12, memory=3.2e12, capacity=95 * 2**30, link=360e9, network=40e9),
    "a100": GpuRow(flops=250e12, memory=1.6e12, capacity=79 * 2**30, link=240e9, network=20e9),
    "l40s": GpuRow(flops=280e12, memory=0.70e12, capacity=45 * 2**30, link=20e9, network=10e9),
    "rtx-4090": GpuRow(flops=127e12, memory=0.82e12, capacity=24 * 2**30, link=20e9, network=10e9),
    "b200": GpuRow(flops=1700e12, memory=6.4e12, capacity=178 * 2**30, link=720e9, network=40e9),
}


def closest_gpu(name: str, capacity: float) -> GpuRow:
    """Return the row whose name the device name contains ("NVIDIA H200"), else the closest by memory."""
    words = name.lower().replace(" ", "-")
    named = [row for key, row in GPUS.items() if key in words]
    return named[0] if named else min(GPUS.values(), key=lambda row: abs(row.capacity - capacity))


def _dense(
    hidden: int, layers: int, heads: int, kv: int, feed_forward: int, vocab: int, tied: bool = False
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": 128,
        "intermediate_size": feed_forward,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


def _experts(
    dense: dict[str, Any], width: int, count: int, shared: int = 0, first: int = 0
) -> dict[str, Any]:
    sizes = {"moe_intermediate_size": width, "num_experts": count, "num_experts_per_tok": 8}
    return dense | sizes | {"n_shared_experts": shared, "first_k_dense_replace": first}


def _latent(query_rank: int, key: int, value: int) -> dict[str, Any]:
    """Return the sizes of an attention whose keys and values come from a vector of 512 numbers (MLA)."""
    ranks = {"q_lora_rank": query_rank, "kv_lora_rank": 512}
    return ranks | {"qk_nope_head_dim": key, "qk_rope_head_dim": 64, "v_head_dim": value}


_QWEN3 = 151_936
_DEEPSEEK = (
    _experts(_dense(7168, 61, 128, 128, 18432, 129_280), 2048, 256, shared=1, first=3)
    | _latent(1536, 128, 128)
    | {"quantization_config": {"quant_method": "fp8"}}  # as it is published
)
# The part of config.json that costs depend on; `--model` also takes a folder with the whole file.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _dense(1024, 28, 16, 8, 3072, _QWEN3, tied=True),
    "qwen3-1.7b": _dense(2048, 28, 16, 8, 6144, _QWEN3, tied=True),
    "qwen3-4b": _dense(2560, 36, 32, 8, 9728, _QWEN3, tied=True),
    "qwen3-8b": _dense(4096, 36, 32, 8, 12288, _QWEN3),
    "qwen3-14b": _dense(5120, 40, 40, 8, 17408, _QWEN3),
    "qwen3-32b": _dense(5120, 64, 64, 8, 25600, _QWEN3),
    "qwen2.5-7b": _dense(3584, 28, 28, 4, 18944, 152_064),
    "qwen2.5-72b": _dense(8192, 80, 64, 8, 29568, 152_064),
    "llama-3.1-8b": _dense(4096, 32, 32, 8, 14336, 128_256),
    "llama-3.1-70b": _dense(8192, 80, 64, 8, 28672, 128_256),
    "qwen3-30b-a3b": _experts(_dense(2048, 48, 32, 4, 6144, _QWEN3), 768, 128),
    "qwen3-235b-a22b": _experts(_dense(4096, 94, 64, 4, 12288, _QWEN3), 1536, 128),
    "glm-4.5-air": _experts(_dense(4096, 46, 96, 8, 10944, 151_552), 1408, 128, shared=1, first=1),
    "glm-4.5": _experts(_dense(5120, 92, 96, 8, 12288, 151_552), 1536, 160, shared=1, first=3),
    "glm-4-9b-0414": _dense(4096, 40, 32, 2, 13696, 151_552),
    "deepseek-v3": _DEEPSEEK,
    "deepseek-r1": _DEEPSEEK,
    "glm-5.2": _experts(_dense(6144, 78, 64, 64, 12288, 154_880), 2048, 256, shared=1, first=3)
    | _latent(2048, 192, 256),
}


def known_model(name: str) -> dict[str, Any] | None:
    """Return the row of a hub name such as "Qwen/Qwen3-8B" or "zai-org/GLM-5.2-FP8"; None: there is none."""
    key = name.rpartition("/")[2].lower()
    fp8 = key.endswith("-fp8")
    row = MODELS.get(key.removesuffix("-fp8"))
    return row and row | ({"quantization_config": {"quant_method": "fp8"}} if fp8 else {})
