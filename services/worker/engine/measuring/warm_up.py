"""Passes of every kind before the first request, which then waits for no kernel to be compiled or loaded.

Programs are compiled for ranges of batch sizes, and libraries load another kernel for another number of tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from common.steps import NO_PAGES, PrefillChunk, RowOpen, StepPlan
from common.types import AdapterSlot, RequestId, RowSlot, SamplingParams, StepId
from services.worker.engine.plans.plan import PlanLimits
from services.worker.engine.plans.rows import RowStates

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.steps import EngineCapacity, EngineSpec
    from services.worker.engine.execution.engine import PlanRunner

    MakeRunner = Callable[[RowStates, PlanLimits], PlanRunner]

_PROMPT = 8
# A plain row, one with filters, and one with logits processors and log probabilities.
_SAMPLING = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_p=0.9, top_k=5),
    SamplingParams(temperature=0.0, frequency_penalty=0.5, logit_bias={0: 1.0}, top_logprobs=1),
)
# Tokens that a row may get while others join it, doubling their number each time.
_GROWTH = 16
# The shortest prompt that is run alone; then twice as long, and so on.
_SHORTEST_ALONE = 32


def warm_up(make_runner: MakeRunner, capacity: EngineCapacity, spec: EngineSpec, adapter_slots: int = 0) -> None:
    """Run prompts beside ever more decoding rows, then ever longer prompts, as far as rows, pages and steps allow.

    With slots of adapters, a short prompt and one as long as a step then use one, which is empty. Ranks of a group do
    so at the same time, and compute the same passes.

    What this leaves in the first pages was never anybody's, and is written over before it is read.
    """
    if capacity.max_context < _PROMPT + _GROWTH or spec.max_step_tokens < _PROMPT + len(_SAMPLING):
        return
    passes = _Passes(make_runner, capacity, spec, adapter_slots)
    for sampling in _SAMPLING:
        passes.add((_PROMPT,), sampling, steps=2)
    while passes.add((_PROMPT,) * passes.open_rows, _SAMPLING[0]):
        pass
    passes.close()
    length = _SHORTEST_ALONE
    while passes.add((length,), _SAMPLING[0]):
        passes.close()
        length *= 2
    longest = min(spec.max_step_tokens, capacity.max_context - _GROWTH)
    passes.add((longest,), _SAMPLING[0])
    for prompt in (_PROMPT, longest) if adapter_slots else ():
        passes.close()
        passes.add((prompt,), _SAMPLING[0], adapter=AdapterSlot(0))
    passes.finish()


class _Passes:
    """Rows that are open meanwhile, on the first pages."""

    def __init__(self, make_runner: MakeRunner, capacity: EngineCapacity, spec: EngineSpec, adapter_slots: int) -> None:
        window = capacity.window_pool
        rows = RowStates(
            spec.max_rows,
            capacity.max_context,
            capacity.page_size,
            has_window_pool=window is not None,
            has_states=capacity.recurrent_states is not None,
        )
        limits = PlanLimits(
            capacity.vocabulary_size,
            capacity.device_pages,
            spec.max_step_tokens,
            window_pages=window.pages if window else 0,
            window_tokens=window.window_tokens if window else 0,
            adapters=adapter_slots,
        )
        self._runner = make_runner(rows, limits)
        self._capacity = capacity
        self._spec = spec
        # Its rows use the same pages of both pools.
        self._pages = min(capacity.device_pages, window.pages) if window else capacity.device_pages
        self._next_step = 1
        self._next_page = 0
        self.open_rows = 0
        self._closes: tuple[RowSlot, ...] = ()

    def add(
        self, prompts: tuple[int, ...], sampling: SamplingParams, steps: int = 1, adapter: AdapterSlot | None = None
    ) -> bool:
        """Compute prompts of these lengths beside the rows there are, which decode; return whether there was room."""
        size = self._capacity.page_size
        pages = sum(-(-(length + _GROWTH) // size) for length in prompts)
        fits = (
            self.open_rows + len(prompts) <= self._spec.max_rows
            and self._next_page + pages <= self._pages
            and self.open_rows + sum(prompts) <= self._spec.max_step_tokens
            and max(prompts) + _GROWTH <= self._capacity.max_context
        )
        if not fits:
            return False
        opens = tuple(self._open(length, sampling, adapter) for length in prompts)
        chunks = tuple(PrefillChunk(opened.row, 0, opened.token_ids.size) for opened in opens)
        plan = StepPlan(self._step(), closes=self._closes, opens=opens, prefills=chunks, steps=steps)
        self._closes = ()
        self._runner.run(plan, lambda _result: None)
        return True

    def close(self) -> None:
        """Give all rows and pages back with the next plan."""
        self._closes = tuple(RowSlot(row) for row in range(self.open_rows))
        self.open_rows = self._next_page = 0

    def finish(self) -> None:
        """Wait for all launched passes."""
        self._runner.settle(lambda: False)

    def _open(self, length: int, sampling: SamplingParams, adapter: AdapterSlot | None) -> RowOpen:
        row, total = self.open_rows, length + _GROWTH
        pages = -(-total // self._capacity.page_size)
        self.open_rows += 1
        self._next_page += pages
        taken = np.arange(self._next_page - pages, self._next_page, dtype=np.int32)
        return RowOpen(
            row=RowSlot(row),
            request_id=RequestId(f"warm-up-{row}"),
            token_ids=np.arange(length, dtype=np.int32) % self._capacity.vocabulary_size,
            prompt_tokens=length,
            computed_tokens=0,
            pages=taken,
            window_pages=taken if self._capacity.window_pool else NO_PAGES,
            sampling=sampling,
            max_total_tokens=total,
            adapter=adapter,
        )

    def _step(self) -> StepId:
        self._next_step += 1
        return StepId(self._next_step)
