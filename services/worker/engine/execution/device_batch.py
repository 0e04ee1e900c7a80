"""The state of rows on the device, which passes read and update without waiting for the host.

One int32 array, a line per row slot: length, last token, seed, sampling parameters, offset of positions, then the page
tables. The host writes what plans change, a few cells at a time; passes read it, and append what they sample. So the
host may lag by a pass. The last line is for padding rows, which fill a batch up to the capture size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from services.worker.engine.kernels.gpu import device_batch as row_state
from services.worker.engine.uploads import to_device

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from common.steps import EngineCapacity, EngineSpec, RowOpen, StepPlan
    from services.worker.engine.plans.rows import RowIndices, RowStates

_PAGES = row_state.PAGES.value


class DeviceBatch:
    """Owns the state; changes gather until `upload` sends them, in the order of the stream."""

    def __init__(
        self, max_rows: int, table_width: int, padding_page: int, vocabulary_size: int, device: torch.device,
        *, window_padding_page: int | None = None,
    ) -> None:  # fmt: skip
        """Make `max_rows` lines with page tables of `table_width`, and one for padding, with a page of its own.

        With `window_padding_page`, a second page table follows, of the layers that have pages of their own.
        """
        self.padding_slot = max_rows
        self._width = table_width
        columns = _PAGES + table_width * (1 if window_padding_page is None else 2)
        self.cells = torch.zeros(max_rows + 1, columns, dtype=torch.int32, device=device)
        self.cells[max_rows, row_state.LENGTH.value] = 1
        self.cells[max_rows, _PAGES] = padding_page
        self.window_table: torch.Tensor | None = None
        if window_padding_page is not None:
            self.cells[max_rows, _PAGES + table_width] = window_padding_page
            # [slots, table_width] int32, a view.
            self.window_table = self.cells[:, _PAGES + table_width :]
        self._vocabulary_size = vocabulary_size
        self._places: list[NDArray[np.int32]] = []
        self._values: list[NDArray[np.int32]] = []
        # Of the queued changes; each changes a cell once.
        self._sources = 0

    @classmethod
    def of(cls, spec: EngineSpec, capacity: EngineCapacity, device: torch.device) -> DeviceBatch:
        """Return the state of all rows of an engine; each pool has a page more than `capacity` says, for padding."""
        return cls(
            spec.max_rows,
            -(-capacity.max_context // capacity.page_size),
            padding_page=capacity.device_pages,
            vocabulary_size=capacity.vocabulary_size,
            device=device,
            window_padding_page=capacity.window_pool.pages if capacity.window_pool else None,
        )

    @property
    def page_table(self) -> torch.Tensor:
        """[slots, table_width] int32, a view."""
        return self.cells[:, _PAGES : _PAGES + self._width]

    @property
    def last_tokens(self) -> torch.Tensor:
        """[slots] int32, a view."""
        return self.cells[:, row_state.LAST_TOKEN.value]

    def mirror(self, plan: StepPlan, rows: RowStates, needs: NDArray[np.uint16]) -> None:
        """Queue the changes that `plan` made in `rows`; `needs` [slots] are the rows' `Needs`."""
        self._sources += 1
        changed: dict[int, int] = {}
        for opened in plan.opens:
            self._open(opened, int(needs[opened.row]), int(rows.stops_from[opened.row]))
            changed[opened.row] = 0
        for replacement in plan.replacements:
            changed[replacement.row] = min(changed.get(replacement.row, replacement.first), replacement.first)
        if plan.grants.rows.size:
            granted, counts = np.unique(plan.grants.rows, return_counts=True)
            for row, first in zip(granted.tolist(), (rows.page_counts[granted] - counts).tolist(), strict=True):
                changed[row] = min(changed.get(row, first), first)
        for row, first in changed.items():
            self._write_pages(row, first, rows)

    def set_tokens(self, slots: RowIndices, rows: RowStates) -> None:
        """Queue lengths and last tokens of rows `slots`, which the host knows: passes here do not append them."""
        self._sources += 1
        lengths = rows.lengths[slots]
        lines = (slots * self.cells.shape[1]).astype(np.int32)
        self._places += [lines + row_state.LENGTH.value, lines + row_state.LAST_TOKEN.value]
        self._values += [lengths.astype(np.int32), rows.token_ids[slots, lengths - 1]]

    def upload(self) -> None:
        """Send the queued changes; later launches see them."""
        if not self._places:
            return
        changes = np.stack([np.concatenate(self._places), np.concatenate(self._values)])
        self._places, self._values = [], []
        if self._sources > 1:
            # All are written at once: of a cell that has changed twice, only the last value may be among them.
            _, last = np.unique(changes[0, ::-1], return_index=True)
            changes = np.ascontiguousarray(changes[:, changes.shape[1] - 1 - last])
        self._sources = 0
        sent = to_device(changes, self.cells.device)
        row_state.scatter(self.cells, sent[0], sent[1])

    def _open(self, opened: RowOpen, needs: int, stops_from: int) -> None:
        sampling = opened.sampling
        header = np.zeros(_PAGES, np.int32)
        bits = header.view(np.float32)
        header[row_state.LENGTH.value] = opened.token_ids.size
        header[row_state.SEED_LOW.value : row_state.SEED_HIGH.value + 1] = np.array([sampling.seed], np.uint64).view(
            np.int32
        )
        bits[row_state.TEMPERATURE.value] = sampling.temperature
        header[row_state.TOP_K.value] = min(sampling.top_k or self._vocabulary_size, self._vocabulary_size)
        bits[row_state.TOP_P.value] = sampling.top_p
        bits[row_state.MIN_P.value] = sampling.min_p
        header[row_state.NEEDS.value] = needs
        bits[row_state.REPETITION_PENALTY.value] = sampling.repetition_penalty
        bits[row_state.PRESENCE_PENALTY.value] = sampling.presence_penalty
        bits[row_state.FREQUENCY_PENALTY.value] = sampling.frequency_penalty
        header[row_state.STOPS_FROM.value] = stops_from
        header[row_state.POSITION_OFFSET.value] = opened.position_offset
        self._write(opened.row, 0, header)

    def _write_pages(self, row: int, first: int, rows: RowStates) -> None:
        # A row may be granted more pages than its context can use; those are never read.
        last = min(int(rows.page_counts[row]), self._width)
        if last <= first:
            return
        self._write(row, _PAGES + first, rows.page_table[row, first:last])
        if rows.window_table is not None:
            self._write(row, _PAGES + self._width + first, rows.window_table[row, first:last])

    def _write(self, row: int, column: int, values: NDArray[np.int32]) -> None:
        start = row * self.cells.shape[1] + column
        self._places.append(np.arange(start, start + values.size, dtype=np.int32))
        self._values.append(values.copy())
