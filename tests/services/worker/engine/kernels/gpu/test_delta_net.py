"""Gated delta nets as programs, against the same by plain torch on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from services.worker.engine.kernels.interface import DeltaNetConstants, LayerStates
from services.worker.engine.kernels.torch.delta_net import TorchDeltaNet
from services.worker.engine.model.batch import StateChunk, StateSlots

pytest.importorskip("triton", reason="its interpreter runs the programs where there is no GPU")

from services.worker.engine.kernels.gpu.delta_net import ChunkTables, GpuDeltaNet

SLOTS = 9


def constants(key_heads: int, values_per_key: int, dims: tuple[int, int], kernel: int) -> DeltaNetConstants:
    generator = torch.Generator().manual_seed(kernel)
    (key_dim, value_dim), heads = dims, key_heads * values_per_key
    width = 2 * key_heads * key_dim + heads * value_dim
    return DeltaNetConstants(
        filters=torch.randn(kernel, width, generator=generator) * 0.5,
        decay_scales=-torch.rand(heads, generator=generator) * 3,
        decay_bias=torch.randn(heads, generator=generator),
        norm=torch.rand(value_dim, generator=generator) + 0.5,
        epsilon=1e-6,
        key_heads=key_heads,
        values_per_key=values_per_key,
        key_dim=key_dim,
        value_dim=value_dim,
    )


def check(
    of: DeltaNetConstants, decoding: list[int], chunks: list[tuple[int, int, bool]], device: torch.device
) -> None:
    """Compare a batch of rows in slots `decoding` and of chunks (tokens, slot, begins), and the one after it."""
    generator = torch.Generator().manual_seed(len(chunks))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kernel, width = of.filters.shape
    states = LayerStates(
        torch.randn(SLOTS, of.value_heads, of.key_dim, of.value_dim, generator=generator),
        torch.randn(SLOTS, kernel - 1, width, generator=generator).to(dtype),
    )
    of = replace(of, filters=of.filters.to(dtype))
    on_device = replace(
        of, **{name: getattr(of, name).to(device) for name in ("filters", "decay_scales", "decay_bias", "norm")}
    )
    # Copies, also where the device is the CPU.
    moved = LayerStates(states.matrices.to(device, copy=True), states.inputs.to(device, copy=True))
    # The reference keeps float32 between its steps: in bfloat16 it would be less exact than the programs.
    states = replace(states, inputs=states.inputs.float())
    plain, programs = TorchDeltaNet(replace(of, filters=of.filters.float())), GpuDeltaNet(on_device, ChunkTables())
    at, placed = len(decoding), []
    for tokens, slot, begins in chunks:
        placed.append(StateChunk(at, at + tokens, slot, begins))
        at += tokens
    following = tuple(replace(each, begins=False) for each in placed)
    for batch in (tuple(placed), following):
        # As wide as a projection, whose rows may lie further apart.
        projected = torch.randn(at, width + of.values + 2 * of.value_heads + 3, generator=generator)[:, :-3].to(dtype)
        outputs = torch.full((at, of.values), 7.0, dtype=dtype, device=device)
        expected = torch.empty(at, of.values)
        in_slots = StateSlots(torch.tensor(decoding, dtype=torch.int64), batch)
        plain.advance(states, projected.float(), expected, in_slots)
        slots = StateSlots(torch.tensor(decoding, dtype=torch.int32, device=device), batch)
        programs.advance(moved, projected.to(device), outputs, slots)
        assert_alike(outputs.cpu().float().view(-1, of.value_dim), expected.view(-1, of.value_dim), dtype)
        assert_alike(moved.matrices.cpu().flatten(2).flatten(0, 1), states.matrices.flatten(2).flatten(0, 1), dtype)
        assert torch.equal(moved.inputs.cpu().float(), states.inputs)


def assert_alike(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Compare as a whole, and each line with the length of lines: rounding to `dtype` is all that may differ."""
    whole, line = (1e-5, 1e-4) if dtype == torch.float32 else (1e-2, 1e-1)
    difference, usual = found - expected, expected.square().sum(dim=1).mean().sqrt()
    assert difference.norm() <= whole * expected.norm()
    assert difference.norm(dim=1).max() <= line * usual


@pytest.mark.parametrize(
    ("heads", "per_key", "dims", "kernel"),
    [(2, 2, (128, 128), 4), (1, 1, (32, 64), 2), (2, 1, (8, 12), 3), (1, 3, (48, 80), 4)],
)
def test_rows_that_decode(device: torch.device, heads: int, per_key: int, dims: tuple[int, int], kernel: int) -> None:
    check(constants(heads, per_key, dims, kernel), [3, 0, 7, 5], [], device)


@pytest.mark.parametrize(
    ("heads", "per_key", "dims", "kernel"),
    [(1, 2, (128, 128), 4), (1, 1, (32, 64), 2), (2, 1, (8, 12), 3), (1, 3, (48, 80), 4)],
)
def test_chunks_of_any_length(
    device: torch.device, heads: int, per_key: int, dims: tuple[int, int], kernel: int
) -> None:
    chunks = [(1, 4, False), (2, 0, True), (64, 2, True), (65, 8, False), (150, 1, False)]
    check(constants(heads, per_key, dims, kernel), [], chunks, device)


def test_chunks_beside_rows_that_decode(device: torch.device) -> None:
    check(constants(2, 2, (16, 32), 4), [6, 1], [(70, 3, True), (3, 5, False)], device)


def test_equal_keys_without_decay_stay_exact(device: torch.device) -> None:
    # The inverse of the system has entries up to 1, though powers of what lies below the diagonal reach 10^17.
    of = constants(1, 1, (16, 16), 2)
    of = replace(of, decay_scales=torch.full((1,), -1e-4), filters=torch.zeros_like(of.filters))
    of.filters[-1] = 1.0
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    one = torch.randn(1, of.filters.shape[1] + 18, generator=torch.Generator().manual_seed(0))
    # Strengths close to 1.
    one[:, -2] = 8.0
    projected, outputs = one.repeat(128, 1).to(dtype), {}
    for net, where in ((TorchDeltaNet, torch.device("cpu")), (GpuDeltaNet, device)):
        placed = {name: getattr(of, name).to(where) for name in ("decay_scales", "decay_bias", "norm")}
        placed["filters"] = of.filters.to(where, dtype)
        states = LayerStates(torch.zeros(1, 1, 16, 16, device=where), torch.zeros(1, 1, 48, dtype=dtype, device=where))
        made = torch.empty(128, 16, dtype=dtype, device=where)
        recurrence = net(replace(of, **placed), *([ChunkTables()] if net is GpuDeltaNet else []))
        chunks = (StateChunk(0, 128, 0, begins=True),)
        recurrence.advance(states, projected.to(where), made, StateSlots(torch.empty(0, dtype=torch.int32), chunks))
        outputs[net] = made.float().cpu()
    torch.testing.assert_close(outputs[GpuDeltaNet], outputs[TorchDeltaNet], atol=2e-2, rtol=2e-2)
