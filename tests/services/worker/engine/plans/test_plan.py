from __future__ import annotations

from dataclasses import replace

import pytest

from common.steps import PageGrants, PageReplacement, StepPlan
from common.transfers import Transfer, TransferDirection, TransferId
from common.types import RowSlot, StepId
from services.worker.engine.execution.interface import InvalidPlanError
from services.worker.engine.plans.plan import PlanLimits, apply_bookkeeping
from services.worker.engine.plans.rows import RowStates
from tests.services.worker.engine.scenario import chunk, grant, ids, open_row

LIMITS = PlanLimits(
    vocabulary_size=100, device_pages=50, max_step_tokens=16, host_pages=20, snapshots=5, host_snapshots=7
)
BACKUP = TransferDirection.DEVICE_TO_HOST
OPEN = StepPlan(StepId(1), opens=(open_row(0, range(6), [1, 2], computed=4, total=40),))


def rows(*plans: StepPlan) -> RowStates:
    table = RowStates(max_rows=4, max_context=40, page_size=4)
    for plan in plans:
        apply_bookkeeping(plan, table, LIMITS)
    return table


def replacement(row: int, first: int, pages: list[int]) -> PageReplacement:
    return PageReplacement(RowSlot(row), first, ids(pages))


def transfer(device: list[int], host: list[int], direction: TransferDirection = BACKUP) -> Transfer:
    return Transfer(TransferId(8), direction, ids(device), ids(host))


def moved(device: list[int], host: list[int]) -> StepPlan:
    """Return a plan that copies snapshots and no page."""
    copies = Transfer(TransferId(8), BACKUP, device_snapshots=ids(device), host_snapshots=ids(host))
    return StepPlan(StepId(2), transfers=(copies,))


