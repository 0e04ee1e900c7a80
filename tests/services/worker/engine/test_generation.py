"""The whole engine, from plans to tokens, against `transformers` in fp32."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pytest
import torch

from common.steps import EngineSpec, PrefillChunk, RowOpen, StepPlan, StepResult
from common.types import RowSlot, StepId
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.execution.torch_model import torch_engine
from services.worker.engine.loader import load_decoder
from tests.e2e.greedy.reference import read_golden
from tests.services.worker.engine.scenario import chunk, grant, open_row, tokens_by_row
from tests.services.worker.engine.tiny_llama import save_tiny_llama

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.worker.engine.execution.engine import ModelEngine

NEW_TOKENS = 12
PAGE = 16
BUNDLED = "smollm2-135m-instruct"
# Of 5, 8 and 14 tokens.
KEPT = {reference.name: reference for reference in read_golden()}
ANSWERS = [KEPT[name] for name in ("english-capital", "english-physics", "english-counting")]
PROMPTS = [list(answer.prompt_ids) for answer in ANSWERS]


@dataclass
class Subject:
    """A model as the engine loads it, and what `transformers` continues prompts with."""

    reference: str
    prompts: list[list[int]]

    @cached_property
    def oracle(self) -> Any:  # transformers is not typed
        import transformers

        return transformers.AutoModelForCausalLM.from_pretrained(self.reference, dtype=torch.float32).eval()

    @cached_property
    def expected(self) -> list[list[int]]:
        if self.reference == BUNDLED:
            # Kept, as loading it takes half a minute; `tests/e2e/greedy/test_reference.py` compares all of them.
            return [list(answer.output_ids[:NEW_TOKENS]) for answer in ANSWERS]
        with torch.inference_mode():
            return [
                self.oracle.generate(
                    torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
                )[0, len(prompt) :].tolist()
                for prompt in self.prompts
            ]

    @cached_property
    def engine(self) -> ModelEngine:
        engine = torch_engine(lambda spec, report: load_decoder(spec, report, RunnerOptions(threads=1)))
        spec = EngineSpec(self.reference, dtype="float32", max_rows=4, max_context=256, page_size=PAGE, device_pages=64)
        engine.configure(spec, lambda _fraction, _stage: None)
        return engine

    def run(self, plan: StepPlan) -> list[StepResult]:
        results: list[StepResult] = []
        self.engine.execute(plan, results.append)
        return results


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of one operator wait for each other, which beside other tests takes longer than doing it alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=["tiny", pytest.param("bundled", marks=pytest.mark.slow)])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    if request.param == "bundled":
        return Subject(BUNDLED, PROMPTS)
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(directory)
    return Subject(str(directory), [[token % 96 for token in prompt] for prompt in PROMPTS])


@pytest.fixture(autouse=True)
def fresh_rows(subject: Subject) -> None:
    subject.engine.reset()


def total(prompt: list[int]) -> int:
    return len(prompt) + NEW_TOKENS


@pytest.mark.parametrize("lengths", [[100], [1, 100], [3, 1, 100]], ids=str)
def test_the_output_does_not_depend_on_how_the_prompt_is_chunked(subject: Subject, lengths: list[int]) -> None:
    for prompt, expected in zip(subject.prompts, subject.expected, strict=True):
        subject.engine.reset()
        generated: list[int] = []
        start = 0
        for step, most in enumerate(lengths):
            length = min(most, len(prompt) - start)
            opens = (open_row(2, prompt, [5, 9], total=total(prompt)),) if step == 0 else ()
            for result in subject.run(StepPlan(StepId(step), opens=opens, prefills=(chunk(2, start, length),))):
                generated += result.token_ids.tolist()
            start += length
        for result in subject.run(StepPlan(StepId(50), steps=NEW_TOKENS)):
            generated += result.token_ids.tolist()
        assert generated == expected


def test_rows_that_join_and_leave_do_not_disturb_each_other(subject: Subject) -> None:
    """Row i joins at plan i, its prompt in two chunks, while the others decode; slots and pages are out of order."""
    generated: dict[int, list[int]] = {row: [] for row in range(3)}
    pages = {0: [7, 3], 1: [0, 8], 2: [5, 1]}
    for step in range(30):
        row, is_second = divmod(step, 2)
        opens: tuple[RowOpen, ...] = ()
        prefills: tuple[PrefillChunk, ...] = ()
        if row < 3:
            prompt = subject.prompts[row]
            half = len(prompt) // 2
            if not is_second:
                opens = (open_row(row, prompt, pages[row][:1], total=total(prompt)),)
            prefills = (chunk(row, half, len(prompt) - half) if is_second else chunk(row, 0, half),)
        grants = grant(row, pages[row][1:] if row < 3 and is_second else ())
        for result in subject.run(StepPlan(StepId(step), opens=opens, prefills=prefills, grants=grants)):
            for slot, token in tokens_by_row(result).items():
                generated[slot].append(token)
    assert [generated[row] for row in range(3)] == subject.expected


def test_a_row_that_was_retracted_continues_as_if_nothing_had_happened(subject: Subject) -> None:
    prompt, expected = subject.prompts[2], subject.expected[2]
    opened = open_row(0, prompt, [2, 4], total=total(prompt))
    before = subject.run(StepPlan(StepId(1), opens=(opened,), prefills=(chunk(0, 0, len(prompt)),), steps=5))
    generated = [int(result.token_ids[0]) for result in before]
    # Its first page is still there: a prefix hit of 16 tokens.
    known = prompt + generated
    again = open_row(3, known, [2, 6], computed=PAGE, prompt=len(prompt), total=total(prompt))
    plan = StepPlan(
        StepId(2),
        closes=(RowSlot(0),),
        opens=(again,),
        prefills=(chunk(3, PAGE, len(known) - PAGE),),
        steps=NEW_TOKENS,
    )
    generated += [int(result.token_ids[0]) for result in subject.run(plan)]
    assert generated == expected
