"""Gated delta nets: layers that keep one state per row instead of keys and values of all its tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from services.worker.engine.kernels.interface import DeltaNetConstants, LayerStates
from services.worker.engine.quantization.matrices import above, are_alike, reordered

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from services.worker.engine.kernels.interface import DeltaNet, Kernels
    from services.worker.engine.model.batch import ForwardBatch
    from services.worker.engine.model.config import RecurrentConfig
    from services.worker.engine.model.tensors import CheckedTensors
    from services.worker.engine.parallel.shards import Span
    from services.worker.engine.quantization.matrices import Matrix


@dataclass(frozen=True, slots=True)
class StatePool:
    """Recurrent states of a model on this rank: those of each row, then one for padding rows, then snapshots."""

    matrices: torch.Tensor  # [layers, slots, value_heads, key_dim, value_dim] float32
    inputs: torch.Tensor  # [layers, slots, kernel - 1, conv_width]
    rows: int

    @property
    def layers(self) -> tuple[LayerStates, ...]:
        """The states of each recurrent layer, in the order of layers."""
        return tuple(LayerStates(*parts) for parts in zip(self.matrices, self.inputs, strict=True))

    @property
    def snapshots(self) -> int:
        """Number of snapshots."""
        return self.matrices.shape[1] - self.rows - 1

    def place_of(self, snapshot: int) -> int:
        """Return the slot of a snapshot among all of a layer."""
        return self.rows + 1 + snapshot

    def load(self, row: int, snapshot: int) -> None:
        """Let a row continue from a snapshot."""
        self._copy(self.place_of(snapshot), row)

    def save(self, row: int, snapshot: int) -> None:
        """Overwrite a snapshot with a row's states."""
        self._copy(row, self.place_of(snapshot))

    def _copy(self, source: int, target: int) -> None:
        for states in (self.matrices, self.inputs):
            states[:, target].copy_(states[:, source])


def state_bytes(config: RecurrentConfig, key_heads: int, dtype: torch.dtype) -> int:
    """Return the bytes of a row's states over all layers, on a rank with so many key heads."""
    part = config.conv_width // config.key_heads * key_heads
    matrix = key_heads * config.values_per_key * config.key_dim * config.value_dim
    return len(config.layers) * (4 * matrix + dtype.itemsize * (config.kernel - 1) * part)


