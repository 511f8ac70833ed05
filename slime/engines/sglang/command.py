"""The command line of one SGLang server under its supervisor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime.engines.sglang.supervisor import NCCL_PORT, PORT

_HERE = Path(__file__).parent
# What makes a server work and rest on a machine without a GPU.
_CPU_WORDS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-overlap-schedule", "--sleep-on-idle"),
)
_CPU_MAX_TOTAL_TOKENS, _CPU_MAX_RUNNING = 65536, 64


@dataclass(frozen=True, slots=True)
class SGLangOptions:
    """What we decide about a server. `extra`: the user's own flags, as words; they come last and win."""

    python: str
    model_path: str
    cpu: bool
    dtype: str  # "auto" leaves it to the model's config
    tensor_parallel: int
    seed: int
    memory_saver: bool
    weight_version: str = "default"
    host: str = "127.0.0.1"
    extra: Sequence[str] = ()


def server_words(options: SGLangOptions) -> list[str]:
    """The server's own command line; the ports are left for the supervisor to fill in."""
    given = {word for word in options.extra if word.startswith("--")}
    words = [
        "--model-path",
        options.model_path,
        "--host",
        options.host,
        "--port",
        PORT,
        "--nccl-port",
        NCCL_PORT,
    ]
    words += [
        "--dtype",
        options.dtype,
        "--random-seed",
        str(options.seed),
        "--weight-version",
        options.weight_version,
    ]
    words += ["--tp-size", str(options.tensor_parallel)]
    if options.cpu:
        words += _CPU_WORDS
        limits = {"--max-total-tokens": _CPU_MAX_TOTAL_TOKENS, "--max-running-requests": _CPU_MAX_RUNNING}
        words += [word for name, limit in limits.items() if name not in given for word in (name, str(limit))]
    if options.memory_saver:
        words += ["--enable-memory-saver"]
    return [*words, *options.extra]


def sglang_command(options: SGLangOptions) -> Callable[[int, Path, int], list[str]]:
    """For a launch plan: gets the port to bind (0: any), the ready file and the life pipe's fd."""

    def command(port: int, ready_file: Path, life_fd: int) -> list[str]:
        # -P: the folder of these scripts must not be on the path, where
        # its file names could hide other modules.
        supervisor = [
            sys.executable,
            "-P",
            str(_HERE / "supervisor.py"),
            "--host",
            options.host,
            "--port",
            str(port),
        ]
        supervisor += ["--ready-file", str(ready_file), "--life-fd", str(life_fd), "--"]
        return [*supervisor, options.python, "-P", str(_HERE / "launch.py"), *server_words(options)]

    return command
