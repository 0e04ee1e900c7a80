from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import pytest

from common.rpc.channel import is_serving, open_channel
from common.rpc.server import RpcServer
from common.rpc.status import to_error
from common.types import ErrorCode
from protos.gen.pando.v1 import common_pb2, detokenizer_pb2, detokenizer_pb2_grpc
from services.detokenizer.service import DetokenizerService
from services.detokenizer.session import Hub
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from common.tokenization import TextModel
    from services.detokenizer.decoding import DecoderFactory

NAME = "pando.v1.Detokenizer"
TIMEOUT_S = 60.0


class Pipeline:
    """A served detokenizer, with the streams that its peers hold."""

    def __init__(self, hub: Hub, server: RpcServer, channel: grpc.aio.Channel) -> None:
        self.hub = hub
        self.server = server
        self.channel = channel
        self.stub = detokenizer_pb2_grpc.DetokenizerStub(channel)

    async def subscribe(
        self, subscriber_id: str = "gateway"
    ) -> grpc.aio.UnaryStreamCall[detokenizer_pb2.SubscribeRequest, detokenizer_pb2.SubscribeResponse]:
        call = self.stub.Subscribe(detokenizer_pb2.SubscribeRequest(subscriber_id=subscriber_id))
        await call.wait_for_connection()
        return call

    async def push(self) -> grpc.aio.StreamStreamCall[detokenizer_pb2.PushRequest, detokenizer_pb2.PushResponse]:
        call = self.stub.Push()
        await call.wait_for_connection()
        return call

    async def until(self, choices: int) -> None:
        await until(lambda: self.hub.open_choices == choices)


@pytest.fixture
async def pipeline(tmp_path: Path, decoders: DecoderFactory) -> AsyncIterator[Pipeline]:
    hub = Hub(decoders)
    server = RpcServer(NAME, f"unix:{tmp_path / 'detokenizer.sock'}")
    server.add(detokenizer_pb2_grpc.add_DetokenizerServicer_to_server, DetokenizerService(hub))
    await server.start()
    channel = open_channel(server.address)
    try:
        yield Pipeline(hub, server, channel)
    finally:
        await channel.close()
        await server.stop(grace_s=0)


def opened(handle: int, subscriber_id: str = "gateway", stops: Sequence[str] = ()) -> detokenizer_pb2.ChoiceOpen:
    return detokenizer_pb2.ChoiceOpen(
        handle=handle,
        request_id=f"request-{handle}",
        subscriber_id=subscriber_id,
        stop_strings=stops,
        skip_special_tokens=True,
        prompt_tokens=7,
    )


def ended(handle: int, reason: common_pb2.FinishReason.ValueType) -> detokenizer_pb2.ChoiceFinish:
    return detokenizer_pb2.ChoiceFinish(handle=handle, finish=common_pb2.Finish(reason=reason))


async def read(
    call: grpc.aio.UnaryStreamCall[detokenizer_pb2.SubscribeRequest, detokenizer_pb2.SubscribeResponse],
) -> list[detokenizer_pb2.Delta]:
    # Empty messages only show that the stream is alive.
    while True:
        message = await asyncio.wait_for(call.read(), TIMEOUT_S)
        assert isinstance(message, detokenizer_pb2.SubscribeResponse)
        if message.deltas:
            return list(message.deltas)


async def failure(call: grpc.aio.Call) -> grpc.StatusCode:
    return await asyncio.wait_for(call.code(), TIMEOUT_S)


