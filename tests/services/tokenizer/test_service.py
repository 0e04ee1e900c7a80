from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest

from common.rpc.channel import is_serving, open_channel
from common.rpc.server import RpcServer
from common.rpc.status import to_error
from common.settings import ModelSettings, Settings, TokenizerSettings
from common.types import ErrorCode
from protos.gen.pando.v1 import common_pb2, scheduler_pb2_grpc, sessions_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from services.tokenizer.__main__ import build, report_health
from services.tokenizer.images.prompts import NoImages
from services.tokenizer.scheduler_link import SchedulerLink
from tests.fakes.scheduler import FakeScheduler
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from common.tokenization import TextModel
    from tests.common.tokenization.transformers_oracle import OracleTokenizer

NAME = "pando.v1.Tokenizer"
SCHEDULER = "pando.v1.Scheduler"
MODEL = "smollm2-135m-instruct"
TIMEOUT_S = 60.0
ENCODING_THREADS = 2


class Pipeline:
    """A tokenizer between a gateway's stub and a fake scheduler."""

    def __init__(self, folder: Path, model: TextModel) -> None:
        self.address = f"unix:{folder / 'tokenizer.sock'}"
        self.scheduler_address = f"unix:{folder / 'scheduler.sock'}"
        self.scheduler = FakeScheduler()  # type: ignore[abstract]  # the generated base answers what it doesn't
        self._model = model
        self.executor = ThreadPoolExecutor(ENCODING_THREADS)
        self._tasks: list[asyncio.Task[None]] = []
        self._scheduler_server: RpcServer | None = None
        self._scheduler_channel = open_channel(self.scheduler_address)
        self._server = RpcServer(NAME, self.address)
        self.channel = open_channel(self.address)
        self.stub = tokenizer_pb2_grpc.TokenizerStub(self.channel)

    async def start(self) -> None:
        settings = Settings(model=ModelSettings(reference=MODEL), tokenizer=TokenizerSettings(address=self.address))
        self.link = SchedulerLink(self._scheduler_channel)
        self.relay, service = build(settings, self._model, self.link, self.executor, NoImages())
        self._server.add(tokenizer_pb2_grpc.add_TokenizerServicer_to_server, service)
        await self._server.start()
        self._tasks = [
            asyncio.create_task(self.link.run(self.relay)),
            asyncio.create_task(report_health(self._server, self.link.can_serve)),
        ]
        await self.start_scheduler()

    async def start_scheduler(self) -> None:
        self._scheduler_server = RpcServer(SCHEDULER, self.scheduler_address)
        self._scheduler_server.add(scheduler_pb2_grpc.add_SchedulerServicer_to_server, self.scheduler)
        await self._scheduler_server.start()
        await self._scheduler_server.set_serving(True)
        await until(lambda: self.link.is_connected)

    async def say_scheduler_serves(self, serves: bool) -> None:
        assert self._scheduler_server is not None
        await self._scheduler_server.set_serving(serves)

    async def stop_scheduler(self) -> None:
        if self._scheduler_server is not None:
            await self._scheduler_server.stop(grace_s=0)
            self._scheduler_server = None
            await until(lambda: not self.link.is_connected)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self.channel.close()
        await self._server.stop(grace_s=0)
        await self.stop_scheduler()
        await self._scheduler_channel.close()
        self.executor.shutdown()

    async def gateway(self) -> Gateway:
        call = self.stub.Submit()
        await call.wait_for_connection()
        return Gateway(call)

    async def serves(self) -> bool:
        return await is_serving(self.channel, NAME)


class Gateway:
    """One gateway's stream."""

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[tokenizer_pb2.TokenizerSubmitRequest, tokenizer_pb2.TokenizerSubmitResponse],
    ) -> None:
        self.call = call

    async def submit(self, *generates: tokenizer_pb2.GenerateRequest) -> None:
        await self.call.write(tokenizer_pb2.TokenizerSubmitRequest(generates=generates))

    async def abort(self, *names: str) -> None:
        aborts = [common_pb2.Abort(request_id=name) for name in names]
        await self.call.write(tokenizer_pb2.TokenizerSubmitRequest(aborts=aborts))

    async def admissions(self) -> list[common_pb2.Admission]:
        answer = await asyncio.wait_for(self.call.read(), TIMEOUT_S)
        assert isinstance(answer, tokenizer_pb2.TokenizerSubmitResponse)
        return list(answer.admissions)


@pytest.fixture
async def pipeline(tmp_path: Path, model: TextModel) -> AsyncIterator[Pipeline]:
    pipeline = Pipeline(tmp_path, model)
    await pipeline.start()
    try:
        yield pipeline
    finally:
        await pipeline.stop()


