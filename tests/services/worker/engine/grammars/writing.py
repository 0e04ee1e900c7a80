"""Lets an engine's model write under grammars, with and without jumping forward."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from common.steps import EngineSpec, JumpLimit, RowOpen, StepPlan
from common.types import FinishReason, RowSlot, SamplingParams, StepId
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.execution.torch_model import torch_engine
from services.worker.engine.loader import load_decoder
from tests.services.worker.engine.grammars.outputs import EOS, SOURCE, library
from tests.services.worker.engine.scenario import chunk, open_row

if TYPE_CHECKING:
    from common.grammars import Grammar
    from common.steps import StepResult
    from services.worker.engine.execution.engine import ModelEngine

# "The capital of France is", with the bundled model's tokenizer.
PROMPT = [504, 3575, 282, 4649, 314]
NEW_TOKENS = 100
ROWS = 8
PAGES = 8


def load(dtype: str = "auto") -> ModelEngine:
    """Return an engine with the bundled model and `ROWS` rows."""
    made = torch_engine(lambda spec, report: load_decoder(spec, report, RunnerOptions()), library())
    spec = EngineSpec(SOURCE.model, dtype=dtype, max_rows=ROWS, max_context=128, device_pages=ROWS * PAGES)
    assert made.configure(spec, lambda *_: None).jumps_forward
    return made


def outputs(
    engine: ModelEngine, grammars: list[Grammar], sampling: SamplingParams, jump: int
) -> tuple[list[list[int]], int]:
    """Let the model write under each grammar; return what it has written and in how many passes."""
    engine.reset()
    total = len(PROMPT) + NEW_TOKENS
    opens: list[RowOpen] = []
    for row, grammar in enumerate(grammars):
        pages = range(row * PAGES, (row + 1) * PAGES)
        bound = SamplingParams(temperature=sampling.temperature, seed=sampling.seed + row, grammar=grammar)
        opens.append(open_row(row, PROMPT, pages, total=total, stop=(EOS,), sampling=bound))
    written: list[list[int]] = [[] for _ in grammars]
    ended: dict[int, FinishReason] = {}
    results: list[StepResult] = []
    for step in itertools.count(1):
        jumps = tuple(
            JumpLimit(RowSlot(row), min(len(PROMPT) + len(ids) + 1 + jump, total))
            for row, ids in enumerate(written)
            if jump and row not in ended
        )
        first = step == 1
        prefills = tuple(chunk(row, 0, len(PROMPT)) for row in range(len(opens))) if first else ()
        engine.execute(
            StepPlan(StepId(step), opens=tuple(opens) if first else (), prefills=prefills, jumps=jumps), results.append
        )
        result = results[-1]
        for row, token in (
            *zip(result.rows.tolist(), result.token_ids.tolist(), strict=True),
            *zip(result.forced_rows.tolist(), result.forced_token_ids.tolist(), strict=True),
        ):
            written[row].append(token)
        ended |= {stop.row: stop.reason for stop in result.stops}
        if len(ended) == len(grammars):
            return written, step
    raise AssertionError
