from __future__ import annotations

import asyncio

import pytest

from common.deltas import Delta, LogprobText, PromptLogprobsText, PromptUsage, TokenText
from common.errors import UnavailableError
from common.types import Finish, FinishReason, RequestId, SubscriberId
from services.detokenizer.mailbox import Mailbox, merge

END = Finish(FinishReason.LENGTH)


def delta(name: str, first: int, text: str, finish: Finish | None = None, choice: int = 0) -> Delta:
    ids = list(range(first, first + len(text)))
    logprobs = [LogprobText(TokenText(i, -1.0, b""), ()) for i in ids]
    usage = PromptUsage(5, 0) if first == 0 else None
    return Delta(RequestId(name), choice, first, ids, text, logprobs, usage, finish)


def mailbox(merge_at: int = 100, max_tokens: int = 1000) -> Mailbox:
    return Mailbox(SubscriberId("gateway"), merge_at=merge_at, max_tokens=max_tokens)


async def test_posted_deltas_are_taken_in_order_and_once() -> None:
    box = mailbox()
    deltas = [delta("a", 0, "x"), delta("b", 0, "y"), delta("a", 1, "z")]
    box.post(deltas[:2])
    box.post(deltas[2:])
    assert await box.take() == deltas
    waiting = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    box.post(deltas[:1])
    assert await waiting == deltas[:1]


def test_merging_joins_the_deltas_of_each_choice() -> None:
    merged = merge([delta("a", 0, "xy"), delta("a", 0, "1", choice=1), delta("b", 0, "q"), delta("a", 2, "z", END)])
    assert merged == [delta("a", 0, "xyz", END), delta("a", 0, "1", choice=1), delta("b", 0, "q")]


def test_merging_adds_up_tokens_that_were_not_sampled() -> None:
    parts = [
        delta("a", 0, "xy")._replace(forced_tokens=1),
        delta("a", 2, "z")._replace(forced_tokens=1, drafted_tokens=1),
    ]
    [merged] = merge(parts)
    assert (merged.forced_tokens, merged.drafted_tokens) == (2, 1)


async def test_a_slow_subscriber_gets_merged_deltas() -> None:
    box = mailbox(merge_at=10)
    for index in range(100):
        box.post([delta("a", index, "x"), delta("b", index, "y")])
    assert box.waiting <= 10
    taken = await box.take()
    assert "".join(entry.text for entry in taken if entry.request_id == "a") == "x" * 100
    firsts = [entry.first_token_index for entry in taken if entry.request_id == "b"]
    lengths = [len(entry.token_ids) for entry in taken if entry.request_id == "b"]
    assert firsts == [sum(lengths[:i]) for i in range(len(lengths))]


async def test_with_many_choices_merging_waits_until_enough_deltas_wait() -> None:
    box = mailbox(merge_at=10, max_tokens=10**6)
    merges = 0
    for index in range(50):
        before = box.waiting
        box.post([delta(f"request-{number}", index, "x") for number in range(100)])
        merges += box.waiting < before + 100
    assert 1 < merges <= 26


async def test_a_subscriber_that_falls_too_far_behind_is_dropped() -> None:
    box = mailbox(max_tokens=50)
    for index in range(60):
        box.post([delta("a", index, "x")])
    assert box.is_closed
    assert box.waiting == 0
    with pytest.raises(UnavailableError, match="too slow"):
        await box.take()


async def test_a_closed_mailbox_takes_nothing_more() -> None:
    box = mailbox()
    box.close(UnavailableError("over"))
    box.post([delta("a", 0, "x")])
    assert box.waiting == 0
    with pytest.raises(UnavailableError, match="over"):
        await box.take()


async def test_closing_wakes_the_waiting_reader() -> None:
    box = mailbox()
    waiting = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    box.close(UnavailableError("over"))
    with pytest.raises(UnavailableError):
        await waiting


def test_merging_keeps_prompt_logprobs_separate_and_first() -> None:
    parts = [
        Delta(RequestId("a"), 0, 0, (), "", prompt_logprobs=PromptLogprobsText(first, [], is_last=first == 9))
        for first in (1, 9)
    ]
    merged = merge([*parts, delta("a", 0, "x"), delta("a", 1, "y", END)])
    assert merged[:2] == parts
    assert [(one.text, one.finish) for one in merged[2:]] == [("xy", END)]


def test_prompt_logprobs_count_towards_the_limit() -> None:
    box = mailbox(max_tokens=10)
    entry = LogprobText(TokenText(1, -1.0, b""), (TokenText(2, -1.0, b""),) * 4)
    box.post([Delta(RequestId("a"), 0, 0, (), "", prompt_logprobs=PromptLogprobsText(1, [entry] * 3))])
    assert box.is_closed
