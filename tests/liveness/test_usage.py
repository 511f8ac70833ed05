"""What processes use: CPU and memory of any, GPUs where the library of NVIDIA answers."""

import os
import sys
import time
import types

import pytest

from slime.liveness import usage
from slime.liveness.notes import take_notes


@pytest.fixture(autouse=True)
def nothing_followed(monkeypatch):
    monkeypatch.setattr(usage, "_followed", {})
    monkeypatch.setattr(usage, "_last", (float("-inf"), {}))
    usage._nvml.cache_clear()
    yield
    usage._nvml.cache_clear()


def read_now():
    usage._last = (float("-inf"), {})
    return usage.readings()


def test_a_busy_process_uses_cpu_and_memory():
    usage.follow("driver", os.getpid(), {})
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    [(name, found)] = read_now().items()
    assert name == "driver" and found["cpu_cores"] > 0 and 0.001 < found["memory_gib"] < 1000
    assert "gpu_percent" not in found


def test_readings_are_shared_until_the_interval_is_over(monkeypatch):
    usage.follow("driver", os.getpid(), {})
    first = usage.readings()
    assert usage.readings() is first and take_notes().usage is first
    monkeypatch.setattr(usage, "INTERVAL_S", 0.0)
    assert usage.readings() is not first


def test_a_process_that_has_ended_is_left_out_and_another_takes_its_name():
    usage.follow("engine-0", 2**22 + 1, {}, whole=True)  # no such process
    assert read_now() == {}
    usage.follow("engine-0", os.getpid(), {}, whole=True)
    assert list(read_now()) == ["engine-0"]


def test_memory_and_utilisation_of_gpus_come_from_the_library(monkeypatch):
    library = types.ModuleType("pynvml")
    library.nvmlInit = lambda: None
    library.nvmlDeviceGetHandleByIndex = lambda index: index
    library.nvmlDeviceGetMemoryInfo = lambda gpu: types.SimpleNamespace(used=(gpu + 1) << 30)
    library.nvmlDeviceGetUtilizationRates = lambda gpu: types.SimpleNamespace(gpu=10 * gpu)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    usage.follow("trainer-0", os.getpid(), {"CUDA_VISIBLE_DEVICES": "2"})
    usage.follow("engine-0", os.getpid(), {"CUDA_VISIBLE_DEVICES": "1,7"})
    usage.follow("engine-1", os.getpid(), {"CUDA_VISIBLE_DEVICES": "GPU-8"})  # by a name
    found = read_now()
    assert (found["trainer-0"]["gpu_memory_gib"], found["trainer-0"]["gpu_percent"]) == (3.0, 20.0)
    assert (found["engine-0"]["gpu_memory_gib"], found["engine-0"]["gpu_percent"]) == (10.0, 40.0)
    assert "gpu_percent" not in found["engine-1"]


def test_a_library_without_a_driver_is_no_error(monkeypatch):
    library = types.ModuleType("pynvml")

    def refuse():
        raise RuntimeError("driver not loaded")

    library.nvmlInit = refuse
    monkeypatch.setitem(sys.modules, "pynvml", library)
    usage.follow("trainer-0", os.getpid(), {"CUDA_VISIBLE_DEVICES": "0"})
    assert set(read_now()["trainer-0"]) == {"cpu_cores", "memory_gib"}
