"""Files of images that a tokenizer keeps are not sent to it again; those that it lacks are, and no client notices."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from common import recent_images
from common.recent_images import KEPT_S, key_of
from common.requests import ChatMessage, ChatPrompt, GenerateRequest, ImageFile
from common.types import CacheMode, ErrorCode, RequestId, RequestOptions, Subject, View
from gateway.pipeline import client as client_module
from protos.gen.pando.v1 import common_pb2
from tests.fakes.pipeline_servers import TOKENIZER, FakeServices, pipeline_servers
from tests.gateway.pipeline.test_client import Connected, Notes, connected, up
from tests.waiting import until

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

ANN = View(Subject("acme", "ann"))


def known(data: bytes, frames: tuple[bytes, ...] = ()) -> ImageFile:
    file = ImageFile(data, frames=frames)
    return replace(file, key=key_of(file))


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are looked through a hundred times a second."""
    monkeypatch.setattr(recent_images, "EXPIRY_S", 0.01)


FIRST, SECOND = known(b"first"), known(b"second")


def request(name: str, *images: ImageFile, view: View = ANN, mode: CacheMode = CacheMode.DEFAULT) -> GenerateRequest:
    return GenerateRequest(RequestId(name), view, "tiny", "Hello", RequestOptions(cache_mode=mode, n=1), images=images)


def serving(directory: Path) -> AbstractAsyncContextManager[FakeServices]:
    """Run both servers; answers wait for their `release`, as one that ends before its admission arrives has none."""
    return pipeline_servers(directory, automatic=0)


async def send(client: Connected, asked: GenerateRequest) -> Notes:
    """Submit a request, and wait for its admission."""
    notes = Notes()
    client.pipeline.submit(asked, notes)
    await until(lambda: notes.admissions)
    return notes


def sent(services: FakeServices) -> list[tuple[str, list[bytes]]]:
    """Return the requests that the tokenizer got, and the files or keys of their images."""
    return [(each.request_id, [image.data or image.key for image in each.images]) for each in services.requests]


async def test_files_that_the_tokenizer_keeps_for_the_view_are_sent_once(tmp_path: Path) -> None:
    async with serving(tmp_path) as services, connected(services) as client:
        await up(client)
        services.keeps_images = True
        await send(client, request("1", FIRST))
        await send(client, request("2", FIRST, SECOND))
        await send(client, request("3", FIRST, view=View(ANN.subject, "salt")))
        await send(client, request("4", FIRST, mode=CacheMode.NONE))
        await send(client, request("5", replace(FIRST, key=b"")))
        await send(client, request("6", SECOND))
        assert sent(services) == [
            ("1", [b"first"]), ("2", [FIRST.key, b"second"]), ("3", [b"first"]), ("4", [b"first"]), ("5", [b"first"]),
            ("6", [SECOND.key]),
        ]  # fmt: skip


async def test_images_within_chats_are_named_and_videos_of_frames_are_sent(tmp_path: Path) -> None:
    video = known(b"", (b"one", b"two"))
    chat = ChatPrompt((ChatMessage("user", parts=("Look", FIRST, video)),))
    async with serving(tmp_path) as services, connected(services) as client:
        await up(client)
        services.keeps_images = True
        for name in ("1", "2"):
            await send(client, replace(request(name), prompt=chat))
        first, second = ([part.image for part in each.chat.messages[0].parts[1:]] for each in services.requests)
    assert [(each.data, each.key, list(each.frames)) for each in first] == [
        (b"first", b"", []), (b"", b"", [b"one", b"two"]),
    ]  # fmt: skip
    assert [(each.data, each.key, list(each.frames)) for each in second] == [
        (b"", FIRST.key, []), (b"", b"", [b"one", b"two"]),
    ]  # fmt: skip


async def test_files_are_sent_after_all_if_the_tokenizer_lacks_them(tmp_path: Path) -> None:
    async with serving(tmp_path) as services, connected(services) as client:
        await up(client)
        services.keeps_images = True
        await send(client, request("1", FIRST))
        services.lacks_images = True
        notes = await send(client, request("2", FIRST, SECOND))
        assert sent(services)[1:] == [("2", [FIRST.key, b"second"]), ("2", [b"first", b"second"])]
        assert [each.rejected for each in notes.admissions] == [None]
        services.release.set()
        await until(lambda: notes.text == "Hello world")
        services.release.clear()
        assert notes.lost == []
        services.lacks_images = False
        await send(client, request("3", FIRST))
        assert sent(services)[3:] == [("3", [FIRST.key])], "it has been said to be kept again"


