from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.plans.rows import PaddedTable

ROWS = 4
changes = st.tuples(st.integers(0, ROWS - 1), st.lists(st.integers(1, 9), max_size=6), st.none() | st.integers(10, 12))


@given(st.lists(changes, max_size=20))
def test_each_row_is_its_list_and_then_its_padding(sets: list[tuple[int, list[int], int | None]]) -> None:
    table = PaddedTable(ROWS, np.int64, fill=-1)
    wanted: dict[int, tuple[list[int], int]] = {row: ([], -1) for row in range(ROWS)}
    for row, values, padding in sets:
        table.set(row, np.array(values, np.int64), padding)
        wanted[row] = (values, -1 if padding is None else padding)
    width = table.values.shape[1]
    assert width == max([1, *(len(values) for _, values, _ in sets)])
    for row, (values, padding) in wanted.items():
        assert table.values[row].tolist() == values + [padding] * (width - len(values))
