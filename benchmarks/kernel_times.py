"""Where the GPU's time goes in one call: milliseconds by kind of kernel, and the waits between them."""

import time
from collections.abc import Callable
from typing import Any

import torch
from measuring import synchronize


def profile_step(step: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Milliseconds on the device by kind of kernel, and the wall time of the step."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CUDA] if device.type == "cuda" else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        started = time.perf_counter()
        step()
        synchronize(device)
        wall = time.perf_counter() - started
    kinds = {
        "attention": ("flash", "fmha"),
        "log-prob kernels": ("_row_statistics", "_logit_gradient"),
        "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "sm90", "xmma"),
        "compiled layers": ("triton",),
        "optimizer and lists": ("multi_tensor", "adam", "foreach"),
        "copies": ("memcpy", "memset", "copy_kernel"),
    }
    totals: dict[str, float] = {"wall": 1e3 * wall}
    rest: dict[str, float] = {}
    for event in profiler.key_averages():
        spent = (event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total) / 1e3
        name = event.key.lower()
        kind = next((k for k, words in kinds.items() if any(word in name for word in words)), "other")
        totals[kind] = totals.get(kind, 0.0) + spent
        if kind == "other" and spent > 0:
            rest[event.key[:90]] = spent
    for name, spent in sorted(rest.items(), key=lambda item: -item[1])[:8]:
        totals[f"  {name}"] = spent
    return totals | idle_times(profiler, wall)


def idle_times(profiler: Any, wall: float) -> dict[str, float]:
    """Milliseconds in which the device ran nothing, the longest of them by the kernel that ended the wait."""
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    if not events:
        return {}
    events.sort(key=lambda event: event.time_range.start)
    waits: dict[str, float] = {}
    free_from, busy = events[0].time_range.start, 0.0
    for event in events:
        start, end = event.time_range.start, event.time_range.end
        if start > free_from:
            waits[event.name[:80]] = waits.get(event.name[:80], 0.0) + (start - free_from) / 1e3
        busy += max(0.0, end - max(start, free_from)) / 1e3
        free_from = max(free_from, end)
    longest = sorted(waits.items(), key=lambda item: -item[1])[:10]
    return {"idle": 1e3 * wall - busy} | {f"  idle before {name}": spent for name, spent in longest}
