from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.deltas import LogprobText, PromptLogprobsText, PromptUsage, TokenText
from common.errors import InvalidRequestError, UnavailableError
from common.prompt_logprobs import PromptLogprobSpan
from common.types import ErrorCode, Finish, FinishReason, SubscriberId, TokenLogprob
from gateway.pipeline.wire import delta_from_wire
from services.detokenizer.messages import PromptLogprobsPart, Push
from services.detokenizer.wire import deltas_to_wire
from tests.services.detokenizer.pushing import GATEWAY, LENGTH, Pushing, spec

if TYPE_CHECKING:
    from common.tokenization import TextModel
    from services.detokenizer.decoding import DecoderFactory


@pytest.fixture
def pushing(decoders: DecoderFactory) -> Pushing:
    return Pushing(decoders)


async def test_one_push_carries_tokens_of_many_choices(pushing: Pushing, model: TextModel) -> None:
    hello, world = model.tokenizer.encode("Hello world").ids
    deltas = await pushing.push(opens=[spec(1), spec(2)], tokens=[(1, hello), (2, world), (1, world)])
    assert [(delta.request_id, delta.text) for delta in deltas] == [
        ("request-1", "Hello world"),
        ("request-2", " world"),
    ]


async def test_handles_that_are_not_open_are_passed_over(pushing: Pushing) -> None:
    assert not await pushing.push(tokens=[(7, 100), (8, 101)], finishes={7: LENGTH})
    await pushing.run(spec(1), [100])
    assert not await pushing.push(tokens=[(1, 100)], finishes={1: LENGTH}), "the choice has ended before"


async def test_a_finished_handle_may_be_opened_again(pushing: Pushing, model: TextModel) -> None:
    ids = model.tokenizer.encode("Hello").ids
    for _ in range(2):
        received = await pushing.run(spec(1), ids)
        assert (received.text, received.finish) == ("Hello", LENGTH)


async def test_opening_an_open_handle_is_refused(pushing: Pushing) -> None:
    await pushing.push(opens=[spec(1)])
    with pytest.raises(InvalidRequestError, match="handle 1"):
        await pushing.push(opens=[spec(1)])


async def test_tokens_outside_the_vocabulary_have_no_text(pushing: Pushing) -> None:
    received = await pushing.run(spec(1), [10**6, 100])
    assert received.token_ids == [10**6, 100]
    assert received.text == received.deltas[-1].text != ""


async def test_log_probabilities_carry_the_bytes_of_tokens(pushing: Pushing, model: TextModel) -> None:
    hello, world = model.tokenizer.encode("Hello world").ids
    logprobs = {1: TokenLogprob(-0.5, (world, 2), (-0.5, -1.5))}
    first, second = await pushing.push(opens=[spec(1), spec(2)], tokens=[(1, hello), (2, world)], logprobs=logprobs)
    assert list(first.logprobs) == []
    top = (TokenText(world, -0.5, b" world"), TokenText(2, -1.5, b"<|im_end|>"))
    assert list(second.logprobs) == [LogprobText(TokenText(world, -0.5, b" world"), top)]


async def test_log_probabilities_end_with_the_last_kept_token(pushing: Pushing, model: TextModel) -> None:
    ids = model.tokenizer.encode("one STOP two").ids
    logprobs = {index: TokenLogprob(-float(index)) for index in range(len(ids))}
    (delta,) = await pushing.push([spec(1, ["STOP"])], [(1, i) for i in ids], logprobs)
    assert [logprob.token.token_id for logprob in delta.logprobs] == list(delta.token_ids)
    assert len(delta.token_ids) < len(ids)


async def test_a_choice_for_an_unknown_subscriber_is_gone_at_once(pushing: Pushing) -> None:
    assert not await pushing.push(opens=[spec(5, subscriber=SubscriberId("nobody"))], tokens=[(5, 100)])
    assert (await pushing.answers()).gone_handles == [5]
    assert pushing.hub.open_choices == 0


async def test_choices_of_a_subscriber_that_leaves_are_gone(pushing: Pushing) -> None:
    other = pushing.hub.subscribe(SubscriberId("gateway-2"))
    await pushing.push(opens=[spec(1), spec(2, subscriber=other.subscriber_id), spec(3)])
    pushing.hub.unsubscribe(pushing.mailbox)
    assert (await pushing.answers()).gone_handles == [1, 3]
    assert pushing.session.open_choices == 1


