from __future__ import annotations

import torch

from services.worker.engine.host_memory import HostArena


def test_tensors_are_zero_aligned_and_apart() -> None:
    arena = HostArena()
    tensors = [
        arena.zeros(shape, dtype)
        for shape, dtype in (((3, 5), torch.float32), ((7,), torch.bfloat16), ((40, 1000, 1000), torch.float32))
    ]
    for i, tensor in enumerate(tensors):
        assert tensor.data_ptr() % 64 == 0
        assert not tensor.any()
        tensor.fill_(i + 1)
    assert [(tensor == i + 1).all().item() for i, tensor in enumerate(tensors)] == [True] * 3
    assert tensors[0].shape == (3, 5)
    assert tensors[1].dtype == torch.bfloat16


def test_tensors_outlive_their_arena() -> None:
    tensor = HostArena().zeros((1000,), torch.float32)
    tensor.fill_(3.0)
    for _ in range(3):
        HostArena().zeros((1000,), torch.float32).fill_(5.0)
    assert tensor.sum() == 3000