async def test_a_push_becomes_one_message_for_its_subscriber(pipeline: Pipeline, model: TextModel) -> None:
    subscription, push = await pipeline.subscribe(), await pipeline.push()
    hello, world = model.tokenizer.encode("Hello world").ids
    logprob = detokenizer_pb2.IndexedLogprob(
        index=1, logprob=common_pb2.TokenLogprob(logprob=-0.25, top_token_ids=[2], top_logprobs=[-3.0])
    )
    await push.write(
        detokenizer_pb2.PushRequest(
            opens=[opened(1), opened(2)],
            starts=[detokenizer_pb2.ChoiceStart(handle=handle, cached_tokens=3) for handle in (1, 2)],
            handles=[1, 2],
            token_ids=[hello, world],
            logprobs=[logprob],
            finishes=[ended(2, common_pb2.FINISH_REASON_LENGTH)],
        )
    )
    usage = detokenizer_pb2.PromptUsage(prompt_tokens=7, cached_tokens=3)
    spelled = detokenizer_pb2.LogprobText(
        token=detokenizer_pb2.TokenText(token_id=world, logprob=-0.25, text=b" world"),
        top=[detokenizer_pb2.TokenText(token_id=2, logprob=-3.0, text=b"<|im_end|>")],
    )
    assert await read(subscription) == [
        detokenizer_pb2.Delta(request_id="request-1", token_ids=[hello], text="Hello", prompt_usage=usage),
        detokenizer_pb2.Delta(
            request_id="request-2",
            token_ids=[world],
            text=" world",
            logprobs=[spelled],
            prompt_usage=usage,
            finish=common_pb2.Finish(reason=common_pb2.FINISH_REASON_LENGTH),
        ),
    ]
    await push.write(detokenizer_pb2.PushRequest(handles=[1], token_ids=[world]))
    assert await read(subscription) == [
        detokenizer_pb2.Delta(request_id="request-1", first_token_index=1, token_ids=[world], text=" world")
    ]


async def test_a_subscriber_is_registered_before_its_confirmation(pipeline: Pipeline) -> None:
    await pipeline.subscribe()
    assert pipeline.hub.subscribers == 1


async def test_text_goes_to_the_subscriber_that_a_choice_names(pipeline: Pipeline) -> None:
    first, second, push = await pipeline.subscribe("one"), await pipeline.subscribe("two"), await pipeline.push()
    message = detokenizer_pb2.PushRequest(opens=[opened(1, "one"), opened(2, "two")], handles=[1, 2], token_ids=[5, 6])
    await push.write(message)
    assert [delta.request_id for delta in await read(first)] == ["request-1"]
    assert [delta.request_id for delta in await read(second)] == ["request-2"]


async def test_the_scheduler_is_notified_of_stop_matches(pipeline: Pipeline, model: TextModel) -> None:
    subscription, push = await pipeline.subscribe(), await pipeline.push()
    ids = model.tokenizer.encode("one STOP two").ids
    await push.write(
        detokenizer_pb2.PushRequest(opens=[opened(9, stops=["STOP"])], handles=[9] * len(ids), token_ids=ids)
    )
    (delta,) = await read(subscription)
    assert (delta.text, delta.finish.matched_text) == ("one ", "STOP")
    answer = await asyncio.wait_for(push.read(), TIMEOUT_S)
    assert isinstance(answer, detokenizer_pb2.PushResponse)
    assert [(hit.handle, hit.completion_tokens) for hit in answer.stop_hits] == [(9, len(delta.token_ids))]


async def test_the_scheduler_is_notified_of_choices_without_a_subscriber(pipeline: Pipeline) -> None:
    push = await pipeline.push()
    await push.write(detokenizer_pb2.PushRequest(opens=[opened(4, "nobody")]))
    answer = await asyncio.wait_for(push.read(), TIMEOUT_S)
    assert isinstance(answer, detokenizer_pb2.PushResponse)
    assert list(answer.gone_handles) == [4]


async def test_when_a_gateway_leaves_its_choices_are_reported_and_freed(pipeline: Pipeline) -> None:
    staying, leaving, push = (
        await pipeline.subscribe("stays"),
        await pipeline.subscribe("leaves"),
        await pipeline.push(),
    )
    await push.write(detokenizer_pb2.PushRequest(opens=[opened(1, "stays"), opened(2, "leaves"), opened(3, "leaves")]))
    await pipeline.until(choices=3)
    leaving.cancel()
    answer = await asyncio.wait_for(push.read(), TIMEOUT_S)
    assert isinstance(answer, detokenizer_pb2.PushResponse)
    assert list(answer.gone_handles) == [2, 3]
    assert pipeline.hub.open_choices == 1
    await push.write(detokenizer_pb2.PushRequest(handles=[1], token_ids=[100]))
    assert [delta.request_id for delta in await read(staying)] == ["request-1"]


