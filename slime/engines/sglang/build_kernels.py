"""Builds the CUDA kernels of a model in parallel while its server starts; run by SGLang's interpreter.

SGLang and FlashInfer compile each kernel when a layer first needs it, one after the other: with empty caches
that is more than half of a start. This script calls the same functions in parallel, so that the server finds
the kernels in the caches, or waits for the ones being built (both lock them). It is optional: the server
compiles whatever is not built here.
"""

import argparse
import concurrent.futures
import functools
import importlib
import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

_CHECKSUMS = "--checksums"
_MIN_CORES = 4  # with fewer cores the server itself would have to wait
# Sizes for SGLang's checksum kernel, which is compiled for odd numbers of tiles and multiples of 16.
_TILE_WORDS = 8192


class Call(NamedTuple):
    """A function of the installed version that compiles a kernel, or checks whether it can."""

    module: str
    name: str
    arguments: tuple[Any, ...]


def kernels(
    config: dict[str, Any], dtype: Any, index_dtype: Any, ranks: int, cache_bytes: int
) -> dict[str, list[Call]]:
    """Return the kernels of a decoder, each with its calls in the layouts of SGLang's package."""
    config = config.get("text_config", config)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rotary_dim = int(head_dim * (config.get("partial_rotary_factor") or 1))
    key_heads = max(1, (config.get("num_key_value_heads") or heads) // ranks)
    row_bytes = key_heads * head_dim * cache_bytes
    old, new = "sglang.jit_kernel", "sglang.kernels.ops"
    return {
        "norm": [Call("flashinfer.norm", "get_norm_module", ())],
        "query and key norm": [
            Call(f"{package}.norm", "can_use_fused_inplace_qknorm", (head_dim, dtype))
            for package in (old, f"{new}.layernorm")
        ],
        "rotary positions": [
            Call(f"{new}.attention.rope", "_jit_fused_rope_module", (True, rotary_dim, dtype, dtype)),
            Call(f"{old}.rope", "_jit_fused_rope_module", (True, rotary_dim, dtype)),
        ],
        "activation": [
            Call(f"{package}.activation", "_jit_activation_module", (dtype,))
            for package in (old, f"{new}.activation")
        ],
        "key cache": [
            Call(f"{package}.kvcache", "can_use_store_cache", (row_bytes,))
            for package in (old, f"{new}.kvcache")
        ],
        "positions": [
            Call(f"{package}.clamp_position", "_jit_clamp_position_module", (index_dtype,))
            for package in (old, f"{new}.attention")
        ],
    }


def find(calls: list[Call]) -> Callable[[], Any] | None:
    """Return the first call that the installed version supports; None: it supports none."""
    for call in calls:
        try:
            function = getattr(importlib.import_module(call.module), call.name)
            inspect.signature(inspect.unwrap(function)).bind(*call.arguments)
        except Exception:  # missing module, name or signature, or a package that cannot be imported here
            continue
        return functools.partial(function, *call.arguments)
    return None


def build_all(wanted: dict[str, list[Call]]) -> dict[str, str]:
    """Build in parallel; report for each kernel how long it took, or why it failed."""
    fix_target()

    def build(calls: list[Call]) -> str:
        function, start = find(calls), time.monotonic()
        if function is None:
            return "not in this version"
        try:
            function()
        except Exception as problem:  # any error of a compiler or loader: the server tries again itself
            return f"{type(problem).__name__}: {str(problem)[:200]}"
        return f"{time.monotonic() - start:.1f} s"

    with concurrent.futures.ThreadPoolExecutor(len(wanted)) as pool:
        return dict(zip(wanted, pool.map(build, wanted.values()), strict=True))


def fix_target() -> None:
    """Set the target of compilation once: SGLang sets and unsets it, which is not safe in parallel."""
    for package in ("sglang.jit_kernel.utils", "sglang.kernels.jit.utils"):
        try:
            arch = importlib.import_module(package).get_jit_cuda_arch()
            os.environ.setdefault("TVM_FFI_CUDA_ARCH_LIST", arch.target_name)
        except (ImportError, AttributeError):
            continue


def build_checksums() -> None:
    """Build the kernels of the server's weight checksums by running them."""
    import torch
    from sglang.kernels.ops.memory.gpu_tensor_hash import gpu_tensor_hash

    for tiles in (3, 16):
        gpu_tensor_hash(torch.zeros(tiles * _TILE_WORDS, device="cuda"))


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--kv-cache-dtype", default="auto")
    options, _ = parser.parse_known_args(words)
    if len(os.sched_getaffinity(0)) < _MIN_CORES or not (options.model_path / "config.json").is_file():
        return
    # Alone: it needs the device, whose free memory the server measures a little later.
    checksums = subprocess.Popen([sys.executable, "-P", __file__, _CHECKSUMS], stderr=subprocess.DEVNULL)
    import torch

    config = json.loads((options.model_path / "config.json").read_text())
    dtype = torch.bfloat16 if options.dtype == "auto" else getattr(torch, options.dtype)
    start = time.monotonic()
    cache_bytes = 1 if options.kv_cache_dtype.startswith("fp8") else dtype.itemsize
    results = build_all(kernels(config, dtype, torch.int64, options.tp_size, cache_bytes))
    results["checksums"] = f"code {checksums.wait()}"
    listed = ", ".join(f"{name} {text}" for name, text in results.items())
    print(f"kernels built during the start in {time.monotonic() - start:.1f} s: {listed}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == [_CHECKSUMS]:
        build_checksums()
    else:
        main(sys.argv[1:])
