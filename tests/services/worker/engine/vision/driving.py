"""Runs prompts with images through the whole engine, from plans to tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from common.steps import EngineSpec, StepPlan, StepResult
from common.types import RowSlot, SamplingParams, StepId
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.execution.torch_model import torch_engine
from services.worker.engine.loader import load_decoder
from tests.services.worker.engine.parallel.ranks import can_capture, gpu_of
from tests.services.worker.engine.scenario import chunk, open_row

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from services.worker.engine.execution.engine import ModelEngine
    from tests.services.worker.engine.vision.models import Prompt

PAGE = 16
NEW_TOKENS = 8
TOP = 5
GREEDY = SamplingParams(temperature=0)
GREEDY_WITH_LOGPROBS = SamplingParams(temperature=0, top_logprobs=TOP)


def engine_of(
    directory: Path | str, backend: str = "torch", *, rank: int = 0, world_size: int = 1, rendezvous: str = "",
    device: str = "cpu", dtype: str = "float32",
) -> ModelEngine:  # fmt: skip
    """Return an engine that has loaded a model and its encoder."""
    options = RunnerOptions(
        backend=backend, threads=1, device=device, device_index=gpu_of(rank), graphs=world_size == 1 or can_capture()
    )
    engine = torch_engine(lambda spec, report: load_decoder(spec, report, options))
    spec = EngineSpec(
        str(directory), dtype=dtype, max_rows=4, max_context=320, max_step_tokens=640, page_size=PAGE, device_pages=80,
        vision=True, rank=rank, world_size=world_size, rendezvous=rendezvous,
    )  # fmt: skip
    engine.configure(spec, lambda _fraction, _stage: None)
    return engine


@dataclass
class Answer:
    """Tokens of a row and, of each, the ids of the largest log probabilities, these, and those that were asked for."""

    tokens: list[int] = field(default_factory=list)
    top_ids: list[tuple[int, ...]] = field(default_factory=list)
    top_logprobs: list[tuple[float, ...]] = field(default_factory=list)
    asked: list[tuple[float, ...]] = field(default_factory=list)

    def check(self, tokens: list[int], logits: torch.Tensor) -> None:
        """Compare with what is expected."""
        assert self.tokens == tokens
        reference = torch.log_softmax(logits, dim=-1)
        for i, (ids, logprobs) in enumerate(zip(self.top_ids, self.top_logprobs, strict=True)):
            assert len(ids) >= TOP
            assert torch.allclose(torch.tensor(logprobs), reference[i, list(ids)], atol=2e-3, rtol=1e-3)


@dataclass
class Session:
    """A stream of plans to an engine."""

    engine: ModelEngine
    sampling: SamplingParams = GREEDY_WITH_LOGPROBS
    step: int = 0
    answers: dict[int, Answer] = field(default_factory=dict)
    embeddings: dict[int, bytes] = field(default_factory=dict)

    def run(self, plan: StepPlan) -> None:
        results: list[StepResult] = []
        self.engine.execute(replace(plan, step_id=StepId(self.step)), results.append)
        self.engine.settle(lambda: False)
        self.step += 1
        for result in results:
            self.embeddings |= dict(result.embeddings)
            for row, token in zip(result.rows.tolist(), result.token_ids.tolist(), strict=True):
                self.answers[row].tokens.append(token)
            for row, logprob in result.logprobs:
                self.answers[row].top_ids.append(logprob.top_token_ids)
                self.answers[row].top_logprobs.append(logprob.top_logprobs)
                self.answers[row].asked.append(logprob.asked)

    def open(self, row: int, prompt: Prompt, *, computed: int = 0) -> StepPlan:
        """Return a plan that opens a row, with pages for all of it."""
        self.answers[row] = Answer()
        total = len(prompt.ids) + NEW_TOKENS
        opened = open_row(
            row, prompt.ids, range(row * 20, row * 20 + -(-total // PAGE)), total=total, computed=computed,
            sampling=self.sampling,
        )  # fmt: skip
        return StepPlan(StepId(0), opens=(replace(opened, images=prompt.images),))

    def answer(self, prompts: Sequence[Prompt], borders: Sequence[int] = ()) -> list[Answer]:
        """Compute prompts beside each other, and continue them; chunks end at `borders`, or before blocks there."""
        ends = [*borders, max(len(prompt.ids) for prompt in prompts)]
        opens = [self.open(row, prompt).opens[0] for row, prompt in enumerate(prompts)]
        start = 0
        for end in ends:
            parts = [(prompt.border(start), prompt.border(end)) for prompt in prompts]
            chunks = [chunk(row, first, last - first) for row, (first, last) in enumerate(parts) if first < last]
            self.run(StepPlan(StepId(0), opens=tuple(opens), prefills=tuple(chunks)))
            opens, start = [], end
        self.run(StepPlan(StepId(0), steps=NEW_TOKENS - 1))
        self.run(StepPlan(StepId(0), closes=tuple(RowSlot(row) for row in range(len(prompts)))))
        return [self.answers[row] for row in range(len(prompts))]