def chat(*contents: str, **options: object) -> tokenizer_pb2.ChatPrompt:
    messages = [tokenizer_pb2.ChatMessage(role="user", content=content) for content in contents]
    return tokenizer_pb2.ChatPrompt(messages=messages, add_generation_prompt=True, **options)  # type: ignore[arg-type]


def generate(name: str, **changes: object) -> tokenizer_pb2.GenerateRequest:
    """Return a valid request with a text prompt, unless changed."""
    fields: dict[str, object] = {
        "request_id": name,
        "view": common_pb2.View(subject=common_pb2.Subject(tenant="acme", name="ada")),
        "reply_to": common_pb2.ReplyTo(subscriber_id="gateway"),
        "model": MODEL,
        "sampling": common_pb2.SamplingParams(temperature=0.5, top_p=1, repetition_penalty=1, seed=9),
        "stop": common_pb2.StopConditions(max_tokens=5, stop_strings=["x"]),
        "n": 1,
    }
    if not changes.keys() & {"chat", "token_ids", "text"}:
        fields["text"] = "Hello"
    return tokenizer_pb2.GenerateRequest(**(fields | changes))  # type: ignore[arg-type]


async def test_requests_of_all_kinds_reach_the_scheduler_encoded(pipeline: Pipeline, oracle: OracleTokenizer) -> None:
    gateway = await pipeline.gateway()
    ids = tokenizer_pb2.TokenIds(ids=[5, 6, 7])
    await gateway.submit(generate("a"), generate("b", chat=chat("Hi")), generate("c", token_ids=ids))
    admissions = await gateway.admissions()
    assert [(answer.request_id, answer.HasField("rejected")) for answer in admissions] == [
        ("a", False), ("b", False), ("c", False),
    ]  # fmt: skip
    text, rendered, given = pipeline.scheduler.requests
    assert list(text.token_ids) == oracle("Hello")["input_ids"]
    expected = oracle.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert list(rendered.token_ids) == expected["input_ids"]
    assert list(given.token_ids) == [5, 6, 7]
    assert [answer.prompt_tokens for answer in admissions] == [
        len(sent.token_ids) for sent in pipeline.scheduler.requests
    ]
    assert len(pipeline.scheduler.messages) == 1


async def test_a_request_keeps_all_its_fields(pipeline: Pipeline) -> None:
    gateway = await pipeline.gateway()
    asked = generate(
        "a",
        priority=-3,
        cache_mode=common_pb2.CACHE_MODE_NONE,
        skip_special_tokens=True,
        timeout_ms=1234,
        resume=common_pb2.Resume(token_ids=[1, 2], delivered_characters=3),
        trace=common_pb2.TraceContext(traceparent="00-1-2-01", tracestate="x=y"),
    )
    await gateway.submit(asked)
    await gateway.admissions()
    (sent,) = pipeline.scheduler.requests
    for field in (
        "request_id", "view", "reply_to", "sampling", "stop", "n", "priority", "cache_mode", "skip_special_tokens",
        "timeout_ms", "resume", "trace",
    ):  # fmt: skip
        assert getattr(sent, field) == getattr(asked, field), field


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        (
            {"view": common_pb2.View(subject=common_pb2.Subject(tenant="acme"))},
            common_pb2.ERROR_CODE_INVALID_REQUEST,
            "subject",
        ),
        ({"reply_to": common_pb2.ReplyTo()}, common_pb2.ERROR_CODE_INVALID_REQUEST, "reply_to"),
        ({"model": "other"}, common_pb2.ERROR_CODE_MODEL_NOT_FOUND, "model"),
        ({"text": ""}, common_pb2.ERROR_CODE_INVALID_REQUEST, "prompt"),
        ({"chat": chat()}, common_pb2.ERROR_CODE_INVALID_REQUEST, "messages"),
        ({"chat": chat("hi " * 9000)}, common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED, "messages"),
        ({"text": "x" * 10_000_000}, common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED, "prompt"),
        ({"token_ids": tokenizer_pb2.TokenIds(ids=[1, 49152])}, common_pb2.ERROR_CODE_INVALID_REQUEST, "prompt"),
        ({"token_ids": tokenizer_pb2.TokenIds(ids=[2**32 - 1])}, common_pb2.ERROR_CODE_INVALID_REQUEST, "prompt"),
        (
            {"stop": common_pb2.StopConditions(max_tokens=8192)},
            common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED,
            "prompt",
        ),
        (
            {"sampling": common_pb2.SamplingParams(temperature=-1)},
            common_pb2.ERROR_CODE_INVALID_REQUEST,
            "temperature",
        ),
        ({"n": 0}, common_pb2.ERROR_CODE_INVALID_REQUEST, "n"),
    ],
)
async def test_bad_requests_are_rejected_alone(
    pipeline: Pipeline, changes: dict[str, object], code: common_pb2.ErrorCode.ValueType, param: str
) -> None:
    gateway = await pipeline.gateway()
    await gateway.submit(generate("bad", **changes), generate("good"))
    answers = {answer.request_id: answer for answer in await gateway.admissions()}
    while len(answers) < 2:
        answers |= {answer.request_id: answer for answer in await gateway.admissions()}
    assert answers["bad"].rejected.code == code
    assert answers["bad"].rejected.param == param
    assert answers["bad"].rejected.message
    assert not answers["bad"].rejected.retryable
    assert not answers["good"].HasField("rejected")