async def test_choices_of_a_subscriber_that_cannot_keep_up_are_gone_with_its_next_token(pushing: Pushing) -> None:
    await pushing.push(opens=[spec(1)])
    pushing.mailbox.close(UnavailableError("too slow"))
    await pushing.push(tokens=[(1, 100)])
    assert (await pushing.answers()).gone_handles == [1]
    await pushing.push(opens=[spec(2)])
    assert (await pushing.answers()).gone_handles == [2]


async def test_a_subscriber_that_subscribes_again_starts_without_its_old_choices(pushing: Pushing) -> None:
    await pushing.push(opens=[spec(1)])
    again = pushing.hub.subscribe(GATEWAY)
    assert (await pushing.answers()).gone_handles == [1]
    with pytest.raises(UnavailableError, match="again"):
        await pushing.mailbox.take()
    pushing.hub.unsubscribe(pushing.mailbox)  # the old stream ends late and must not end the new one
    pushing.mailbox = again
    received = await pushing.run(spec(2), [100])
    assert received.finish == LENGTH


async def test_choices_of_a_lost_scheduler_end_with_a_retryable_error(pushing: Pushing) -> None:
    await pushing.push(opens=[spec(1), spec(2)], tokens=[(1, 100)])
    pushing.hub.close_session(pushing.session)
    deltas = await pushing.mailbox.take()
    assert [delta.request_id for delta in deltas] == ["request-1", "request-2"]
    for delta in deltas:
        assert delta.finish is not None
        assert delta.finish.reason is FinishReason.ERROR
        assert delta.finish.error is not None
        assert (delta.finish.error.code, delta.finish.error.retryable) == (ErrorCode.UNAVAILABLE, True)
    assert pushing.hub.open_choices == 0


async def test_two_schedulers_may_use_the_same_handles(pushing: Pushing) -> None:
    second = pushing.hub.open_session()
    await pushing.push(opens=[spec(1)])
    second.apply(Push(opens=[spec(1)]))
    assert pushing.hub.open_choices == 2
    pushing.hub.close_session(pushing.session)
    assert pushing.hub.open_choices == 1


async def test_an_invalid_unchecked_pattern_ends_only_its_own_choice(pushing: Pushing, model: TextModel) -> None:
    ids = model.tokenizer.encode("Hello").ids
    deltas = await pushing.push(opens=[replace(spec(1), stop_patterns=(r"(a)\1",)), spec(2)], tokens=[(2, ids[0])])
    ended = next(delta for delta in deltas if delta.request_id == "request-1")
    assert ended.finish is not None
    assert ended.finish.error is not None
    assert ended.finish.error.param == "stop_regex"
    assert pushing.session.open_choices == 1


async def test_an_embedding_passes_through_without_text(pushing: Pushing) -> None:
    finish = Finish(FinishReason.STOP, embedding=b"\x00\x00\x80\x3f")
    (delta,) = await pushing.push(opens=[spec(1)], finishes={1: finish})
    assert delta.finish == finish
    assert (delta.text, list(delta.token_ids)) == ("", [])


async def test_log_probabilities_of_a_prompt_are_spelled_and_come_before_the_first_token(
    pushing: Pushing, model: TextModel
) -> None:
    hello, world = model.tokenizer.encode("Hello world").ids
    span = PromptLogprobSpan(
        1,
        np.array([world], np.int32),
        np.array([-0.5], np.float32),
        np.array([3], np.int32),
        np.array([[hello, 2]], np.int32),
        np.array([[-0.25, -0.5]], np.float32),
        np.array([[-4.0]], np.float32),
    )
    part = PromptLogprobsPart(1, span, lead=hello, is_last=True)
    push = Push([spec(1)], [1], [world], starts={1: 4}, prompt_logprobs=[part, part._replace(handle=7)])
    pushing.session.apply(push)
    told, first = await pushing.mailbox.take()
    assert told.prompt_usage == PromptUsage(10, 4)
    assert (told.token_ids, told.text, told.finish) == ((), "", None)
    assert told.prompt_logprobs == PromptLogprobsText(
        1,
        [
            LogprobText(
                TokenText(world, -0.5, b" world"),
                (TokenText(hello, -0.25, b"Hello"), TokenText(2, -0.5, b"<|im_end|>")),
                (-4.0,),
                3,
            )
        ],
        TokenText(hello, 0.0, b"Hello"),
        is_last=True,
    )
    assert (first.first_token_index, first.text, first.prompt_usage) == (0, " world", None)
    (delta,) = deltas_to_wire([told]).deltas
    assert delta_from_wire(delta) == told
