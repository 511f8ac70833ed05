"""The flags of the installed SGLang as `--sglang-<flag>`, cached by its version; never imported here."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from slime.arguments.core.devices import visible_gpus
from slime.arguments.passthrough.program import ProgramFlags, UncheckedFlags, read_flag_rows
from slime.utils.machine.described import described

PREFIX = "--sglang-"
_PACKAGE = Path(__file__).parents[2]
_LAUNCH = _PACKAGE / "engines" / "sglang" / "run_server.py"
_TABLE_MARK = "SGLANG-FLAGS "
_ASK_TIMEOUT_S = 300.0

# Flags that slime sets itself, and what decides them.
OWNED = {
    "model_path": "--hf-checkpoint decides it",
    "host": "slime chooses the address of its engines",
    "port": "slime chooses the ports of its engines",
    "nccl_port": "slime chooses the ports of its engines",
    "grpc_port": "slime speaks HTTP to its engines",
    "tp_size": "--rollout-num-gpus-per-engine decides it",
    "pp_size": "SGLang gives the ranks of all stages the same numbers, so pushes of weights would hang; use "
    "tensor parallelism alone, --rollout-num-gpus-per-engine",
    "nnodes": "--rollout-num-gpus-per-engine and --num-gpus-per-node decide it",
    "node_rank": "slime places the engines",
    "dist_init_addr": "slime places the engines",
    "base_gpu_id": "slime places the engines",
    "gpu_id_step": "slime places the engines",
    "device": "engines use the GPUs that slime gives them, or the CPU where there is none",
    "weight_version": "each weight push sets it",
    "enable_memory_saver": "--offload-rollout decides it",
    "skip_tokenizer_init": "responses must have text",
    "random_seed": "--seed decides it",
    "skip_server_warmup": "slime waits for its engines in its own way",
    **dict.fromkeys(
        ("api_key", "admin_api_key"),
        "each run creates its own if other machines can reach its engines, or uses SLIME_ENGINE_TOKEN",
    ),
}
# Some of these may be in slime launch lines: they are dropped with a log line, not refused.
_REFUSED = {"host", "grpc_port", "pp_size", "device", "weight_version", "skip_tokenizer_init"}
_REFUSED |= {"api_key", "admin_api_key"}
_LEFT_OUT = frozenset(OWNED) - _REFUSED
# Names in other releases -> the equivalent arguments of the installed release, or nothing.
_NEW_NAMES = {
    "--cuda-graph-max-bs": "--cuda-graph-max-bs-decode",
    "--cuda-graph-bs": "--cuda-graph-bs-decode",
    "--disable-piecewise-cuda-graph": "--disable-prefill-cuda-graph",
    "--nsa-prefill-backend": "--dsa-prefill-backend",
    "--nsa-decode-backend": "--dsa-decode-backend",
    "--nsa-topk-backend": "--dsa-topk-backend",
    "--mamba-scheduler-strategy": "--mamba-radix-cache-strategy",
    "--enable-prefill-context-parallel": "--enable-prefill-cp",
    "--fp8-gemm-runner-backend": "--fp8-gemm-backend",
}
RENAMED = {
    **_NEW_NAMES,
    **{new: old for old, new in _NEW_NAMES.items()},
    "--enable-nsa-prefill-context-parallel": "--enable-prefill-cp",
    "--enable-dsa-prefill-context-parallel": "--enable-prefill-cp",
    "--enable-deepep-moe": "--moe-a2a-backend deepep",
    "--enable-flashinfer-cutlass-moe": "--moe-runner-backend flashinfer_cutlass",
    "--enable-flashinfer-trtllm-moe": "--moe-runner-backend flashinfer_trtllm",
    "--enable-triton-kernel-moe": "--moe-runner-backend triton_kernel",
    **dict.fromkeys(("--enable-ep-moe", "--enable-piecewise-cuda-graph", "--enable-nan-detection"), ""),
    **dict.fromkeys(("--piecewise-cuda-graph-max-tokens", "--collect-tokens-histogram"), ""),
    **dict.fromkeys(("--hybrid-kvcache-ratio", "--keep-mm-feature-on-device"), ""),
    "--mm-max-concurrent-calls": "",
}

NOT_HERE = "python"  # the interpreter of a plan on a machine without SGLang


def find_python(given: str | None, environment: str = ".venv-sglang", module: str = "sglang") -> str | None:
    """Return the interpreter that has SGLang: the given one, that of `make sglang-env`, this one, or none."""
    if given is not None:
        return given
    for folder in (Path.cwd(), _PACKAGE.parent):
        python = folder / environment / "bin" / "python"
        if python.exists():
            return str(python)
    return sys.executable if importlib.util.find_spec(module) else None


def need_python(given: str | None, reason: str) -> str:
    """Return the interpreter; `NOT_HERE` where SGLang is missing and only a plan is made."""
    python = find_python(given)
    if described.get() and python in (None, NOT_HERE):
        return NOT_HERE
    if python is None:
        raise ValueError(
            f"{reason} needs SGLang, which is not installed: run `make sglang-env`, or give --sglang-python."
        )
    if not Path(python).is_file():
        raise ValueError(f"--sglang-python is {python}: no such file.")
    return python


def server_flags(python: str) -> ProgramFlags:
    """Return the flags of the SGLang that `python` has; cached per version: asking takes half a minute."""
    if python == NOT_HERE:
        return ProgramFlags("SGLang", PREFIX, OWNED, UncheckedFlags(), left_out=_LEFT_OUT)
    cache = _cache_folder() / f"sglang-flags-{_installed_version(python)}.json"
    if not cache.exists():
        part = cache.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(_ask(python)))
        part.rename(cache)
    table = json.loads(cache.read_text())
    flags = read_flag_rows(table["flags"])
    return ProgramFlags(f"SGLang {table['version']}", PREFIX, OWNED, flags, RENAMED, _LEFT_OUT)


@functools.cache
def _installed_version(python: str) -> str:
    code = "import importlib.metadata as m; print(m.version('sglang'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1]
        raise ValueError(f"--sglang-python is {python}: it has no SGLang ({why}).")
    return done.stdout.strip()


def _ask(python: str) -> dict[str, Any]:
    device = [] if visible_gpus(here=True) else ["--device", "cpu"]
    command = [python, "-P", str(_LAUNCH), "--print-flags", *device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S)
    for line in done.stdout.splitlines():
        if line.startswith(_TABLE_MARK):
            table: dict[str, Any] = json.loads(line.removeprefix(_TABLE_MARK))
            return table
    raise ValueError(f"--sglang-python is {python}: SGLang did not print its flags:\n{done.stderr[-2000:]}")


def _cache_folder() -> Path:
    folder = Path.home() / ".cache" / "slime"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    except OSError:  # a home that cannot be written
        return Path(tempfile.gettempdir())
