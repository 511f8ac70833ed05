"""What a run decides by device: each row by a device that the test pretends to have; one module owns it."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slime.backends.attention import packed_documents
from slime.backends.fp8 import linear
from slime.utils.machine import accelerator, devices, shared_gpu

PACKAGE = Path(__file__).parents[2] / "slime"
# They replace parts of torch.cuda on a machine without GPUs; the alias of an older transport's name.
ALLOWED = {
    "utils/machine/accelerator.py",
    "utils/machine/devices.py",
    "backends/megatron/fixes/cpu_shims.py",
    "engines/sglang/run_server.py",
    "catalog/transports.py",
}
OWNED = re.compile(
    r"torch\.cuda|get_device_capability|torch\.version\.(cuda|hip)|^nccl$|^(CUDA|HIP|ROCR)_VISIBLE_DEVICES$"
)


def names_in(tree):
    """Dotted names and strings of a module, without docstrings and comments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value if " " not in node.value else ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_one_module_owns_the_device():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        hits = {text for text in names_in(ast.parse(path.read_text())) if OWNED.search(text)}
        if hits and name not in ALLOWED:
            found[name] = sorted(hits)
    assert found == {}


class FakeGPU:
    """Torch's module of a GPU that is not here."""

    nccl = SimpleNamespace(version=lambda: (2, 21, 5))

    def __init__(self, architecture):
        self.architecture = architecture

    def is_available(self):
        return True

    def current_device(self):
        return 0

    def get_device_name(self, device):
        return "a device"

    def get_device_properties(self, device):
        return SimpleNamespace(gcnArchName=self.architecture)


def pretend(monkeypatch, row, architecture="", cuda=None, hip=None):
    """Make torch's build, its GPU and the device files of the machine those of a row."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(accelerator, "gpu", FakeGPU(architecture))
    monkeypatch.setattr(devices.os.path, "exists", lambda node: node in devices.DEVICES[row].nodes)
    return torch.device("cuda")


BUILDS = {"cuda": {"cuda": "12.9"}, "rocm": {"hip": "7.2"}}


@pytest.mark.parametrize("row, library", [("cuda", "NCCL"), ("rocm", "RCCL")])
def test_a_gpu_is_that_of_torchs_build(monkeypatch, row, library):
    device = pretend(monkeypatch, row, **BUILDS[row])
    assert accelerator.kind(device) is accelerator.kind() is devices.DEVICES[row]
    assert accelerator.collectives(device) == "nccl"
    assert accelerator.collectives(torch.device("cpu")) == "gloo"
    build = {"cuda": "CUDA", "rocm": "ROCm"}[row]
    version = next(iter(BUILDS[row].values()))
    assert accelerator.library_versions() == {build: version, library: "2.21.5"}


@pytest.mark.parametrize("row, name", [("cuda", "CUDA_VISIBLE_DEVICES"), ("rocm", "HIP_VISIBLE_DEVICES")])
def test_processes_get_the_variable_that_their_gpus_obey(monkeypatch, row, name):
    pretend(monkeypatch, row)
    monkeypatch.delenv(shared_gpu.VARIABLE, raising=False)
    assert devices.device_of_nodes() is devices.DEVICES[row]
    assert shared_gpu.device_environment((1, 3)) == {name: "1,3"}


@pytest.mark.parametrize(
    "row, tried", [("cuda", ["FlashAttention-4", "cuDNN for long documents"]), ("rocm", [])]
)
def test_only_kernels_of_the_device_are_tried(monkeypatch, row, tried):
    pretend(monkeypatch, row, **BUILDS[row])
    seen = []
    monkeypatch.setattr(packed_documents, "unobserved", lambda try_out: try_out())
    monkeypatch.setattr(packed_documents, "first_right", lambda operators, *_: seen.append(list(operators)))
    monkeypatch.setattr(packed_documents, "_CHOSEN", {})
    packed_documents.prepare(2, 64)
    assert seen == [tried]
    assert set(tried) <= set(packed_documents.OPERATORS)


@pytest.mark.parametrize(
    "architecture, is_fnuz", [("gfx942:sramecc+:xnack-", True), ("gfx950:sramecc+:xnack-", False)]
)
def test_eight_bit_numbers_of_mi300_are_refused_in_training(monkeypatch, architecture, is_fnuz):
    device = pretend(monkeypatch, "rocm", architecture, hip="7.2")
    assert accelerator.has_fnuz(device) is is_fnuz
    if is_fnuz:
        with pytest.raises(ValueError, match="--fp8-training: a device multiplies e4m3fnuz"):
            linear.check_device(device)


def test_no_row_of_cuda_has_other_eight_bit_numbers(monkeypatch):
    assert not accelerator.has_fnuz(pretend(monkeypatch, "cuda", cuda="12.9"))


def test_a_machine_without_gpus_uses_gloo(monkeypatch):
    monkeypatch.setattr(accelerator.gpu, "is_available", lambda: False)
    assert accelerator.kind() is devices.DEVICES["cpu"] and accelerator.collectives() == "gloo"
