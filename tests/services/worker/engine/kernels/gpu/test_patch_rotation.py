"""Rotation of patches as one program, against the same by plain torch on a CPU."""

from __future__ import annotations

import pytest
import torch

from services.worker.engine.vision.patches import PatchRotation, rotate

pytest.importorskip("triton", reason="its interpreter runs the programs where there is no GPU")

from services.worker.engine.kernels.gpu.patch_rotation import rotate as rotate_on_gpu


@pytest.mark.parametrize(("heads", "head_dim"), [(2, 32), (16, 80), (16, 72), (3, 20), (20, 64)])
def test_queries_and_keys_turn_as_by_plain_torch_and_values_stay(
    device: torch.device, heads: int, head_dim: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    qkv = torch.randn(37, 3 * heads * head_dim, generator=generator).to(dtype)
    coordinates = torch.randint(0, 90, (37, 2), generator=generator)
    angles = PatchRotation(head_dim, torch.device("cpu")).angles(coordinates)
    cosines, sines = angles.cos(), angles.sin()
    expected = qkv.clone()
    rotate(expected, cosines, sines)
    turned = qkv.to(device, copy=True)
    rotate_on_gpu(turned, cosines.to(device), sines.to(device))
    torch.testing.assert_close(turned.cpu(), expected, atol=1e-5, rtol=0 if dtype == torch.float32 else 2**-7)
    width = heads * head_dim
    assert torch.equal(turned[:, 2 * width :].cpu(), qkv[:, 2 * width :])
    assert not torch.equal(turned[:, :width].cpu(), qkv[:, :width])
    assert not torch.equal(turned[:, width : 2 * width].cpu(), qkv[:, width : 2 * width])


def test_no_patches_are_nothing_to_do(device: torch.device) -> None:
    rotate_on_gpu(torch.empty(0, 96, device=device), torch.empty(0, 8, device=device), torch.empty(0, 8, device=device))
