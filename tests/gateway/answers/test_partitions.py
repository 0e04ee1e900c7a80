"""A gateway that is cut off from the shared state goes on sending events while another one takes its answer over.

The other one generates the tokens again that the record lacks, perhaps in other portions: a client that then continues
there receives the rest of the text that it has, or an error.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.pipeline import says
from tests.gateway.answers.reading import BODY, Seen, read
from tests.gateway.answers.test_two_gateways import TEXT, WORDS, close, in_pairs, pair, stops_after
from tests.gateway.listening import listening
from tests.gateway.state.servers import working
from tests.gateway.support import error_of
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.requests import GenerateRequest
    from tests.fakes.pipeline import Event
    from tests.fakes.redis_process import RedisProcess
    from tests.gateway.support import FakedGateway

RECORDED, SENT = 3, 7


def in_other_words(request: GenerateRequest) -> Iterable[Event]:
    """As on devices whose results depend on the batch."""
    resume = request.options.resume
    known = len(resume.token_ids) if resume else 0
    return says(*WORDS[:known], *(f" other{number}" for number in range(known, len(WORDS))))(request)


async def cut_off(gateway: FakedGateway, port: int, seen: Seen) -> asyncio.Task[Any]:
    """Read an answer at a gateway that is cut off after its first events; return when it has sent others.

    It counts as dead for other gateways: it does not probe the state.
    """
    reading = asyncio.create_task(read(port, seen, body=BODY))
    [request] = await gateway.pipeline.submissions(1)
    events = list(says(*WORDS)(request))
    await until(lambda: len(seen.ids) == RECORDED)
    state = gateway.context.answers.records._state  # type: ignore[attr-defined]
    state._up.clear()
    for event in events[RECORDED:SENT]:
        gateway.pipeline.tell(event)
    await until(lambda: len(seen.ids) == SENT)
    return reading


@pytest.mark.parametrize("script", [in_pairs, in_other_words, says(*WORDS)], ids=["pairs", "other words", "the same"])
async def test_a_client_continues_the_text_that_it_has_or_is_refused(redis_process: RedisProcess, script: Any) -> None:
    first, second = pair(redis_process.url, stops_after(RECORDED - 1))
    second.pipeline.script = script
    async with working(*second.state.background):
        mine, others = Seen(), Seen()
        async with listening(first) as one, listening(second) as two:
            reading = await cut_off(first, one, mine)
            others.ids = [mine.ids[0]]
            await read(two, others)
            reading.cancel()
            recorded = mine.ids[:RECORDED]
            assert recorded[1:] == others.ids[1:RECORDED], "the events that were recorded keep their ids"
            if script not in (in_pairs, in_other_words):
                assert (await read(two, mine)).status_code == 200
                assert mine.text == TEXT
                assert mine.ids[SENT:] == others.ids[SENT:]
            else:
                for event_id in mine.ids[RECORDED:]:
                    refused = error_of(await read(two, Seen([event_id])), 400)
                    assert refused["param"] == "Last-Event-ID"
                    assert "as it was sent" in refused["message"]
                again = Seen(recorded)
                assert (await read(two, again)).status_code == 200
                assert again.ids == [mine.ids[0], *others.ids[1:]]
                assert again.text == "".join(others.text.partition(WORDS[1])[2])
        await close(first, second)