@pytest.mark.parametrize(
    ("plan", "complaint"),
    [
        (StepPlan(StepId(2), steps=0), "at least one step"),
        (StepPlan(StepId(2), closes=(RowSlot(1),)), "close of row 1, which is not open"),
        (StepPlan(StepId(2), closes=(RowSlot(0), RowSlot(0))), "close of row 0, which is not open"),
        (StepPlan(StepId(2), closes=(RowSlot(4),)), "close of row 4"),
        (StepPlan(StepId(2), opens=(open_row(0, [1], total=40),)), "open already"),
        (StepPlan(StepId(2), opens=(open_row(4, [1], total=40),)), "slots are 0 to 3"),
        (StepPlan(StepId(2), opens=(open_row(1, [], total=40),)), "prompt tokens"),
        (StepPlan(StepId(2), opens=(open_row(1, [1, 2], prompt=3, total=40),)), "prompt tokens"),
        (StepPlan(StepId(2), opens=(open_row(1, [1, 2], [5], computed=2, total=40),)), "computed tokens"),
        (StepPlan(StepId(2), opens=(open_row(1, [1, 2], total=2),)), "in total"),
        (StepPlan(StepId(2), opens=(open_row(1, [1, 2], total=41),)), "context of 40"),
        (StepPlan(StepId(2), opens=(open_row(1, [1, 100], total=40),)), "vocabulary"),
        (StepPlan(StepId(2), opens=(open_row(1, [-1], total=40),)), "vocabulary"),
        (StepPlan(StepId(2), opens=(open_row(1, range(6), [5], computed=5, total=40),)), "do not hold"),
        (StepPlan(StepId(2), opens=(open_row(1, [1], [50], total=40),)), "a page outside"),
        (StepPlan(StepId(2), opens=(open_row(1, [1], [-1], total=40),)), "a page outside"),
        (StepPlan(StepId(2), replacements=(replacement(1, 0, [5]),)), "not open"),
        (StepPlan(StepId(2), replacements=(replacement(0, 1, [5, 6]),)), "in a table of 2"),
        (StepPlan(StepId(2), replacements=(replacement(0, 0, [50]),)), "a page outside"),
        (StepPlan(StepId(2), grants=grant(1, [5])), "not open"),
        (StepPlan(StepId(2), grants=grant(0, [50])), "a page outside"),
        (StepPlan(StepId(2), grants=PageGrants(ids([0, 0]), ids([5]))), "2 rows and 1 pages"),
        (StepPlan(StepId(2), grants=PageGrants(ids([0, 9]), ids([5, 6]))), "page grant of row 9"),
        (StepPlan(StepId(2), prefills=(chunk(1, 0, 1),)), "not open"),
        (StepPlan(StepId(2), prefills=(chunk(0, 0, 6),)), "with 4 tokens computed"),
        (StepPlan(StepId(2), prefills=(chunk(0, 5, 1),)), "with 4 tokens computed"),
        (StepPlan(StepId(2), prefills=(chunk(0, 4, 3),)), "with 6 ids there"),
        (StepPlan(StepId(2), prefills=(chunk(0, 4, 0),)), "0 tokens"),
        (StepPlan(StepId(2), prefills=(chunk(0, 4, 1), chunk(0, 4, 1))), "two chunks"),
        (StepPlan(StepId(2), transfers=(transfer([], []),)), "transfer 8: 0 device pages"),
        (StepPlan(StepId(2), transfers=(transfer([1, 2], [3]),)), "2 device pages and 1 host pages"),
        (StepPlan(StepId(2), transfers=(transfer([50], [3]),)), "a page outside"),
        (StepPlan(StepId(2), transfers=(transfer([-1], [3]),)), "a page outside"),
        (StepPlan(StepId(2), transfers=(transfer([1], [20]),)), "a host page outside"),
        (StepPlan(StepId(2), transfers=(transfer([1], [-1]),)), "a host page outside"),
        (StepPlan(StepId(2), transfers=(transfer([1, 1], [3, 4]),)), "a page twice"),
        (StepPlan(StepId(2), transfers=(transfer([1, 2], [3, 3]),)), "a page twice"),
        (moved([1, 2], [3]), "2 snapshots on the device and 1 on the host"),
        (moved([5], [3]), r"a snapshot on the device outside \[0, 5\)"),
        (moved([-1], [3]), "a snapshot on the device outside"),
        (moved([1], [7]), r"a snapshot on the host outside \[0, 7\)"),
        (moved([1, 1], [3, 4]), "a snapshot twice"),
        (moved([1, 2], [3, 3]), "a snapshot twice"),
        (
            StepPlan(StepId(2), transfers=(transfer([], [3], TransferDirection.STORAGE_TO_HOST),)),
            "there is no storage tier",
        ),
        # Two pages hold 8 tokens: the 6 known ones and the next two.
        (StepPlan(StepId(2), prefills=(chunk(0, 4, 2),), steps=4), "needs room for 9 tokens"),
        (
            StepPlan(StepId(2), opens=(open_row(1, range(20), range(5, 10), total=40),), prefills=(chunk(1, 0, 17),)),
            "a pass of 17 tokens",
        ),
        (
            StepPlan(StepId(2), opens=(open_row(1, range(20), [5], total=40),), prefills=(chunk(1, 0, 8),)),
            "needs room for 8 tokens",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_plan_that_contradicts_the_rows_is_refused(plan: StepPlan, complaint: str) -> None:
    table = rows(OPEN)
    with pytest.raises(InvalidPlanError, match=complaint):
        apply_bookkeeping(plan, table, LIMITS)


def test_a_chunk_for_a_row_that_decodes_is_refused() -> None:
    table = rows(OPEN)
    apply_bookkeeping(StepPlan(StepId(2), prefills=(chunk(0, 4, 2),)), table, LIMITS)
    table.append_tokens(ids([0]).astype("int64"), ids([7]))
    with pytest.raises(InvalidPlanError, match="all computed"):
        apply_bookkeeping(StepPlan(StepId(3), prefills=(chunk(0, 6, 1),)), table, LIMITS)


@pytest.mark.parametrize(("steps", "is_valid"), [(2, True), (3, False)])
def test_every_pass_of_a_lease_needs_a_page_to_write_to(steps: int, is_valid: bool) -> None:
    table = rows(OPEN)
    table.append_tokens(ids([0]).astype("int64"), ids([7]))
    # 7 ids are known, of which the last is stored by the next pass; two pages hold 8.
    plan = StepPlan(StepId(2), steps=steps)
    if is_valid:
        apply_bookkeeping(plan, table, LIMITS)
    else:
        with pytest.raises(InvalidPlanError, match="row 0 needs room for 9 tokens"):
            apply_bookkeeping(plan, table, LIMITS)


def test_no_page_is_needed_beyond_a_row_s_own_end() -> None:
    opened = StepPlan(StepId(1), opens=(open_row(0, range(6), [1, 2], computed=4, total=9),))
    # The 9th token is sampled and never stored.
    chunks = apply_bookkeeping(StepPlan(StepId(2), prefills=(chunk(0, 4, 2),), steps=30), rows(opened), LIMITS)
    assert chunks.completes.tolist() == [True]


def test_a_closed_slot_can_be_opened_in_the_same_plan() -> None:
    table = rows(OPEN)
    plan = StepPlan(StepId(2), closes=(RowSlot(0),), opens=(open_row(0, [1, 2], total=40),), grants=grant(0, [9]))
    apply_bookkeeping(plan, table, LIMITS)
    assert table.open_count == 1
    assert table.page_table[0, : table.page_counts[0]].tolist() == [9]


def test_replacements_come_before_grants() -> None:
    table = rows(OPEN)
    plan = StepPlan(StepId(2), replacements=(replacement(0, 1, [30]),), grants=grant(0, [31, 32]))
    apply_bookkeeping(plan, table, LIMITS)
    assert table.page_table[0, : table.page_counts[0]].tolist() == [1, 30, 31, 32]


def test_pages_are_granted_to_many_rows_at_once() -> None:
    table = rows(OPEN, StepPlan(StepId(2), opens=(open_row(3, range(6), [7], computed=4, total=40),)))
    granted = PageGrants(ids([3, 0, 3, 3]), ids([20, 21, 22, 23]))
    apply_bookkeeping(StepPlan(StepId(3), grants=granted), table, LIMITS)
    assert table.page_table[0, : table.page_counts[0]].tolist() == [1, 2, 21]
    assert table.page_table[3, : table.page_counts[3]].tolist() == [7, 20, 22, 23]


def test_more_pages_than_the_context_needs_are_kept() -> None:
    table = rows(OPEN)
    apply_bookkeeping(StepPlan(StepId(2), grants=grant(0, range(3, 20))), table, LIMITS)
    assert table.page_table[0, : table.page_counts[0]].tolist() == [1, 2, *range(3, 20)]


WINDOWED = PlanLimits(vocabulary_size=100, device_pages=50, max_step_tokens=16, window_pages=8, window_tokens=6)
# With 9 tokens computed, the next one sees 6 from position 4 on: the first of 3 pages is out of its sight.
OPEN_WINDOWED = replace(open_row(0, range(10), [1, 2, 3], computed=9, total=40), window_pages=ids([6, 7]))


@pytest.mark.parametrize(
    ("plan", "complaint"),
    [
        (StepPlan(StepId(2), opens=(replace(OPEN_WINDOWED, row=RowSlot(1), window_pages=ids([6])),)), "open of row 1"),
        (StepPlan(StepId(2), opens=(replace(OPEN_WINDOWED, row=RowSlot(1), window_pages=ids([6, 8])),)), "outside"),
        (StepPlan(StepId(2), grants=grant(0, [4])), "page grants: 0 pages of the window pool for 1"),
        (StepPlan(StepId(2), grants=replace(grant(0, [4]), window_pages=ids([-1]))), "outside"),
        (StepPlan(StepId(2), replacements=(replacement(0, 0, [4, 5]),)), "0 pages of the window pool for 2"),
    ],
)
def test_a_plan_that_leaves_a_window_without_pages_is_refused(plan: StepPlan, complaint: str) -> None:
    table = RowStates(max_rows=4, max_context=40, page_size=4, has_window_pool=True)
    apply_bookkeeping(StepPlan(StepId(1), opens=(OPEN_WINDOWED,)), table, WINDOWED)
    with pytest.raises(InvalidPlanError, match=complaint):
        apply_bookkeeping(plan, table, WINDOWED)


def test_window_pages_are_the_last_of_a_table() -> None:
    table = RowStates(max_rows=4, max_context=40, page_size=4, has_window_pool=True)
    apply_bookkeeping(StepPlan(StepId(1), opens=(OPEN_WINDOWED,)), table, WINDOWED)
    plan = StepPlan(
        StepId(2),
        replacements=(replace(replacement(0, 0, [20, 21]), window_pages=ids([5])),),
        grants=replace(grant(0, [22]), window_pages=ids([4])),
    )
    apply_bookkeeping(plan, table, WINDOWED)
    assert table.window_table is not None
    assert table.page_table[0, :4].tolist() == [20, 21, 3, 22]
    assert table.window_table[0, 1:4].tolist() == [5, 7, 4]


def test_a_uniform_model_has_no_window_pages() -> None:
    with pytest.raises(InvalidPlanError, match="which there is not"):
        rows(StepPlan(StepId(1), opens=(OPEN_WINDOWED,)))
