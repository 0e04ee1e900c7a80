"""Short forms of what plans are made of, and a random scheduler that makes valid ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from common.steps import EngineCapacity, PageGrants, PageReplacement, PrefillChunk, RowOpen, StepPlan, StepResult
from common.types import RequestId, RowSlot, SamplingParams, StepId, TokenIds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from random import Random

GREEDY = SamplingParams(temperature=0)


def ids(values: Iterable[int]) -> TokenIds:
    return np.array(list(values), np.int32)


def open_row(
    row: int,
    tokens: Iterable[int],
    pages: Iterable[int] = (),
    *,
    computed: int = 0,
    prompt: int | None = None,
    total: int = 64,
    stop: tuple[int, ...] = (),
    min_new: int = 0,
    sampling: SamplingParams = GREEDY,
) -> RowOpen:
    token_ids = ids(tokens)
    return RowOpen(
        RowSlot(row), RequestId(f"request-{row}"), token_ids, len(token_ids) if prompt is None else prompt, computed,
        ids(pages), sampling, total, stop, min_new,
    )  # fmt: skip


def chunk(row: int, start: int, length: int) -> PrefillChunk:
    return PrefillChunk(RowSlot(row), start, length)


def grant(row: int, pages: Iterable[int]) -> PageGrants:
    return grants({row: pages})


def grants(pages_by_row: Mapping[int, Iterable[int]]) -> PageGrants:
    pairs = [(row, page) for row, pages in pages_by_row.items() for page in pages]
    return PageGrants(ids(row for row, _ in pairs), ids(page for _, page in pairs))


def tokens_by_row(result: StepResult) -> dict[int, int]:
    return dict(zip(result.rows.tolist(), result.token_ids.tolist(), strict=True))


@dataclass
class _Row:
    known: list[int]
    prompt: int
    total: int
    pages: list[int]
    computed: int
    decoding: bool = False
    stopped: bool = False


@dataclass
class RandomScheduler:
    """Makes plans that are valid for the results so far, at random; it knows no more than a scheduler does."""

    random: Random
    capacity: EngineCapacity
    max_rows: int
    rows: dict[int, _Row] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    # Ids whose KV is still in the pages of a row that was closed.
    remembered: list[tuple[list[int], list[int]]] = field(default_factory=list)
    step: int = 0

    def __post_init__(self) -> None:
        self.free = list(range(self.capacity.device_pages))
        self.random.shuffle(self.free)

    def plan(self) -> StepPlan:
        self.step += 1
        steps = self.random.choice([1, 1, 2, 5])
        closes = [row for row in list(self.rows) if self.rows[row].stopped or self.random.random() < 0.05]
        for row in closes:
            self._close(row)
        opens = [self._open(row) for row in range(self.max_rows) if row not in self.rows and self.random.random() < 0.5]
        replacements = [self._replace(row) for row in self.rows if self._may_replace(row)]
        chunks = [made for row in self.rows if (made := self._chunk(row)) is not None]
        granted = {row: self._granted(row, steps) for row in self.rows}
        return StepPlan(
            StepId(self.step),
            closes=tuple(RowSlot(row) for row in closes),
            opens=tuple(opens),
            grants=grants(granted),
            prefills=tuple(chunks),
            steps=steps,
            replacements=tuple(replacements),
        )

    def observe(self, result: StepResult) -> None:
        for row, token in tokens_by_row(result).items():
            state = self.rows[row]
            state.computed = len(state.known)
            state.known.append(token)
            state.decoding = True
        for stop in result.stops:
            self.rows[stop.row].stopped = True

    def _close(self, row: int) -> None:
        state = self.rows.pop(row)
        self.remembered.append((state.known[: state.computed], state.pages))

    def _open(self, row: int) -> RowOpen:
        size = self.capacity.page_size
        known, pages, computed = [self.random.randrange(1000) for _ in range(self.random.randint(1, 20))], [], 0
        if self.remembered and self.random.random() < 0.5:
            earlier, earlier_pages = self.random.choice(self.remembered)
            shared = min(len(earlier), self.random.randint(0, 12)) // size * size
            known = earlier[:shared] + known
            # A prefix hit, or the same tokens computed once more, which makes pages that can be replaced.
            if self.random.random() < 0.5:
                pages, computed = earlier_pages[: shared // size], shared
        prompt = self.random.randint(1, len(known))
        total = self.random.randint(len(known) + 1, min(len(known) + 12, self.capacity.max_context))
        self.rows[row] = _Row(known, prompt, total, list(pages), computed)
        # A few of these ids do come up, at one in ten tokens.
        stop = tuple(self.random.sample(range(1000), 100))
        return open_row(row, known, pages, computed=computed, prompt=prompt, total=total, stop=stop)

    def _may_replace(self, row: int) -> bool:
        # Only whole pages that nobody writes to any more can have a copy, and here only whose copy exists.
        state = self.rows[row]
        return any(self._copies(state)) and self.random.random() < 0.3

    def _copies(self, state: _Row) -> Iterable[tuple[list[int], int]]:
        size = self.capacity.page_size
        for earlier, pages in self.remembered:
            whole = min(len(earlier), state.computed) // size
            if whole and earlier[: whole * size] == state.known[: whole * size]:
                yield pages[:whole], whole

    def _replace(self, row: int) -> PageReplacement:
        state = self.rows[row]
        pages, whole = self.random.choice(list(self._copies(state)))
        first = self.random.randrange(whole)
        replaced = state.pages[first:whole]
        state.pages[first:whole] = pages[first:whole]
        held = {page for row in self.rows.values() for page in row.pages}
        held.update(page for _, earlier in self.remembered for page in earlier)
        # Freed for whoever asks next, so that a row that still used them would be found out.
        self.free.extend(page for page in replaced if page not in held)
        return PageReplacement(RowSlot(row), first, ids(pages[first:whole]))

    def _chunk(self, row: int) -> PrefillChunk | None:
        state = self.rows[row]
        left = len(state.known) - state.computed
        if state.decoding or self.random.random() < 0.2:
            return None
        length = self.random.randint(1, min(left, 7))
        made = chunk(row, state.computed, length)
        state.computed += length
        return made

    def _granted(self, row: int, steps: int) -> list[int]:
        state = self.rows[row]
        ends = state.computed == len(state.known)
        reach = state.computed + (steps if state.decoding else steps - 1 if ends else 0)
        missing = -(-min(reach, state.total - 1) // self.capacity.page_size) - len(state.pages)
        pages = [self.free.pop() for _ in range(missing)]
        state.pages.extend(pages)
        return pages