@pytest.mark.parametrize("how", ["cancelled", "half-closed"])
async def test_when_the_scheduler_leaves_its_choices_end_with_a_retryable_error(pipeline: Pipeline, how: str) -> None:
    subscription, push = await pipeline.subscribe(), await pipeline.push()
    await push.write(detokenizer_pb2.PushRequest(opens=[opened(1)], handles=[1], token_ids=[100]))
    await read(subscription)
    if how == "cancelled":
        push.cancel()
    else:
        await push.done_writing()
    (delta,) = await read(subscription)
    assert delta.finish.reason == common_pb2.FINISH_REASON_ERROR
    assert delta.finish.error.code == common_pb2.ERROR_CODE_UNAVAILABLE
    assert delta.finish.error.retryable
    assert pipeline.hub.open_choices == 0


def logprob(index: int, ids: Sequence[int] = (), values: Sequence[float] = ()) -> detokenizer_pb2.IndexedLogprob:
    value = common_pb2.TokenLogprob(logprob=-1, top_token_ids=ids, top_logprobs=values)
    return detokenizer_pb2.IndexedLogprob(index=index, logprob=value)


@pytest.mark.parametrize(
    "broken",
    [
        detokenizer_pb2.PushRequest(opens=[opened(2)]),
        detokenizer_pb2.PushRequest(handles=[2, 2], token_ids=[5]),
        detokenizer_pb2.PushRequest(handles=[2], token_ids=[5], logprobs=[logprob(1)]),
        detokenizer_pb2.PushRequest(handles=[2], token_ids=[5], logprobs=[logprob(0, [1, 2], [-1.0])]),
    ],
)
async def test_a_broken_contract_ends_the_stream_and_its_choices_only(
    pipeline: Pipeline, broken: detokenizer_pb2.PushRequest
) -> None:
    subscription, bad, good = await pipeline.subscribe(), await pipeline.push(), await pipeline.push()
    await good.write(detokenizer_pb2.PushRequest(opens=[opened(1)]))
    await bad.write(detokenizer_pb2.PushRequest(opens=[opened(2)]))
    await pipeline.until(choices=2)
    await bad.write(broken)
    assert await failure(bad) is grpc.StatusCode.INVALID_ARGUMENT
    (delta,) = await read(subscription)
    assert (delta.request_id, delta.finish.error.code) == ("request-2", common_pb2.ERROR_CODE_UNAVAILABLE)
    assert pipeline.hub.open_choices == 1


async def test_a_second_subscription_under_one_id_ends_the_first(pipeline: Pipeline) -> None:
    first, push = await pipeline.subscribe(), await pipeline.push()
    await push.write(detokenizer_pb2.PushRequest(opens=[opened(1)]))
    await pipeline.until(choices=1)
    second = await pipeline.subscribe()
    assert await failure(first) is grpc.StatusCode.UNAVAILABLE
    answer = await asyncio.wait_for(push.read(), TIMEOUT_S)
    assert isinstance(answer, detokenizer_pb2.PushResponse)
    assert list(answer.gone_handles) == [1]
    await push.write(detokenizer_pb2.PushRequest(opens=[opened(2)], handles=[2], token_ids=[100]))
    assert [delta.request_id for delta in await read(second)] == ["request-2"]


async def test_a_subscription_needs_an_id(pipeline: Pipeline) -> None:
    call = pipeline.stub.Subscribe(detokenizer_pb2.SubscribeRequest())
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    error = to_error(raised.value)
    assert (error.code, error.param) == (ErrorCode.INVALID_REQUEST, "subscriber_id")


async def test_health_follows_the_serving_state_of_the_process(pipeline: Pipeline) -> None:
    assert not await is_serving(pipeline.channel, NAME)
    await pipeline.server.set_serving(True)
    assert await is_serving(pipeline.channel, NAME)
