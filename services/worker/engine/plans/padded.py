"""Short lists of different lengths, one per row, as one rectangular array, so that many rows are read at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

ScalarT = TypeVar("ScalarT", bound=np.generic)


class PaddedTable(Generic[ScalarT]):
    """`values[row]` is the row's list, followed by the row's padding; as wide as the longest list ever set."""

    def __init__(self, rows: int, dtype: type[ScalarT], fill: float) -> None:
        """Start with empty lists, padded with `fill`."""
        self.values: NDArray[ScalarT] = np.full((rows, 1), fill, dtype)
        self._padding: NDArray[ScalarT] = np.full(rows, fill, dtype)
        self._fill = fill

    def set(self, row: int, values: NDArray[ScalarT], padding: float | None = None) -> None:
        """Replace one row's list; `padding` follows it instead of the table's own."""
        if values.size > self.values.shape[1]:
            self._widen(values.size)
        self._padding[row] = self._fill if padding is None else padding
        self.values[row, : values.size] = values
        self.values[row, values.size :] = self._padding[row]

    def _widen(self, width: int) -> None:
        extra = np.repeat(self._padding[:, None], width - self.values.shape[1], axis=1)
        self.values = np.concatenate([self.values, extra], axis=1)
