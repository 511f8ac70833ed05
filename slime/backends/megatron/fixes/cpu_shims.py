"""Lets megatron-core, which names CUDA devices literally, run on a machine without CUDA.

Installed only in a trainer process on CPU. Each patch names the behaviour of megatron-core 0.16.1 it handles.
Streams and events do nothing, so the overlap of copies and computation is not exercised here.
"""

import contextlib
import functools
import sys
from typing import Any

import torch
import torch.utils._device

CPU = torch.device("cpu")
_FACTORIES = """
    tensor zeros ones empty full arange rand randn empty_like zeros_like ones_like full_like as_tensor
""".split()  # noqa: SIM905 - one name per line would fill a screen
_installed = False


class _InOrder:
    """Replaces streams and events: work on a CPU is in order already, so every method does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self


def install() -> None:
    """Patch this process once; refused on machines with CUDA."""
    global _installed
    assert not torch.cuda.is_available(), "the CPU shims are for machines without CUDA"
    if _installed:
        return
    _installed = True
    # torch remembers which functions a device context (`with torch.device("meta")`) applies to. If it first
    # collected them after they are replaced, it would apply to none of them, and the FSDP trainer in the same
    # process would build a wrong model.
    torch.utils._device._device_constructors()
    _patch_device_queries()
    _patch_factories()
    _patch_tensor_methods()
    _patch_random_states()
    _patch_moe()


def _patch_device_queries() -> None:
    stream = _InOrder()
    _patch(
        torch.cuda,
        current_device=lambda: CPU,
        synchronize=lambda *args: None,
        empty_cache=lambda: None,
        current_stream=lambda *args: stream,
        default_stream=lambda *args: stream,
        stream=lambda s: contextlib.nullcontext(),
        Stream=_InOrder,
        Event=_InOrder,
    )


def _patch(owner: Any, **replacements: Any) -> None:
    for name, replacement in replacements.items():
        setattr(owner, name, replacement)


def _patch_factories() -> None:
    """Support `torch.zeros(..., device="cuda")` in schedules and optimizers, and pinned memory in RoPE."""
    for name in _FACTORIES:
        original = getattr(torch, name)

        @functools.wraps(original)
        def on_cpu(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
            device = kwargs.get("device")
            if device is not None and str(device).startswith("cuda"):
                kwargs["device"] = CPU
            kwargs.pop("pin_memory", None)
            return _original(*args, **kwargs)

        setattr(torch, name, on_cpu)


def _patch_tensor_methods() -> None:
    """Support `.cuda()`, and optimizers that compare `.type()` with the name of a CUDA type."""
    original = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        asked_by = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(result, str) and not args and not kwargs and asked_by.startswith("megatron."):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    _patch(torch.Tensor, cuda=lambda self, *args, **kwargs: self, type=type_name)
    _patch(torch.nn.Module, cuda=lambda self, *args, **kwargs: self)


def _patch_random_states() -> None:
    from megatron.core.tensor_parallel import random  # after the device queries are patched

    def get_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    _patch(torch.cuda, manual_seed=torch.manual_seed, get_rng_state=get_state, set_rng_state=set_state)
    _patch(random, _get_cuda_rng_state=get_state, _set_cuda_rng_state=set_state)


def _patch_moe() -> None:
    from megatron.core.transformer.moe import token_dispatcher  # after the device queries are patched

    # All-to-all split sizes become numpy only when they come from a GPU.
    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_host
