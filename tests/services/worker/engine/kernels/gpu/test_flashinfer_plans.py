"""FlashInfer's wrappers in turns: no plan is overwritten before the device has it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from services.worker.engine.kernels.gpu.flashinfer_plans import PlanTurns
from services.worker.engine.kernels.interface import AttentionShape, KvLayer, KvLayout
from tests.services.worker.engine.kernels.attention_cases import Case

if TYPE_CHECKING:
    from services.worker.engine.kernels.gpu.attention import ChunkAttention
    from services.worker.engine.model.batch import ForwardBatch

# Of a GPU's clock: some tenths of a second, in which the host plans all passes.
BUSY_CYCLES = 600_000_000
# Passes of a prompt whose chunks have no samples, so that nothing waits for them.
CHUNK, PASSES = 64, 6
CPU = torch.device("cpu")


@dataclass
class Device:
    """Copies plans only when it is waited for."""

    queued: list[Wrapper] = field(default_factory=list)

    def run_until(self, done: int) -> None:
        while self.queued and self.queued[0].number <= done:
            first = self.queued.pop(0)
            first.copied.append(first.pinned)


@dataclass
class Wrapper:
    device: Device
    number: int = 0
    pinned: int = 0
    copied: list[int] = field(default_factory=list)

    def plan(self, number: int) -> None:
        self.number = self.pinned = number
        self.device.queued.append(replace(self))


class Marker:
    """An event of `Device`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._behind = 0

    def record(self) -> None:
        self._behind = self._device.queued[-1].number

    def synchronize(self) -> None:
        self._device.run_until(self._behind)


def test_a_wrapper_plans_again_only_when_the_device_has_its_last_plan() -> None:
    device, seen = Device(), []
    turns = PlanTurns(lambda: Wrapper(device), CPU, lambda _device: Marker(device))
    for number in range(1, 8):
        wrapper = turns.plan(lambda wrapper, number=number: wrapper.plan(number))  # type: ignore[misc]  # bound now
        seen.append(wrapper)
        # The wrapper's plan before, two plans ago, is no longer queued; the one in between may be.
        assert [each.number for each in device.queued] == [each for each in (number - 1, number) if each]
    assert seen[0] is not seen[1]
    assert seen[0] is seen[2] is seen[4]
    assert seen[1] is seen[3] is seen[5]


def prompt_passes(shape: AttentionShape, device: torch.device) -> list[ForwardBatch]:
    """Return the passes of a prompt's chunks, as the host plans them; later ones see more keys."""
    last = Case(shape, [((PASSES - 1) * CHUNK, CHUNK)], seed=5).batch()
    made = []
    for number in range(PASSES):
        lengths = torch.tensor([(number + 1) * CHUNK], dtype=torch.int32)
        host: Any = SimpleNamespace(
            query_starts=last.query_starts.numpy(), key_lengths=lengths.numpy(), page_table=last.page_table.numpy()
        )
        made.append(
            replace(
                last,
                host=host,
                query_starts=last.query_starts.to(device),
                key_lengths=lengths.to(device),
                page_table=last.page_table.to(device),
                max_key_length=int(lengths),
            )
        )
    return made


def attend_all(
    shape: AttentionShape, device: torch.device, attend: ChunkAttention, layer: KvLayer, *, is_busy: bool
) -> torch.Tensor:
    """Attend in all passes, each of which is waited for, or while the device is busy with something else."""
    drawn = torch.randn(CHUNK, shape.query_heads, shape.head_dim, generator=torch.Generator().manual_seed(6))
    queries = drawn.to(device, torch.bfloat16)
    outputs = torch.zeros(PASSES, CHUNK, shape.query_heads, shape.value_dim, device=device, dtype=queries.dtype)
    # Made before: that waits for the device.
    passes = prompt_passes(shape, device)
    if is_busy:
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]  # of torch's own tests
    for batch, output in zip(passes, outputs, strict=True):
        attend(queries, output, layer, batch)
        if not is_busy:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return outputs


def check_ahead(shape: AttentionShape, device: torch.device, layer: KvLayer, attend: ChunkAttention) -> None:
    """Assert that passes planned ahead of the device give the same bits as ones that are waited for."""
    expected = attend_all(shape, device, attend, layer, is_busy=False)
    assert torch.equal(attend_all(shape, device, attend, layer, is_busy=True), expected)
    differences = (expected[1:] - expected[:-1]).abs().amax(dim=(1, 2, 3))
    assert bool((differences > 0.01).all()), "each pass sees keys that the one before does not"


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_chunks_planned_ahead_of_the_device_see_their_own_keys(device: torch.device) -> None:
    pytest.importorskip("flashinfer")
    from services.worker.engine.kernels.gpu.flashinfer_prefill import FlashInferPrefill

    shape = AttentionShape(8, 2, 128, 16)
    layer = Case(shape, [((PASSES - 1) * CHUNK, CHUNK)], seed=5).layer(KvLayout.HEAD_MAJOR, torch.bfloat16)
    on_device = KvLayer(layer.keys.to(device), layer.values.to(device))
    check_ahead(shape, device, on_device, FlashInferPrefill(shape, device))


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_latent_chunks_planned_ahead_of_the_device_see_their_own_keys(device: torch.device) -> None:
    pytest.importorskip("flashinfer")
    from services.worker.engine.kernels.gpu.flashinfer_latent import FlashInferLatent

    shape = AttentionShape(8, 1, 576, 16, latent_dim=512)
    stored = Case(shape, [((PASSES - 1) * CHUNK, CHUNK)], seed=5).layer(KvLayout.TOKEN_MAJOR, torch.bfloat16)
    keys = stored.keys.to(device)
    layer = KvLayer(keys, keys[..., : shape.value_dim], is_latent=True)
    check_ahead(shape, device, layer, FlashInferLatent(shape, device))
