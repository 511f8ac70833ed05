"""FP8 blocks made on a GPU are those made on the CPU, byte for byte."""

import pytest
import torch

from slime.utils.models.fp8_blocks import dequantize_blocks, quantize_blocks, uniform_noise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_writes_the_same_bytes_as_the_cpu(dtype):
    generator = torch.Generator().manual_seed(0)
    weight = (
        torch.randn(1000, 700, generator=generator) * torch.randn(1000, 700, generator=generator).exp()
    ).to(dtype)
    values, scale = quantize_blocks(weight, (128, 128))
    on_gpu, scale_on_gpu = quantize_blocks(weight.cuda(), (128, 128))
    assert torch.equal(scale_on_gpu.cpu(), scale)
    assert torch.equal(on_gpu.cpu().view(torch.uint8), values.view(torch.uint8))
    back = dequantize_blocks(on_gpu, scale_on_gpu, (128, 128), torch.float32)
    assert torch.equal(back.cpu(), dequantize_blocks(values, scale, (128, 128), torch.float32))


def test_stochastic_rounding_on_a_gpu_writes_the_same_bytes_as_on_the_cpu():
    weight = torch.randn(1000, 700, generator=torch.Generator().manual_seed(0)) * 0.02
    noise, on_gpu = (uniform_noise(weight.shape, 7, device) for device in ("cpu", "cuda"))
    assert torch.equal(noise, on_gpu.cpu())
    values, _ = quantize_blocks(weight, (128, 128), noise=noise)
    there, _ = quantize_blocks(weight.cuda(), (128, 128), noise=on_gpu)
    assert torch.equal(there.cpu().view(torch.uint8), values.view(torch.uint8))
