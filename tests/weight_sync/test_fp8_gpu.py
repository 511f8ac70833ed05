"""FP8 blocks made on a GPU are those made on the CPU, byte for byte."""

import pytest
import torch

from slime.utils.fp8 import dequantize_blocks, quantize_blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_writes_the_same_bytes_as_the_cpu(dtype):
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(1000, 700, generator=generator) * torch.randn(1000, 700, generator=generator).exp()).to(
        dtype
    )
    values, scale = quantize_blocks(weight, (128, 128))
    on_gpu, scale_on_gpu = quantize_blocks(weight.cuda(), (128, 128))
    assert torch.equal(scale_on_gpu.cpu(), scale)
    assert torch.equal(on_gpu.cpu().view(torch.uint8), values.view(torch.uint8))
    back = dequantize_blocks(on_gpu, scale_on_gpu, (128, 128), torch.float32)
    assert torch.equal(back.cpu(), dequantize_blocks(values, scale, (128, 128), torch.float32))
