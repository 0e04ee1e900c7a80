from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
import pytest

from common.errors import BrokenStateError, UnavailableError
from common.rpc.channel import open_channel, renew
from common.rpc.server import RpcServer
from common.rpc.stream import MAX_PAUSE_S, MessageNumbers, Silence, StreamLink, StreamSource, accept_stream
from protos.gen.pando.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path


# Any: messages are bytes.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Echo(tokenizer_pb2_grpc.TokenizerServicer):
    """Admits every abort it is sent, which is enough to see order and identity of messages."""

    is_silent = False

    async def Submit(
        self,
        request_iterator: AsyncIterator[tokenizer_pb2.TokenizerSubmitRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[tokenizer_pb2.TokenizerSubmitResponse]:
        sequence = 0
        async for message in request_iterator:
            self.is_silent = self.is_silent or any(abort.request_id == "be silent" for abort in message.aborts)
            if self.is_silent:
                continue
            sequence += 1 + any(abort.request_id == "lose one" for abort in message.aborts)
            admissions = [common_pb2.Admission(request_id=abort.request_id) for abort in message.aborts]
            yield tokenizer_pb2.TokenizerSubmitResponse(admissions=admissions, sequence=sequence)


class Link:
    """A link with everything it reported."""

    def __init__(self, channel: grpc.aio.Channel, max_queued: int = 100) -> None:
        self.received: list[str] = []
        self.connections = 0
        self.breaks: list[str] = []
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        self.link = StreamLink(
            "echo",
            StreamSource(
                lambda: stub.Submit(),
                lambda: tokenizer_pb2.TokenizerSubmitRequest(heartbeat=True),
                lambda: renew(channel),
            ),
            self._on_message,
            on_connected=self._on_connected,
            on_disconnected=self.breaks.append,
            max_queued=max_queued,
        )

    def _on_message(self, message: tokenizer_pb2.TokenizerSubmitResponse) -> None:
        if any(admission.request_id == "unreadable" for admission in message.admissions):
            raise ValueError("no such enum value")
        if any(admission.request_id == "breaking" for admission in message.admissions):
            raise BrokenStateError("half changed")
        self.received.extend(admission.request_id for admission in message.admissions)

    def _on_connected(self) -> None:
        self.connections += 1

    def send(self, name: str) -> None:
        self.link.send(tokenizer_pb2.TokenizerSubmitRequest(aborts=[common_pb2.Abort(request_id=name)]))


async def start_echo(path: Path) -> RpcServer:
    server = RpcServer("pando.v1.Tokenizer", f"unix:{path}/echo.sock")
    server.add(tokenizer_pb2_grpc.add_TokenizerServicer_to_server, Echo())  # type: ignore[abstract]  # the rest is unused
    await server.start()
    return server


@asynccontextmanager
async def serving(
    path: Path, submit: Callable[[AsyncIterator[bytes], Context], Awaitable[None]]
) -> AsyncIterator[None]:
    """A tokenizer that reads and writes bytes."""
    handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(submit)
    name = tokenizer_pb2.DESCRIPTOR.services_by_name["Tokenizer"].full_name
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"Submit": handler}),))
    server.add_insecure_port(f"unix:{path}/echo.sock")
    await server.start()
    try:
        yield
    finally:
        await server.stop(0)


@pytest.fixture
async def link(tmp_path: Path) -> AsyncIterator[Link]:
    async with open_channel(f"unix:{tmp_path}/echo.sock") as channel:
        link = Link(channel)
        task = asyncio.create_task(link.link.run())
        yield link
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_messages_arrive_in_order(link: Link, tmp_path: Path) -> None:
    server = await start_echo(tmp_path)
    await until(lambda: link.link.connected)
    names = [f"m{index}" for index in range(50)]
    for name in names:
        link.send(name)
    await until(lambda: len(link.received) == 50)
    assert link.received == names
    await server.stop(0)


async def test_a_link_connects_before_anything_is_sent_and_again_after_a_break(link: Link, tmp_path: Path) -> None:
    first = await start_echo(tmp_path)
    await until(lambda: link.connections == 1)
    await first.stop(0)
    await until(lambda: link.breaks)
    second = await start_echo(tmp_path)
    await until(lambda: link.connections == 2)
    link.send("after")
    await until(lambda: link.received == ["after"])
    await second.stop(0)


async def test_a_message_that_cannot_be_read_breaks_the_stream_and_another_follows(link: Link, tmp_path: Path) -> None:
    server = await start_echo(tmp_path)
    await until(lambda: link.connections == 1)
    link.send("unreadable")
    await until(lambda: link.connections == 2)
    assert link.breaks == ["a message could not be read: ValueError"]
    link.send("after")
    await until(lambda: link.received == ["after"])
    await server.stop(0)


async def test_a_message_that_leaves_the_process_half_changed_ends_the_link(tmp_path: Path) -> None:
    async with open_channel(f"unix:{tmp_path}/echo.sock") as channel:
        link, server = Link(channel), await start_echo(tmp_path)
        running = asyncio.create_task(link.link.run())
        await until(lambda: link.connections == 1)
        link.send("breaking")
        with pytest.raises(BrokenStateError):
            await running
        await server.stop(0)