async def test_a_request_without_prompt_is_rejected(pipeline: Pipeline) -> None:
    gateway = await pipeline.gateway()
    request = generate("a")
    request.ClearField("text")
    await gateway.submit(request)
    (answer,) = await gateway.admissions()
    assert "missing" in answer.rejected.message


async def test_the_schedulers_rejection_is_passed_on(pipeline: Pipeline) -> None:
    pipeline.scheduler.rejection = common_pb2.RequestError(
        code=common_pb2.ERROR_CODE_QUEUE_FULL, message="full", retryable=True, retry_after_ms=250
    )
    gateway = await pipeline.gateway()
    await gateway.submit(generate("a"))
    (answer,) = await gateway.admissions()
    assert answer.rejected == pipeline.scheduler.rejection


async def test_aborts_pass_through(pipeline: Pipeline) -> None:
    gateway = await pipeline.gateway()
    await gateway.submit(generate("a"))
    await gateway.admissions()
    await gateway.abort("a", "unknown")
    await pipeline.scheduler.until(lambda scheduler: len(scheduler.aborts) == 2)
    assert pipeline.scheduler.aborts == ["a", "unknown"]


async def test_unanswered_requests_of_a_disconnected_gateway_are_aborted(pipeline: Pipeline) -> None:
    leaving, staying = await pipeline.gateway(), await pipeline.gateway()
    await leaving.submit(generate("admitted"))
    await leaving.admissions()
    pipeline.scheduler.answers = False
    await leaving.submit(generate("waiting"))
    await staying.submit(generate("stays"))
    await pipeline.scheduler.until(lambda scheduler: len(scheduler.requests) == 3)
    leaving.call.cancel()
    await pipeline.scheduler.until(lambda scheduler: scheduler.aborts)
    assert pipeline.scheduler.aborts == ["waiting"]
    assert pipeline.relay.pending == 1


async def test_without_a_scheduler_requests_are_rejected_at_once(pipeline: Pipeline) -> None:
    await pipeline.stop_scheduler()
    gateway = await pipeline.gateway()
    await gateway.submit(generate("a"))
    (answer,) = await gateway.admissions()
    assert answer.rejected.code == common_pb2.ERROR_CODE_UNAVAILABLE
    assert answer.rejected.retryable


async def test_a_request_unanswered_by_a_lost_scheduler_is_rejected_and_later_aborted(
    pipeline: Pipeline,
) -> None:
    pipeline.scheduler.answers = False
    gateway = await pipeline.gateway()
    await gateway.submit(generate("a"))
    await pipeline.scheduler.until(lambda scheduler: scheduler.requests)
    await pipeline.stop_scheduler()
    (answer,) = await gateway.admissions()
    assert (answer.request_id, answer.rejected.code) == ("a", common_pb2.ERROR_CODE_UNAVAILABLE)
    assert answer.rejected.retryable
    await gateway.abort("long-running")
    pipeline.scheduler.answers = True
    await pipeline.start_scheduler()
    await pipeline.scheduler.until(lambda scheduler: len(scheduler.aborts) == 2)
    assert pipeline.scheduler.aborts == ["a", "long-running"]
    await gateway.submit(generate("b"))
    (answer,) = await gateway.admissions()
    assert not answer.HasField("rejected")


async def test_the_tokenizer_serves_only_while_the_scheduler_does(pipeline: Pipeline) -> None:
    async def follows(expected: bool) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while await pipeline.serves() != expected:  # noqa: ASYNC110  (the state of another process)
                await asyncio.sleep(0.02)

    await follows(expected=True)
    await pipeline.say_scheduler_serves(False)
    await follows(expected=False)
    await pipeline.say_scheduler_serves(True)
    await follows(expected=True)
    await pipeline.stop_scheduler()
    await follows(expected=False)
    assert await is_serving(pipeline.channel, "")
    await pipeline.start_scheduler()
    await follows(expected=True)


