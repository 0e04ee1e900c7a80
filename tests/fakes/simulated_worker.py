"""A worker without a model that checks what a real one would silently compute wrong.

Its KV memory remembers which token at which position was written to each slot, and every pass verifies the whole
history of each row that it reads. The next token is a hash of all tokens before, so a wrong page, a lost token or a
repeated one changes everything that follows.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np

from common.steps import RowOpen, RowStop, StepPlan, StepResult
from common.types import FinishReason, RowSlot

VOCABULARY = 1000


def next_token(token_ids: list[int], vocabulary: int = VOCABULARY) -> int:
    """The token that follows; a pure function of all before."""
    return zlib.crc32(np.array(token_ids, np.int32).tobytes()) % vocabulary


def expected_output(prompt: list[int], max_total: int, stop_ids: tuple[int, ...] = ()) -> list[int]:
    """What a row must generate, whatever happens to it on the way."""
    ids = list(prompt)
    while len(ids) < max_total:
        ids.append(next_token(ids))
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :]


@dataclass
class _Row:
    opened: RowOpen
    ids: list[int]
    pages: list[int]
    computed: int
    decoding: bool = False
    stopped: bool = False


@dataclass
class SimulatedWorker:
    pages: int
    page_size: int
    rows: dict[int, _Row] = field(default_factory=dict)
    # slot -> (token, position)
    kv: dict[int, tuple[int, int]] = field(default_factory=dict)
    last_step: int = 0

    def run(self, plan: StepPlan) -> list[StepResult]:
        assert plan.step_id > self.last_step, "step ids increase"
        assert plan.steps >= 1
        self.last_step = plan.step_id
        self._keep_books(plan)
        results = []
        for substep in range(plan.steps):
            sampled = self._prefill(plan) if substep == 0 else {}
            for number, row in self.rows.items():
                if row.decoding and not row.stopped and number not in sampled:
                    sampled[number] = self._compute(row, row.computed, len(row.ids))
            stops = [stop for number in sampled if (stop := self._append(number, sampled[number]))]
            results.append(
                StepResult(
                    step_id=plan.step_id,
                    substep=substep,
                    last=substep == plan.steps - 1,
                    rows=np.array(list(sampled), np.int32),
                    token_ids=np.array(list(sampled.values()), np.int32),
                    stops=tuple(stops),
                    compute_us=1000,
                )
            )
        return results

    def _keep_books(self, plan: StepPlan) -> None:
        for closed in plan.closes:
            del self.rows[closed]
        for opened in plan.opens:
            assert opened.row not in self.rows, "slot in use"
            assert 0 <= opened.computed_tokens < len(opened.token_ids)
            pages = opened.pages.tolist()
            self.rows[opened.row] = _Row(opened, opened.token_ids.tolist(), pages, opened.computed_tokens)
        for replacement in plan.replacements:
            row = self.rows[replacement.row]
            assert replacement.first + len(replacement.pages) <= len(row.pages)
            row.pages[replacement.first : replacement.first + len(replacement.pages)] = replacement.pages.tolist()
        for grant in plan.grants:
            self.rows[grant.row].pages.extend(grant.pages.tolist())
        for row in self.rows.values():
            assert len(set(row.pages)) == len(row.pages), "a page twice in one row"
            assert all(0 <= page < self.pages for page in row.pages)

    def _prefill(self, plan: StepPlan) -> dict[int, int]:
        sampled = {}
        for chunk in plan.prefills:
            row = self.rows[chunk.row]
            assert chunk.length > 0
            assert chunk.start == row.computed, "chunks are contiguous"
            end = chunk.start + chunk.length
            token = self._compute(row, chunk.start, end)
            if end == len(row.ids):
                row.decoding = True
                sampled[int(chunk.row)] = token
        return sampled

    def _compute(self, row: _Row, start: int, end: int) -> int:
        """Write KV of [start, end), then read all of [0, end)."""
        assert end <= len(row.pages) * self.page_size, "row runs beyond its pages"
        for position in range(start, end):
            self.kv[self._slot(row, position)] = (row.ids[position], position)
        for position in range(end):
            slot = self._slot(row, position)
            assert self.kv.get(slot) == (row.ids[position], position), f"wrong KV at position {position}"
        row.computed = end
        return next_token(row.ids[:end])

    def _slot(self, row: _Row, position: int) -> int:
        return row.pages[position // self.page_size] * self.page_size + position % self.page_size

    def _append(self, number: int, token: int) -> RowStop | None:
        row = self.rows[number]
        row.ids.append(token)
        generated = len(row.ids) - row.opened.prompt_tokens
        if token in row.opened.stop_token_ids and generated > row.opened.min_new_tokens:
            row.stopped = True
            return RowStop(RowSlot(number), FinishReason.STOP, token)
        if len(row.ids) >= row.opened.max_total_tokens:
            row.stopped = True
            return RowStop(RowSlot(number), FinishReason.LENGTH)
        return None