async def test_a_link_opens_again_if_another_user_closes_the_channel_while_it_connects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.rpc.channel.CLOSE_GRACE_S", 0.0)
    opened = 0

    async def submit(_requests: AsyncIterator[bytes], context: Context) -> None:
        nonlocal opened
        opened += 1
        if opened > 1:
            await accept_stream(context, is_numbered=True)
        await asyncio.Event().wait()

    async with serving(tmp_path, submit), open_channel(f"unix:{tmp_path}/echo.sock") as channel:
        link = Link(channel)
        task = asyncio.create_task(link.link.run())
        await until(lambda: opened == 1)
        renew(channel)
        await until(lambda: link.connections == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_link_waits_for_a_channel_that_stays_closed(tmp_path: Path) -> None:
    channel = open_channel(f"unix:{tmp_path}/echo.sock")
    link = Link(channel)
    await channel.close()
    task = asyncio.create_task(link.link.run())
    await asyncio.sleep(2 * MAX_PAUSE_S)
    assert not task.done()
    assert not link.link.connected
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_peer_that_does_not_accept_the_stream_is_tried_again_by_another_connection(tmp_path: Path) -> None:
    held: list[asyncio.StreamWriter] = []
    async with await asyncio.start_unix_server(lambda _, writer: held.append(writer), f"{tmp_path}/silent.sock"):
        async with open_channel(f"unix:{tmp_path}/silent.sock") as channel:
            task = asyncio.create_task(Link(channel).link.run())
            await until(lambda: len(held) == 3)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for writer in held:
            writer.close()


async def test_an_answer_that_cannot_be_decoded_breaks_the_stream_and_another_follows(tmp_path: Path) -> None:
    answers = [b"\xff\xff", b"\xff\xff", tokenizer_pb2.TokenizerSubmitResponse(sequence=1).SerializeToString()]

    async def submit(requests: AsyncIterator[bytes], context: Context) -> None:
        await accept_stream(context, is_numbered=True)
        async for _ in requests:
            await context.write(answers.pop(0) if len(answers) > 1 else answers[0])
            if len(answers) == 1:
                await asyncio.Event().wait()

    async with serving(tmp_path, submit), open_channel(f"unix:{tmp_path}/echo.sock") as channel:
        link = Link(channel)
        task = asyncio.create_task(link.link.run())
        await until(lambda: link.connections == 3)
        assert link.breaks == ["a message could not be read: AttributeError"] * 2
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_sending_to_an_absent_peer_fails_at_once(link: Link) -> None:
    with pytest.raises(UnavailableError, match="echo is not reachable"):
        link.send("lost")


async def test_a_full_queue_refuses_instead_of_growing(tmp_path: Path) -> None:
    server = await start_echo(tmp_path)
    async with open_channel(server.address) as channel:
        link = Link(channel, max_queued=3)
        task = asyncio.create_task(link.link.run())
        await until(lambda: link.link.connected)
        for name in "abc":
            link.send(name)
        with pytest.raises(UnavailableError, match="does not keep up"):
            link.send("d")
        await until(lambda: link.received == ["a", "b", "c"])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await server.stop(0)


async def test_a_link_breaks_and_connects_again_if_a_message_was_lost(link: Link, tmp_path: Path) -> None:
    server = await start_echo(tmp_path)
    await until(lambda: link.link.connected)
    link.send("lose one")
    await until(lambda: link.connections == 2)
    assert "followed message" in link.breaks[0]
    link.send("after")
    await until(lambda: link.received == ["after"])
    await server.stop(0)


async def test_a_link_breaks_if_its_peer_is_silent(link: Link, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Short, but no answer takes as long as six of them on a busy machine.
    monkeypatch.setattr("common.rpc.stream.HEARTBEAT_S", 0.2)
    server = await start_echo(tmp_path)
    await until(lambda: link.link.connected)
    link.send("any")
    await until(lambda: link.received)
    await asyncio.sleep(1.5)
    assert not link.breaks
    link.send("be silent")
    await until(lambda: link.breaks)
    assert link.breaks[0].startswith("no message for")
    await server.stop(0)


def test_messages_without_numbers_are_accepted_and_gaps_are_not() -> None:
    numbers = MessageNumbers()
    for sequence in (0, 0, 1, 2):
        numbers.check(sequence)
    with pytest.raises(UnavailableError, match="message 4 of the stream followed message 2"):
        numbers.check(4)
    with pytest.raises(UnavailableError):
        MessageNumbers().check(2)


def test_only_a_peer_that_numbers_its_messages_may_not_be_silent() -> None:
    silence = Silence(limit=2)
    for sequence in (0, 1):
        silence.note(sequence)
        for _ in range(3):
            silence.beat()
        assert silence.is_too_long == bool(sequence)
    announced = Silence(limit=2, is_numbered=True)
    for _ in range(3):
        announced.beat()
    assert announced.is_too_long
