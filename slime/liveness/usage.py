"""What processes use of their machine: CPU, memory, and their GPUs where NVIDIA's library is installed."""

import contextlib
import functools
import importlib
import os
import statistics
import time
from collections.abc import Mapping
from typing import Any

import psutil

from slime.utils.machine.devices import visible_variable

INTERVAL_S = 5.0  # between two readings
Usage = dict[str, float]  # cpu_cores, memory_gib, gpu_memory_gib and gpu_percent; without a GPU the first two


class _Process:
    """A process of this machine; `whole`: with its children. `gpus`: numbers of its GPUs."""

    def __init__(self, pid: int, gpus: list[str], whole: bool):
        self._process, self._gpus, self._whole = psutil.Process(pid), gpus, whole
        self._seconds, self._at = self._cpu_seconds(), time.monotonic()

    def _cpu_seconds(self) -> dict[psutil.Process, float]:
        family = [self._process, *(self._process.children(recursive=True) if self._whole else ())]
        return {process: sum(process.cpu_times()[:2]) for process in family}

    def read(self) -> Usage:
        """Return its usage since the last call. psutil.Error: it, or one of its children, has just ended."""
        seconds, now = self._cpu_seconds(), time.monotonic()
        used = sum(value - self._seconds.get(process, value) for process, value in seconds.items())
        elapsed, self._seconds, self._at = max(now - self._at, 1e-3), seconds, now
        memory = sum(process.memory_info().rss for process in seconds) / 2**30
        return {"cpu_cores": used / elapsed, "memory_gib": memory, **_of_gpus(self._gpus)}


_followed: dict[str, _Process] = {}
_last: tuple[float, dict[str, Usage]] = (float("-inf"), {})


def follow(name: str, pid: int, env: Mapping[str, str] = os.environ, *, whole: bool = False) -> None:
    """Read the usage of a process of this machine from now on, in place of another with this name."""
    gpus = [part for part in env.get(visible_variable(), "").split(",") if part.isdigit()]
    with contextlib.suppress(psutil.Error):
        _followed[name] = _Process(pid, gpus, whole)


def readings() -> dict[str, Usage]:
    """Return the usage of each process that is followed here, read anew after `INTERVAL_S`."""
    global _last
    if time.monotonic() - _last[0] >= INTERVAL_S:
        _last = time.monotonic(), {}
        for name, process in list(_followed.items()):
            with contextlib.suppress(psutil.Error):
                _last[1][name] = process.read()
    return _last[1]


def _of_gpus(numbers: list[str]) -> Usage:
    """Return memory and mean utilisation of the GPUs; empty without one, or without the library."""
    nvml: Any = _nvml() if numbers else None
    with contextlib.suppress(Exception):  # the library has an error class for each of its codes
        handles = [nvml.nvmlDeviceGetHandleByIndex(int(number)) for number in numbers if nvml]
        memory = sum(nvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles) / 2**30
        percent = statistics.fmean(nvml.nvmlDeviceGetUtilizationRates(handle).gpu for handle in handles)
        return {"gpu_memory_gib": memory, "gpu_percent": percent}
    return {}


@functools.cache
def _nvml() -> Any:
    """Return the library `nvidia-ml-py`; None: it is not installed, or there is no driver."""
    with contextlib.suppress(Exception):
        library = importlib.import_module("pynvml")
        library.nvmlInit()
        return library
    return None
