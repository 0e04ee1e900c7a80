"""Who is encoded when, by an encoder that ends a text when it is told to."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from common.requests import ChatMessage, ChatPrompt, TokenPrompt
from common.types import Subject
from services.tokenizer.encoding import PromptEncoder, size
from services.tokenizer.encoding_pool import JOB_CHARACTERS, LONG_CHARACTERS, EncodingPool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ANN, BOB, RIVAL = Subject("acme", "user/ann"), Subject("acme", "user/bob"), Subject("rival", "user/r")
SOME, LONG = 2_000, LONG_CHARACTERS + 1


class Threads(Executor):
    """Holds what is submitted until the test lets it run."""

    def __init__(self) -> None:
        self.running: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.running.append((future, lambda: fn(*args, **kwargs)))
        return future

    async def finish(self, index: int = 0) -> None:
        future, work = self.running.pop(index)
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001  (as an executor does)
            future.set_exception(error)
        await settle()


class Texts(PromptEncoder):
    """Notes texts in the order in which their encoding is finished."""

    def __init__(self) -> None:
        self.encoded: list[str] = []
        self.error: Exception | None = None

    def is_quick(self, prompts: Sequence[Any]) -> bool:
        return sum(map(size, prompts)) <= 10

    def encode(self, prompts: Sequence[Any], add_special_tokens: Any = None) -> list[Any]:
        if self.error is not None:
            raise self.error
        self.encoded += [prompt[:2] for prompt in prompts]
        return [np.array([len(prompt), bool(adds)]) for prompt, adds in zip(prompts, add_special_tokens, strict=True)]


class Bench:
    def __init__(self, threads: int) -> None:
        self.threads, self.texts = Threads(), Texts()
        self.pool = EncodingPool(self.texts, self.threads, threads)
        self.tasks: list[asyncio.Task[Any]] = []

    async def ask(self, subject: Subject, *texts: str) -> None:
        self.tasks.append(asyncio.create_task(self.pool.encode(subject, texts, [None] * len(texts))))
        await settle()

    async def finish_all(self) -> None:
        while self.threads.running:
            await self.threads.finish()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_short_text_is_encoded_at_once_whatever_is_waiting() -> None:
    bench = Bench(1)
    await bench.ask(RIVAL, "r" * LONG)
    await bench.ask(ANN, "hello")
    assert bench.texts.encoded == ["he"]
    await bench.finish_all()


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("length", [SOME, LONG])
async def test_a_tenant_s_text_waits_for_at_most_one_of_another_s(threads: int, length: int) -> None:
    bench = Bench(threads)
    for number in range(100):
        await bench.ask(Subject("rival", f"user/{number}"), "r" * length)
    await bench.threads.finish()
    await bench.ask(ANN, "a" * length)
    # When any of those that run has ended, its turn has come.
    started_before = len(bench.threads.running)
    await bench.threads.finish()
    assert len(bench.threads.running) == started_before
    await bench.threads.finish(started_before - 1)
    assert bench.texts.encoded[-1] == "aa"
    await bench.finish_all()
    assert len(bench.texts.encoded) == 101


@pytest.mark.parametrize(("threads", "expected"), [(1, 1), (2, 1), (4, 3)])
async def test_long_texts_leave_a_thread_to_shorter_ones(threads: int, expected: int) -> None:
    bench = Bench(threads)
    for subject in (RIVAL, BOB, Subject("third", "key/t")):
        for _ in range(3):
            await bench.ask(subject, "l" * LONG)
    assert len(bench.threads.running) == expected
    await bench.ask(ANN, "a" * SOME)
    if threads > 1:
        await bench.threads.finish(expected)
        assert bench.texts.encoded == ["aa"]
    await bench.finish_all()
    assert len(bench.texts.encoded) == 10


async def test_shares_are_measured_in_characters_and_not_in_texts() -> None:
    bench = Bench(1)
    await bench.ask(BOB, "b" * SOME)
    for _ in range(10):
        await bench.ask(RIVAL, "r" * 10 * SOME)
    for _ in range(20):
        await bench.ask(ANN, "a" * SOME)
    await bench.threads.finish()
    while bench.texts.encoded.count("rr") < 2:
        await bench.threads.finish()
    assert 8 <= bench.texts.encoded.count("aa") <= 20
    await bench.finish_all()


async def test_prompts_that_arrive_together_keep_their_order_and_are_cut_into_parts() -> None:
    bench = Bench(2)
    lengths = [JOB_CHARACTERS // 2, JOB_CHARACTERS // 2, 7, 2 * JOB_CHARACTERS, 9]
    adds = [True, False, None, True, False]
    task = asyncio.create_task(bench.pool.encode(ANN, ["x" * length for length in lengths], adds))
    await settle()
    assert len(bench.threads.running) == 2
    await bench.finish_all()
    assert [list(np.asarray(ids)) for ids in await task] == [
        [length, bool(add)] for length, add in zip(lengths, adds, strict=True)
    ]


async def test_an_error_reaches_its_caller_and_frees_the_thread() -> None:
    bench = Bench(1)
    bench.texts.error = ValueError("boom")
    await bench.ask(ANN, "a" * SOME)
    await bench.ask(BOB, "b" * SOME)
    await bench.threads.finish()
    with pytest.raises(ValueError, match="boom"):
        await bench.tasks[0]
    bench.texts.error = None
    await bench.finish_all()
    assert len(await bench.tasks[1]) == 1


async def test_a_cancelled_waiting_request_leaves_the_queue() -> None:
    bench = Bench(1)
    for subject in (ANN, BOB, RIVAL):
        await bench.ask(subject, subject.name[-1] * SOME)
    running, waiting, _ = bench.tasks
    waiting.cancel()
    running.cancel()
    await bench.finish_all()
    # What had begun is finished, and nothing fails for it.
    assert bench.texts.encoded == ["nn", "rr"]
    assert waiting.cancelled()
    assert running.cancelled()


def test_all_parts_of_a_chat_count_towards_its_size() -> None:
    message = ChatMessage("assistant", "c" * 10, tool_calls_json="t" * 100, reasoning_content="r" * 1000)
    chat = ChatPrompt((message,), tools_json=("j" * 10_000,), template_variables_json="v" * 100_000)
    assert size(chat) - size(ChatPrompt((ChatMessage("user"),))) == 111_110
    assert size(ChatPrompt((ChatMessage("user"),) * 2048)) > LONG_CHARACTERS
    assert (size("text"), size(TokenPrompt((1, 2)))) == (4, 2)