def allocate_states(
    config: RecurrentConfig, key_heads: int, slots: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> StatePool:
    """Allocate states of a rank with so many key heads, for `slots` rows and snapshots.

    They are zeroed, since padding rows compute with them.
    """
    rows, snapshots = slots
    heads = key_heads * config.values_per_key
    width = config.conv_width // config.key_heads * key_heads
    shape = len(config.layers), rows + 1 + snapshots
    return StatePool(
        torch.zeros(*shape, heads, config.key_dim, config.value_dim, device=device),
        torch.zeros(*shape, config.kernel - 1, width, dtype=dtype, device=device),
        rows,
    )


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """One layer's recurrence on this rank, from its input up to the output projection."""

    projection: Callable[[torch.Tensor], torch.Tensor]
    recurrence: DeltaNet
    width: int
    """Of the outputs."""

    def __call__(self, inputs: torch.Tensor, states: LayerStates, batch: ForwardBatch) -> torch.Tensor:
        """Advance the states by inputs [tokens, hidden]; return outputs [tokens, value_heads * value_dim]."""
        projected = self.projection(inputs)
        outputs = projected.new_empty(inputs.shape[0], self.width)
        advance = partial(self._advance, states)
        if batch.defer is None:
            advance(projected, outputs, batch)
        else:
            batch.defer(advance, projected, outputs, in_window=False)
        return outputs

    def _advance(
        self, states: LayerStates, projected: torch.Tensor, outputs: torch.Tensor, batch: ForwardBatch
    ) -> None:
        assert batch.states is not None, "the batch of a model with recurrent layers has their slots"
        self.recurrence.advance(states, projected, outputs, batch.states)


@dataclass(frozen=True, slots=True)
class RecurrentReader:
    """Reads the gated delta nets of one rank, which has some key heads and their value heads."""

    tensors: CheckedTensors
    kernels: Kernels
    device: torch.device
    heads: Span
    """Key heads."""

    def read(self, name: str) -> GatedDeltaNet:
        """Read the layer whose names begin with `name`, but for its output projection."""
        config = self._config
        values = self._value_heads.scaled(1)
        filters = self.tensors.plain(f"{name}.conv1d.weight").squeeze(1)
        filters = torch.cat([filters[part] for part in self._conv_parts]).t()
        constants = DeltaNetConstants(
            filters=filters.to(self.device, self.kernels.activation_dtype).contiguous(),
            decay_scales=-self._float32(f"{name}.A_log")[values].exp(),
            decay_bias=self._float32(f"{name}.dt_bias")[values],
            norm=self._float32(f"{name}.norm.weight"),
            epsilon=self.tensors.checkpoint.config.norm_epsilon,
            key_heads=len(self.heads),
            values_per_key=config.values_per_key,
            key_dim=config.key_dim,
            value_dim=config.value_dim,
        )
        projection = self._by_head(name) if config.is_by_head else self._by_kind(name)
        return GatedDeltaNet(projection, self.kernels.delta_net(constants), constants.values)

    def _by_kind(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        values = self._value_heads
        gates = values.scaled(self._config.value_dim)
        main = self.tensors.alike(
            [
                *((f"{name}.in_proj_qkv.weight", part, None) for part in self._conv_parts),
                (f"{name}.in_proj_z.weight", gates, None),
            ]
        )
        small = self.tensors.alike([(f"{name}.in_proj_{each}.weight", values.scaled(1), None) for each in "ba"])
        return self._product(above(*main), above(*small))

    def _by_head(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        config = self._config
        sizes = (config.key_dim, config.key_dim, *(config.values_per_key * config.value_dim,) * 2)
        main = self.tensors.matrix(f"{name}.in_proj_qkvz.weight", self.heads.scaled(sum(sizes)))
        small = self.tensors.matrix(f"{name}.in_proj_ba.weight", self.heads.scaled(2 * config.values_per_key))
        order = self._by_kind_order(sizes)
        return self._product(
            reordered(main, order), reordered(small, self._by_kind_order((config.values_per_key,) * 2))
        )

    def _by_kind_order(self, sizes: Sequence[int]) -> torch.Tensor:
        """Return the rows of a matrix that has parts of `sizes` for each head, one kind of parts after the other."""
        by_head = torch.arange(len(self.heads) * sum(sizes)).view(len(self.heads), -1)
        return torch.cat([part.flatten() for part in torch.split(by_head, list(sizes), dim=1)])

    def _product(self, main: Matrix, small: Matrix) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return one product where it can be: quantised checkpoints leave the small matrix as it was."""
        if are_alike((main, small)):
            return self.kernels.linear(above(main, small), None)
        products = [self.kernels.linear(matrix, None) for matrix in (main, small)]
        return lambda inputs: torch.cat([product(inputs) for product in products], dim=1)

    @property
    def _config(self) -> RecurrentConfig:
        config = self.tensors.checkpoint.config.recurrent
        assert config is not None, "the model has recurrent layers"
        return config

    @property
    def _value_heads(self) -> Span:
        each = self._config.values_per_key
        return replace(self.heads, start=self.heads.start * each, stop=self.heads.stop * each)

    @property
    def _conv_parts(self) -> tuple[slice, ...]:
        """This rank's queries, keys and values among those of all ranks."""
        config = self._config
        keys, values = self.heads.scaled(config.key_dim), self._value_heads.scaled(config.value_dim)
        width = config.key_heads * config.key_dim
        return (
            keys,
            slice(width + keys.start, width + keys.stop),
            slice(2 * width + values.start, 2 * width + values.stop),
        )

    def _float32(self, name: str) -> torch.Tensor:
        return self.tensors.plain(name).to(self.device, torch.float32, copy=True)
