"""The command line of one embedded engine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from slime.arguments import Args
from slime.catalog.limits import limit
from slime.engines.engine_process import Command
from slime.engines.launch_plan import EngineSite
from slime.utils.files.safetensors_files import all_files

_TINY_BYTES = 4 << 20  # of all weights


def run_command(args: Args, site: EngineSite) -> Command:
    """Return the command that starts an engine of a run."""
    return embedded_command(
        model_path=site.model_path,
        dtype=args.dtype,
        threads=site.threads,
        max_running_requests=limit(args, "embedded-requests"),
        max_total_tokens=limit(args, "embedded-tokens") or None,
        seed=args.seed,
        shm_prefix=site.shm_prefix,
        await_weights=site.update_weights and not args.debug_rollout_only,
        fp8_block=site.quantization["weight_block_size"] if site.quantization else None,
        host=site.host,
        returns_experts=args.use_rollout_routing_replay,
    )


def run_environment(args: Args, site: EngineSite) -> dict[str, str]:
    """Return variables of the engine's process: none."""
    return {}


def num_threads(model: Path, cores: int) -> int:
    """Return an engine's number of threads; splitting the products of a tiny model costs time."""
    is_tiny = model.is_dir() and 0 < sum(file.stat().st_size for file in all_files(model)) <= _TINY_BYTES
    return 1 if is_tiny else cores


def embedded_command(
    *,
    model_path: str,
    shm_prefix: str,
    await_weights: bool,
    device: str = "auto",
    dtype: str = "float32",
    threads: int = 1,
    max_running_requests: int = 256,
    max_total_tokens: int | None = None,
    seed: int = 0,
    fp8_block: Sequence[int] | None = None,
    host: str = "127.0.0.1",
    returns_experts: bool = False,
) -> Command:
    """Return an engine's command: it gets the port to bind (0: any), a ready file and the life pipe's fd."""

    def command(port: int, ready_file: Path, life_fd: int) -> list[str]:
        options = {
            "--model-path": model_path,
            "--host": host,
            "--port": port,
            "--ready-file": ready_file,
            "--life-fd": life_fd,
            "--device": device,
            "--dtype": dtype,
            "--threads": threads,
            "--max-running-requests": max_running_requests,
            "--max-total-tokens": max_total_tokens,
            "--seed": seed,
            "--shm-prefix": shm_prefix,
        }
        words = [str(word) for name, value in options.items() if value is not None for word in (name, value)]
        words += ["--fp8-block", *map(str, fp8_block)] if fp8_block else []
        words += ["--await-weights"] if await_weights else []
        words += ["--enable-return-routed-experts"] if returns_experts else []
        return [sys.executable, "-P", "-m", "slime.engines.embedded", *words]

    return command
