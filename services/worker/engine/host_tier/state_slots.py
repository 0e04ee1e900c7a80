"""Host memory for snapshots of recurrent states, and their copies between device and host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from services.worker.engine.host_memory import HostArena

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.worker.engine.model.recurrent import StatePool

# Slots begin at a cache line's border.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class HostStates:
    """Snapshots of a rank's host tier: a slot holds the matrices of all layers one after the other, then their inputs.

    `memory` [slots, bytes] uint8 is that of all slots, of which the others are parts.
    """

    memory: torch.Tensor
    matrices: torch.Tensor  # [slots, layers, value_heads, key_dim, value_dim] float32
    inputs: torch.Tensor  # [slots, layers, kernel - 1, conv_width], of the activations' type

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self.memory.shape[0]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one snapshot."""
        return self.memory.shape[1]

    def read(self, slot: int) -> bytes:
        """Return a copy of a snapshot's bytes."""
        content: bytes = self.memory[slot].numpy().tobytes()
        return content

    def write(self, slot: int, content: memoryview) -> None:
        """Overwrite a snapshot with `slot_bytes` bytes."""
        self.memory[slot].numpy()[:] = memoryview(content).cast("B")

    def pairs(self, states: StatePool, device_slot: int, host_slot: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the parts of a snapshot on the device and on the host, each in one piece: two for each layer."""
        at = states.place_of(device_slot)
        for on_device, on_host in ((states.matrices, self.matrices), (states.inputs, self.inputs)):
            for layer in range(on_device.shape[0]):
                yield on_device[layer, at], on_host[host_slot, layer]

    def back_up(self, states: StatePool, device_slot: int, host_slot: int) -> None:
        """Copy a snapshot to the host; from a GPU in the order of the current stream."""
        for on_device, on_host in self.pairs(states, device_slot, host_slot):
            on_host.copy_(on_device, non_blocking=True)

    def load(self, states: StatePool, device_slot: int, host_slot: int) -> None:
        """Copy a snapshot to the device; see `back_up`."""
        for on_device, on_host in self.pairs(states, device_slot, host_slot):
            on_device.copy_(on_host, non_blocking=True)


def slot_bytes(row_bytes: int) -> int:
    """Return the bytes of a slot for states of `row_bytes`."""
    return -(-row_bytes // _ALIGNMENT) * _ALIGNMENT


def allocate_host_states(states: StatePool, slots: int) -> HostStates:
    """Allocate a host tier for snapshots of `states`; memory is touched only as it is used."""
    matrices, inputs = states.matrices[:, 0], states.inputs[:, 0]
    border = matrices.numel() * matrices.itemsize
    size = border + inputs.numel() * inputs.itemsize
    memory = HostArena().zeros((slots, slot_bytes(size)), torch.uint8)
    return HostStates(
        memory,
        memory[:, :border].view(matrices.dtype).view(slots, *matrices.shape),
        memory[:, border:size].view(inputs.dtype).view(slots, *inputs.shape),
    )
