"""What every deployment must get right, however it computes: called by the tests beside this file."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from common.settings import GatewaySettings, ModelSettings, SchedulerSettings, Settings
from common.types import CacheMode
from tests.e2e.conftest import require_model, serve
from tests.e2e.greedy.reference import OUTPUT_TOKENS, Reference, read_golden
from tests.e2e.greedy.score_reference import TOP, read_scores
from tests.e2e.pipeline import ask

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.e2e.pipeline import Answer
    from tests.e2e.served import Served

PAGE = 16
SCORE_TOLERANCE = 1e-3
ROWS = 16
# Two thousand tokens of prefill on a machine that has other work take their time.
TIMEOUT_S = 1200

REFERENCES = read_golden()
SHORT = tuple(reference for reference in REFERENCES if len(reference.prompt_ids) <= 300)


def pick(*names: str) -> tuple[Reference, ...]:
    """Return the references with these names, in this order."""
    by_name = {reference.name: reference for reference in REFERENCES}
    return tuple(by_name[name] for name in names)


# 140 pages of prompts, the longest first, each of which grows by two pages. The pool lets all of them start, since a
# page for every row's next token is left, and has no room for all to end.
GROWING = pick(
    "length-2000-english",
    "length-63",
    "chat-chinese",
    "length-16",
    "emoji-faces",
    "english-counting",
    "chinese-numbers",
    "emoji-sentence",
    "english-recipe",
    "english-planets",
    "english-week",
)
TIGHT_PAGES = 154
# What is compared with float32 runs in float32, also where the processor would be faster in bfloat16.
EXACT = ModelSettings(dtype="float32")


def serve_rows(
    root: Path,
    *,
    ranks: int = 1,
    **scheduler_settings: Any,
) -> Iterator[Served]:
    """Run the real model with sixteen rows as long as the caller keeps this iterator."""
    require_model()
    given = {"max_rows": ROWS, "page_size": PAGE, "max_step_tokens": 512, **scheduler_settings}
    scheduler = SchedulerSettings.model_validate(given)
    settings = Settings(model=EXACT, gateway=GatewaySettings(port=0, anonymous="vouched"), scheduler=scheduler)
    yield from serve(settings, root, ranks)


def cacheable(tokens: int) -> int:
    """Return the number of a prompt's tokens that whole pages can serve; the last token is always computed."""
    return (tokens - 1) // PAGE * PAGE


def check_answers(references: Sequence[Reference], answers: Sequence[Answer], skips: Sequence[int] = ()) -> None:
    """Check ids and ends; `skips` says how many tokens of each reference had been part of the prompt."""
    got = {
        reference.name: (answer.token_ids, answer.finish and answer.finish.reason)
        for reference, answer in zip(references, answers, strict=True)
    }
    assert got == {
        reference.name: (list(reference.output_ids[skip:]), reference.finish)
        for reference, skip in zip(references, skips or [0] * len(references), strict=True)
    }


def check_alone(served: Served, references: Sequence[Reference]) -> None:
    """Ask one by one."""
    rounds = [ask(served, [reference.prompt_ids], OUTPUT_TOKENS, f"alone-{reference.name}") for reference in references]
    check_answers(references, [answer for each in rounds for answer in each.answers])
    assert max(each.peak_rows for each in rounds) == 1


def check_together(served: Served, references: Sequence[Reference]) -> None:
    """Ask for all at once, in all rows; then again, when every prompt is in the cache."""
    prompts = [reference.prompt_ids for reference in references]
    cold = ask(served, prompts, OUTPUT_TOKENS, "together")
    check_answers(references, cold.answers)
    assert cold.peak_rows == ROWS
    warm = ask(served, prompts, OUTPUT_TOKENS, "together")
    check_answers(references, warm.answers)
    assert [answer.cached_tokens for answer in warm.answers] == [cacheable(len(prompt)) for prompt in prompts]


def check_cached_answers(served: Served, references: Sequence[Reference]) -> None:
    """Ask, then continue from the middle of each answer: what decoding wrote serves as well as what prefill wrote."""
    ask(served, [reference.prompt_ids for reference in references], OUTPUT_TOKENS, "answers")
    halves = [len(reference.output_ids) // 2 for reference in references]
    prompts = [
        reference.prompt_ids + reference.output_ids[:half] for reference, half in zip(references, halves, strict=True)
    ]
    behind = ask(served, prompts, OUTPUT_TOKENS // 2, "answers")
    check_answers(references, behind.answers, halves)
    assert [answer.cached_tokens for answer in behind.answers] == [cacheable(len(prompt)) for prompt in prompts]


def check_cache_off(served: Served, references: Sequence[Reference]) -> None:
    """Ask twice without reading from the cache or writing to it."""
    for _ in range(2):
        without = ask(served, [reference.prompt_ids for reference in references], OUTPUT_TOKENS, "off", CacheMode.NONE)
        check_answers(references, without.answers)
        assert not any(answer.cached_tokens for answer in without.answers)


def check_retraction(
    served: Served, cache_mode: CacheMode, orders: Sequence[Sequence[Reference]] = (GROWING, GROWING[::-1])
) -> None:
    """Fill the pool. The youngest rows are retracted: several short ones, then the one of 2,000 tokens."""
    for references in orders:
        with served.leaving_nothing_behind():
            crowded = ask(
                served, [reference.prompt_ids for reference in references], OUTPUT_TOKENS, "crowd", cache_mode
            )
        check_answers(references, crowded.answers)
        assert crowded.retractions > 0


def check_scores(served: Served, names: Sequence[str]) -> None:
    """Prompts' own log probabilities, of many prompts at once and behind cached prefixes."""
    known = read_scores()

    def score(name: str, start: int, mode: str) -> dict[str, Any]:
        body = {
            "input_ids": list(pick(name)[0].prompt_ids),
            "return_logprob": True,
            "logprob_start_len": start,
            "top_logprobs_num": TOP,
            "user": "scorer",
            "cache_mode": mode,
            "sampling_params": {"max_new_tokens": 0},
        }
        with served.http() as http:
            answer = http.post("/generate", json=body)
        answer.raise_for_status()
        meta: dict[str, Any] = answer.json()["meta_info"]
        return meta

    for start, mode in ((0, "none"), (0, "default"), (20, "default")):
        names = [name for name in names if len(pick(name)[0].prompt_ids) > start]
        with ThreadPoolExecutor(len(names)) as pool:
            found = list(pool.map(lambda name, start=start, mode=mode: score(name, start, mode), names))
        for name, meta in zip(names, found, strict=True):
            ids, expected = pick(name)[0].prompt_ids, known[name]
            assert meta["completion_tokens"] == 0
            assert meta["cached_tokens"] <= start
            assert [entry[1] for entry in meta["input_token_logprobs"]] == list(ids[start:])
            first, *told = [entry[0] for entry in meta["input_token_logprobs"]] or [None]
            assert first is None
            assert told == pytest.approx(expected["logprobs"][start:], abs=SCORE_TOLERANCE)
            for best, wanted in zip(meta["input_top_logprobs"][1:], expected["top"][start:], strict=True):
                # Near ties may stand in either order.
                assert [value for value, _, _ in best] == pytest.approx([v for _, v in wanted], abs=SCORE_TOLERANCE)