async def test_encoding_leaves_the_event_loop_free(pipeline: Pipeline) -> None:
    gateway = await pipeline.gateway()
    released = threading.Event()
    for _ in range(ENCODING_THREADS):
        pipeline.executor.submit(released.wait, TIMEOUT_S)
    try:
        await gateway.submit(*(generate(f"r{number}", text="lorem ipsum 漢 " * 4000) for number in range(16)))
        first = asyncio.create_task(gateway.admissions())
        waited, _ = await asyncio.wait([first], timeout=0.5)
        assert not waited, "prompts were encoded outside the threads, which are all taken"
        assert await pipeline.serves()
    finally:
        released.set()
    answered = len(await first)
    while answered < 16:
        answered += len(await gateway.admissions())


async def test_texts_can_be_encoded_and_decoded_over_rpc(pipeline: Pipeline, oracle: OracleTokenizer) -> None:
    encoded = await pipeline.stub.Tokenize(tokenizer_pb2.TokenizeRequest(text="Hello 12", add_special_tokens=True))
    assert list(encoded.ids) == oracle("Hello 12")["input_ids"]
    assert list(encoded.tokens) == ["Hello", "Ġ", "1", "2"]
    assert encoded.max_context_tokens == 8192
    for skip, text in ((True, "Hello 12"), (False, "Hello 12<|im_end|>")):
        request = tokenizer_pb2.DetokenizeRequest(ids=[*encoded.ids, 2], skip_special_tokens=skip)
        assert (await pipeline.stub.Detokenize(request)).text == text
    with pytest.raises(grpc.RpcError) as refused:
        await pipeline.stub.Detokenize(tokenizer_pb2.DetokenizeRequest(ids=[5, 49_152]))
    assert to_error(refused.value).param == "tokens"


async def test_at_most_a_context_of_ids_is_decoded(pipeline: Pipeline) -> None:
    assert (await pipeline.stub.Detokenize(tokenizer_pb2.DetokenizeRequest(ids=[5] * 8192))).text
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await pipeline.stub.Detokenize(tokenizer_pb2.DetokenizeRequest(ids=[5] * 8193))
    error = to_error(raised.value)
    assert (error.code, error.param) == (ErrorCode.INVALID_REQUEST, "tokens")
    assert "8193 token ids; at most 8192" in error.message


@pytest.mark.parametrize("subject", [{"tenant": "acme"}, {"name": "user/ann"}])
async def test_half_a_subject_is_refused(pipeline: Pipeline, subject: dict[str, str]) -> None:
    request = tokenizer_pb2.TokenizeRequest(text="Hello", subject=common_pb2.Subject(**subject))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await pipeline.stub.Tokenize(request)
    assert to_error(raised.value).param == "subject"


async def test_a_rendered_conversation_can_be_inspected(pipeline: Pipeline, oracle: OracleTokenizer) -> None:
    variables = json.dumps({"unused": 1})
    request = tokenizer_pb2.RenderChatRequest(chat=chat("Hi", template_variables_json=variables))
    answer = await pipeline.stub.RenderChat(request)
    messages = [{"role": "user", "content": "Hi"}]
    assert answer.text == oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert list(answer.ids) == oracle.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


async def test_an_invalid_conversation_gives_a_status_with_details(pipeline: Pipeline) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await pipeline.stub.RenderChat(tokenizer_pb2.RenderChatRequest(chat=chat()))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    error = to_error(raised.value)
    assert (error.code, error.param) == (ErrorCode.INVALID_REQUEST, "messages")


async def test_the_model_is_described(pipeline: Pipeline) -> None:
    answer = await pipeline.stub.GetModel(tokenizer_pb2.GetModelRequest())
    assert (answer.model, answer.max_context_tokens, answer.vocabulary_size) == (MODEL, 8192, 49152)
    assert answer.has_chat_template
    assert answer.created_unix_s > 1_700_000_000
    assert (answer.is_encoder, answer.pooling, answer.embedding_dimensions) == (False, common_pb2.POOLING_LAST, 576)


async def test_ids_survive_both_hops(pipeline: Pipeline) -> None:
    gateway = await pipeline.gateway()
    ids = np.random.default_rng(0).integers(0, 49152, 8000).tolist()
    await gateway.submit(generate("a", token_ids=tokenizer_pb2.TokenIds(ids=ids)))
    await gateway.admissions()
    assert list(pipeline.scheduler.requests[0].token_ids) == ids


async def test_a_turn_reaches_the_scheduler_as_it_was(pipeline: Pipeline) -> None:
    gateway = await pipeline.gateway()
    message = generate("r1", text="more")
    message.session = "chat"
    message.turn.CopyFrom(sessions_pb2.SessionTurn(name="two", after="one", offset=-1, replace=True))
    await gateway.submit(message)
    await pipeline.scheduler.until(lambda scheduler: scheduler.requests)
    (scheduled,) = pipeline.scheduler.requests
    assert (scheduled.session, scheduled.turn) == ("chat", message.turn)
