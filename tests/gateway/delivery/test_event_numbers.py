"""Streams that a client continues: where they begin, and what is sent before that is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gateway.delivery.deliveries import (
    NO_EVENT,
    EventNumbers,
    ReceivedEvent,
    StreamDelivery,
    UnknownEventError,
)
from gateway.generation.journal import ChoiceUpdate
from gateway.generation.usage import Usage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.types import Message

    from common.errors import PandoError
    from gateway.generation.journal import JournalEntry

ONES = [ChoiceUpdate(0, "a", (1,)), ChoiceUpdate(0, "b", (2,)), ChoiceUpdate(0, "c", (3,))]
PAIRS = [ChoiceUpdate(0, "ab", (1, 2)), ChoiceUpdate(0, "c", (3,))]


class Plain:
    """Renders an update as one event, except "b", which has two."""

    def events(self, update: ChoiceUpdate) -> bytes:
        return (b"data: %s\n\n" % update.text.encode()) * (2 if update.text == "b" else 1)

    def ending(self, usage: Usage) -> bytes:
        return b"data: end\n\n"

    def failure(self, error: PandoError) -> bytes:
        return b"data: failure\n\n"


class Told:
    """An answer with these updates; None where its reader is nudged."""

    entries: Sequence[JournalEntry] = ()
    usage = Usage(0, 0, 0)
    keeps_numbers = True

    def __init__(self, *updates: Sequence[ChoiceUpdate] | None, is_complete: bool = False) -> None:
        self._updates = iter(updates)
        self.is_complete = is_complete

    async def begin(self, cut: Callable[[], None]) -> list[tuple[bytes, bytes]]:
        return []

    async def next_updates(self) -> Sequence[ChoiceUpdate] | None:
        return next(self._updates, ())

    def nudge(self) -> None:
        pass

    async def conclude(self, keep: Callable[[], Awaitable[None]]) -> None:
        self.is_complete = True

    def close(self, cause: str | None) -> None:
        pass


async def sent(answer: Told, received: ReceivedEvent = NO_EVENT, seed: int = 7) -> list[Message]:
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    delivery = StreamDelivery(Plain(), 60.0, numbers=EventNumbers("x", seed, received))
    try:
        await delivery.deliver(answer, send)
    except UnknownEventError:
        assert messages == [], "the status is not known"
        raise
    return messages


async def ids(answer: Told, received: ReceivedEvent = NO_EVENT, seed: int = 7) -> list[str]:
    """Return the ids of the events that a client receives."""
    body = b"".join(message.get("body", b"") for message in await sent(answer, received, seed)).decode()
    return [line.removeprefix("id: ") for line in body.splitlines() if line.startswith("id")]


def event_of(event_id: str) -> ReceivedEvent:
    number, _, check = event_id.removeprefix("x/").partition(".")
    return ReceivedEvent(int(number), int(check, 16))


async def test_ids_say_what_came_before_however_it_was_read() -> None:
    whole = await ids(Told(*([update] for update in ONES)))
    assert [event_of(each).number for each in whole] == [0, 1, 2, 3, 4]
    assert whole == await ids(Told(None, ONES[:2], None, ONES[2:]))
    for number, event_id in enumerate(whole):
        assert await ids(Told(ONES, is_complete=True), event_of(event_id)) == whole[number + 1 :]
    assert not {*whole} & {*await ids(Told(ONES), seed=8)}, "other answers have others"


@pytest.mark.parametrize("is_complete", [False, True])
async def test_an_event_of_other_portions_is_unknown(*, is_complete: bool) -> None:
    ones, pairs = await ids(Told(ONES)), await ids(Told(PAIRS))
    for event_id in ones[:2]:
        with pytest.raises(UnknownEventError, match="as it was sent"):
            await ids(Told(PAIRS, is_complete=is_complete), event_of(event_id))
    with pytest.raises(UnknownEventError):
        await ids(Told(ONES, is_complete=is_complete), event_of(pairs[1]))
    with pytest.raises(UnknownEventError):
        await ids(Told(PAIRS, is_complete=is_complete), event_of(ones[-1]))
    # Clients that name a number alone are believed.
    assert await ids(Told(PAIRS, is_complete=is_complete), ReceivedEvent(1)) == pairs[2:]


async def test_an_event_of_an_answer_that_ended_without_any_output_is_unknown() -> None:
    """As if another gateway has generated it again, or it was cancelled, before anything was recorded."""
    with pytest.raises(UnknownEventError, match="as it was sent"):
        await ids(Told(is_complete=True), event_of((await ids(Told(ONES)))[1]))
    (ending,) = await ids(Told(is_complete=True))
    assert await ids(Told(is_complete=True), event_of(ending)) == []


async def test_nothing_is_sent_before_the_clients_last_event_is_known() -> None:
    ones = await ids(Told(ONES))
    with pytest.raises(UnknownEventError, match="has not been sent"):
        await ids(Told(None, PAIRS[:1]), event_of(ones[2]))
    rest = await sent(Told(None, ONES, None), event_of(ones[0]))
    assert rest[0]["type"] == "http.response.start"
    assert rest[1]["body"].startswith(f"id: {ones[1]}\n".encode())
