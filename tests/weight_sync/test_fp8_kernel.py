"""The kernel that writes FP8 blocks, under Triton's interpreter, against the plain path.

The interpreter is chosen when Triton is imported, so the comparison runs in a process of its own; a CPU build
of torch comes without Triton, SGLang's environment has it.
"""

import os
import subprocess
from pathlib import Path

import pytest
from patience import PATIENCE_S

from slime.arguments.passthrough.sglang_flags import need_python

pytestmark = pytest.mark.sglang

COMPARISON = """
import torch
from slime.utils.models import fp8_block_kernels as kernels
from slime.utils.models.fp8_blocks import quantize_blocks
torch.manual_seed(0)
for shape, block in (((128, 128), (128, 128)), ((130, 259), (128, 128)), ((64, 96), (16, 32))):
    for dtype in (torch.bfloat16, torch.float32):
        # Numbers that FP8 has, times a factor of each block: the interpreter's own rounding carries wrongly.
        numbers = torch.randint(0, 0x7F, shape, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        numbers[:: block[0], :: block[1]] = -448.0
        weight = (numbers * 2.0 ** (torch.arange(shape[1]) // block[1])).to(dtype)
        weight[: block[0], : block[1]] = 0.0
        wide = torch.cat([weight, weight], 1)[:, : shape[1]]  # rows with gaps
        values, scale = quantize_blocks(weight, block)
        for given in (weight, wide):
            assert kernels.can_quantize(given, block)
            found, factors = kernels.quantize(given, block)
            assert torch.equal(factors, scale), (shape, dtype)
            assert torch.equal(found.view(torch.uint8), values.view(torch.uint8)), (shape, dtype)
weight = torch.randn(300, 300)
assert torch.equal(kernels.quantize(weight, (128, 128))[1], quantize_blocks(weight, (128, 128))[1])
for bad in (float("nan"), float("inf")):
    weight = torch.randn(256, 256)
    weight[200, 3] = bad
    finite = kernels.quantize(weight, (128, 128))[1].isfinite()
    assert finite.tolist() == [[True, True], [False, True]], (bad, finite)
assert not kernels.can_quantize(weight, (100, 128)) and not kernels.can_quantize(weight.T, (128, 128))
"""


def test_the_kernel_writes_the_bytes_of_the_plain_path():
    env = dict(os.environ, TRITON_INTERPRET="1", PYTHONPATH=str(Path(__file__).parents[2]))
    python = need_python(None, "Triton's interpreter")
    done = subprocess.run(
        [python, "-c", COMPARISON], env=env, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
