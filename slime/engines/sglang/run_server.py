"""Runs an SGLang server, or prints its flags; executed as a script by the interpreter that has SGLang.

On a CPU machine five gaps of the wheel are filled first. That happens when the module is loaded, because
SGLang spawns its workers, and a spawned process loads the main module again. Nothing on the path of a request
is replaced.
"""

import argparse
import functools
import itertools
import json
import os
import sys
import types
from collections.abc import Callable, Collection
from typing import Any


def _missing_kernel(name: str, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(f"sgl_kernel.{name} needs a GPU build of SGLang's kernels")


class _NoKernels(types.ModuleType):
    """Replaces `sgl_kernel`, whose wheel is for CUDA only: its names can be imported, but not called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return functools.partial(_missing_kernel, name)


_VISION_OPERATORS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)


def declare_torchvision_operators() -> None:
    """Declare operators of torchvision, so that a CUDA build from PyPI can be imported on a CPU."""
    import torch

    for name in ("torchvision::nms", "torchvision::qnms"):
        torch.library.define(name, "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def fill_cpu_gaps() -> None:
    """Replace what a CPU machine lacks: native code paths, operators, kernels, page-locked memory."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    import torch  # only after the choice above

    declare_torchvision_operators()
    # Modules of vision-language models refer to these when they are imported; they are never called here.
    for name in _VISION_OPERATORS:
        torch.library.define(f"sgl_kernel::{name}", "(Tensor a) -> Tensor")
    kernels = _NoKernels("sgl_kernel")
    kernels.__path__ = []
    sys.modules["sgl_kernel"] = kernels
    # Adapters always request pinned memory; without a device, plain memory is the same.
    setattr(torch.Tensor, "pin_memory", lambda tensor, *args: tensor)  # noqa: B010
    for name in ("tensor", "empty", "zeros", "arange"):
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    # The recording of routed experts locks its memory itself.
    setattr(torch.cuda, "cudart", _NothingToLock)  # noqa: B010
    # A prefill server waits for such an event before it sends a KV cache.
    setattr(torch.cuda, "Event", _NothingToAwait)  # noqa: B010
    setattr(torch.cuda, "current_stream", lambda device=None: None)  # noqa: B010
    if _values(sys.argv, "--speculative-algorithm"):
        sys.exit("--sglang-speculative-algorithm needs a GPU: SGLang's kernels for it are in no CPU wheel")
    if "--enable-dp-attention" in sys.argv or _values(sys.argv, "--attn-dp-size"):
        sys.exit("--sglang-enable-dp-attention needs a GPU: SGLang's attention for CPUs has no such groups")


class _NothingToLock:
    """Replaces CUDA's runtime for host memory: every page counts as locked."""

    @staticmethod
    def cudaHostRegister(_pointer: int, _size: int, _flags: int) -> int:
        return 0

    @staticmethod
    def cudaHostUnregister(_pointer: int) -> int:
        return 0


class _NothingToAwait:
    """Replaces CUDA's events: what was copied on a CPU is there when the copy returns."""

    def record(self, _stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


def _without_pinning(make: Callable[..., Any]) -> Callable[..., Any]:
    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return make(*args, **kwargs)

    return functools.wraps(make)(unpinned)


def spread_over_cores(ranks: int) -> None:
    """Assign cores to SGLang's ranks: else it refuses more ranks than there are NUMA nodes."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [
        cores[i * len(cores) // ranks : (i + 1) * len(cores) // ranks] or cores[:1] for i in range(ranks)
    ]
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)


def _values(words: list[str], option: str) -> list[str]:
    return [after for before, after in itertools.pairwise(words) if before == option]


# Run as a script and in spawned processes; an importer of this module has its own torch.
if __name__ in ("__main__", "__mp_main__") and "cpu" in _values(sys.argv, "--device"):
    fill_cpu_gaps()
    ranks, nodes = (int((_values(sys.argv, option) or ["1"])[-1]) for option in ("--tp-size", "--nnodes"))
    if ranks > 1:
        spread_over_cores(ranks // nodes)


def print_flags() -> None:
    """Print the installed server's flags as JSON: {"version", "flags": [{options, dest, nargs, ...}]}."""
    import sglang

    flags = []
    for action in server_parser()._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        flag = {
            "options": action.option_strings,
            "dest": action.dest,
            "nargs": action.nargs,
            "type": getattr(action.type, "__name__", None),
            "choices": [str(c) for c in action.choices] if action.choices else None,
            "help": action.help or "",
        }
        flags.append(flag)
    print("SGLANG-FLAGS " + json.dumps({"version": sglang.__version__, "flags": flags}))


def token_words() -> list[str]:
    """Return the arguments that set the server's token, which is read from the environment.

    Command lines are visible to all users of a machine, so the token is never part of one. With the admin
    key alone, /server_info would be open and would reveal the key.
    """
    token = os.environ.pop("SLIME_ENGINE_TOKEN", None)
    return ["--api-key", token] if token else []


def known_words(words: list[str], options: Collection[str]) -> list[str]:
    """Return arguments for a release that has these options; older ones choose the image processor by a
    switch.
    """
    choice = "--image-processor-backend"
    if choice not in words or choice in options:
        return words
    at = words.index(choice)
    switch = ["--disable-fast-image-processor"] if words[at + 1] == "pil" else []
    return words[:at] + switch + words[at + 2 :]


def server_parser() -> argparse.ArgumentParser:
    """Return a parser with the installed server's flags."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


def serve() -> None:
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        words = known_words(sys.argv[1:], server_parser()._option_string_actions)
        run_server(prepare_server_args(words + token_words()))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    if "--print-flags" in sys.argv:
        print_flags()
    else:
        serve()