async def test_an_image_that_is_lacked_is_not_named_again_before_it_is_kept(tmp_path: Path) -> None:
    async with serving(tmp_path) as services, connected(services) as client:
        await up(client)
        services.keeps_images = True
        await send(client, request("1", FIRST))
        services.keeps_images, services.lacks_images = False, True
        await send(client, request("2", FIRST))
        await send(client, request("3", FIRST))
        assert sent(services)[1:] == [("2", [FIRST.key]), ("2", [b"first"]), ("3", [b"first"])]


async def test_a_request_is_sent_again_with_all_images_whatever_others_hear_meanwhile(tmp_path: Path) -> None:
    async with serving(tmp_path) as services, connected(services) as client:
        await up(client)
        services.keeps_images = True
        await send(client, request("1", FIRST))
        services.lacks_images = True
        first, second = Notes(), Notes()
        client.pipeline.submit(request("2", FIRST), first)
        # The fake tokenizer keeps images of chats; both answers are in one message.
        chat = ChatPrompt((ChatMessage("user", parts=(FIRST,)),))
        client.pipeline.submit(replace(request("3"), prompt=chat), second)
        await until(lambda: first.admissions and second.admissions)
        assert [each.rejected for each in (*first.admissions, *second.admissions)] == [None, None]
        assert sent(services)[1:] == [("2", [FIRST.key]), ("3", []), ("2", [b"first"])]


async def test_a_refusal_for_another_reason_is_passed_on(tmp_path: Path) -> None:
    async with serving(tmp_path) as services, connected(services) as client:
        await up(client)
        services.keeps_images = True
        services.rejection = common_pb2.RequestError(code=common_pb2.ERROR_CODE_UNAVAILABLE, message="away")
        notes = await send(client, request("1", FIRST))
        (admission,) = notes.admissions
        assert admission.rejected is not None
        assert admission.rejected.code is ErrorCode.UNAVAILABLE
        services.rejection = None
        await send(client, request("2", FIRST))
        assert sent(services) == [("1", [b"first"]), ("2", [b"first"])]


async def test_files_that_are_left_out_count_for_the_limit_of_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MAX_REQUEST_BYTES", 16_000)
    large, other = known(b"x" * 9000), known(b"y" * 9000)
    async with serving(tmp_path) as services, connected(services) as client:
        await up(client)
        services.keeps_images = True
        for name, image in (("1", large), ("2", other), ("3", large)):
            (admission,) = (await send(client, request(name, image))).admissions
            assert admission.rejected is None
        (admission,) = (await send(client, request("4", large, other))).admissions
        assert admission.rejected is not None
        assert admission.rejected.code is ErrorCode.INVALID_REQUEST
        assert sent(services)[2:] == [("3", [large.key])]


async def test_a_request_that_was_aborted_meanwhile_is_not_sent_again(tmp_path: Path) -> None:
    async with serving(tmp_path) as services, connected(services) as client:
        await up(client)
        services.keeps_images = True
        await send(client, request("1", FIRST))
        services.lacks_images = True
        notes = Notes()
        client.pipeline.submit(request("2", FIRST), notes)
        await services.until(lambda: len(services.requests) == 2)
        client.pipeline.abort(RequestId("2"))
        await services.until(lambda: services.aborts == ["2"])
        await send(client, request("3", SECOND))
        assert [name for name, _ in sent(services)] == ["1", "2", "3"]


async def test_another_tokenizer_process_is_sent_everything(tmp_path: Path) -> None:
    async with serving(tmp_path) as services, connected(services) as client:
        await up(client)
        services.keeps_images = True
        await send(client, request("1", FIRST))
        await services.kill(TOKENIZER)
        await until(lambda: not client.pipeline.is_linked)
        await services.start(TOKENIZER)
        await up(client)
        await send(client, request("2", FIRST))
        assert sent(services) == [("1", [b"first"]), ("2", [b"first"])]


@pytest.mark.usefixtures("often")
async def test_names_of_images_are_dropped_in_time_without_further_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as services, connected(services) as client:
        await up(client)
        services.keeps_images = True
        await send(client, request("1", FIRST))
        (peer,) = client.pipeline._tokenizers
        assert len(peer.kept_images) == 1
        monkeypatch.setattr(peer.kept_images, "_clock", lambda: time.monotonic() + KEPT_S)
        await until(lambda: not len(peer.kept_images))


async def test_a_request_that_is_refused_with_all_images_is_answered(tmp_path: Path) -> None:
    async with serving(tmp_path) as services, connected(services) as client:
        await up(client)
        services.keeps_images = True
        await send(client, request("1", FIRST))
        services.lacks_all_images = True
        notes = await send(client, request("2", FIRST))
        (admission,) = notes.admissions
        assert admission.rejected is not None
        assert admission.rejected.code is ErrorCode.UNAVAILABLE
        assert sent(services)[1:] == [("2", [FIRST.key]), ("2", [b"first"])]
