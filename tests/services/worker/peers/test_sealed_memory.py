"""Embeddings in memory that other processes of the host copy, and what happens where they cannot."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from common.errors import PermissionDeniedError, UnavailableError
from common.rpc.channel import open_channel
from common.types import RowImage
from protos.gen.pando.v1 import worker_pb2, worker_pb2_grpc
from services.worker import metrics
from services.worker.engine.host_tier.shared_pages import SharingError
from services.worker.peers import encodings, reading
from services.worker.peers.encodings import EncodingQueue
from services.worker.peers.leases import MESSAGE_BYTES
from services.worker.peers.reading import PeerReader
from services.worker.peers.sealed_memory import SealedMemory, SealedPlace, copy_sealed, sharing_space
from services.worker.wire import embeddings_from_wire, embeddings_to_wire
from tests.services.worker.peers.encoding_process import encoding_process, holding, ticket
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory in /proc")
CONTENTS = [random.Random(size).randbytes(size) for size in (1, 4097, 2 * MESSAGE_BYTES + 5)]
# Opens a file, says so, and waits.
OPEN_AND_WAIT = "import sys; opened = open(sys.argv[1]); print('open', flush=True); sys.stdin.read()"


@contextlib.asynccontextmanager
async def peer_reader() -> AsyncIterator[PeerReader]:
    reader = PeerReader(open_channel, silence_s=20)
    try:
        yield reader
    finally:
        await reader.close()


def fetched(way: str) -> int:
    return int(metrics.FETCHED_IMAGES_TOTAL.labels(way)._value.get())


def holders(name: bytes = b"") -> set[int]:
    """Return the processes that have memory open: of a name, or of any."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it was closed meanwhile, or is another user's
            if os.readlink(link).startswith(f"/memfd:pando-embeddings-{name.hex()}"):
                found.add(int(link.parts[2]))
    return found


def shared_files() -> set[Path]:
    return set(Path("/dev/shm").iterdir())


@pytest.fixture(autouse=True)
def _closed_at_the_end() -> Iterator[None]:
    yield
    assert os.getpid() not in holders()


async def test_a_process_of_this_host_copies_the_bits_that_others_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"unix:{tmp_path}/encoder.sock"
    with encoding_process(address, CONTENTS):
        async with peer_reader() as reader:
            # As the ranks of a group do.
            before = fetched("copied")
            ranks = (reader.read_embeddings(address, ticket(n), len(c)) for n, c in enumerate(CONTENTS) for _ in "ab")
            copied = await asyncio.gather(*ranks)
            assert copied == [content for content in CONTENTS for _ in "ab"]
            assert all(not each.readonly for each in copied)
            assert fetched("copied") == before + 2 * len(CONTENTS)
            # As one of another host, user or PID namespace.
            monkeypatch.setattr(reading, "sharing_space", lambda: f"{sharing_space()}0")
            before = fetched("sent")
            sent = [await reader.read_embeddings(address, ticket(n), len(c)) for n, c in enumerate(CONTENTS)]
            assert sent == CONTENTS
            assert fetched("sent") == before + len(CONTENTS)


async def test_memory_that_cannot_be_opened_is_sent_and_not_asked_for_again_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, content = f"unix:{tmp_path}/encoder.sock", CONTENTS[-1]

    def refuse(place: SealedPlace, size: int) -> memoryview:
        # As in a container whose /proc shows other processes.
        return copy_sealed(replace(place, process=2**31), size)

    async with holding(address, [content]) as service, peer_reader() as reader:
        with monkeypatch.context() as patch, capture_logs() as logs:
            patch.setattr(reading, "copy_sealed", refuse)
            for _ in range(3):
                assert await reader.read_embeddings(address, ticket(0), len(content)) == content
        (warning,) = (each for each in logs if each["event"].startswith("embeddings."))
        assert warning["event"] == "embeddings.not_copied"
        assert "No such file" in warning["reason"]
        assert [request.space for request in service.asked] == [sharing_space(), "", "", ""]
        reader._sent_until[address] = 0.0  # as a minute later
        before = fetched("copied")
        assert await reader.read_embeddings(address, ticket(0), len(content)) == content
        assert fetched("copied") == before + 1
        # Embeddings of other sizes than expected are refused in either way.
        with pytest.raises(UnavailableError, match="were expected"):
            await reader.read_embeddings(address, ticket(0), len(content) - 1)


async def test_without_such_memory_embeddings_are_kept_and_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str, flags: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", fail)
    address, before = f"unix:{tmp_path}/encoder.sock", fetched("sent")
    with capture_logs() as logs:
        async with holding(address, CONTENTS), peer_reader() as reader:
            read = [await reader.read_embeddings(address, ticket(n), len(c)) for n, c in enumerate(CONTENTS)]
    assert read == CONTENTS
    assert fetched("sent") == before + len(CONTENTS)
    assert [each["reason"] for each in logs if each["event"] == "embeddings.not_shared"] == [
        "[Errno 24] Too many open files"
    ]


def test_a_copy_is_of_the_memory_that_was_named_or_fails(tmp_path: Path) -> None:
    memory, other = SealedMemory(CONTENTS[1]), SealedMemory(CONTENTS[1])
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    pipe = os.open(fifo, os.O_RDWR)
    try:
        place, size = memory.place, len(CONTENTS[1])
        assert copy_sealed(place, size) == CONTENTS[1]
        for wrong in (size - 1, size + 1):
            with pytest.raises(SharingError, match=f"not {wrong}"):
                copy_sealed(place, wrong)
        # Its descriptor is another file by now: other embeddings of the same size, or something that never ends.
        for descriptor in (other.place.descriptor, pipe):
            with pytest.raises(SharingError, match="closed"):
                copy_sealed(replace(place, descriptor=descriptor), size)
        memory.close()
        with pytest.raises(SharingError):
            copy_sealed(place, size)
        assert list(other.parts(4096)) == [CONTENTS[1][:4096], CONTENTS[1][4096:]]
        parts = other.parts(4096)
        next(parts)
        other.close()
        with pytest.raises(PermissionDeniedError):
            next(parts)
    finally:
        memory.close()
        other.close()
        os.close(pipe)


def test_nothing_changes_the_memory_and_other_users_do_not_open_it() -> None:
    memory = SealedMemory(CONTENTS[1])
    path = f"/proc/{memory.place.process}/fd/{memory.place.descriptor}"
    try:
        assert os.stat(path).st_mode & 0o777 == 0o400
        for change in (lambda: os.pwrite(memory.place.descriptor, b"x", 0), lambda: os.truncate(path, 1)):
            with pytest.raises(PermissionError):
                change()
        if os.geteuid() == 0:
            other_user = subprocess.run(["cat", path], user=65534, group=65534, capture_output=True, check=False)
            assert other_user.returncode
            assert not other_user.stdout
        assert copy_sealed(memory.place, len(CONTENTS[1])) == CONTENTS[1]
    finally:
        memory.close()


async def test_calls_that_end_close_their_memory_whenever_that_is() -> None:
    goes_on, encoding = asyncio.Event(), asyncio.Event()

    async def encode(images: Sequence[RowImage]) -> list[bytes]:
        encoding.set()
        await goes_on.wait()
        return [CONTENTS[1]] * len(images)

    queue = EncodingQueue(encode)

    async def hold(number: int) -> None:
        async with queue.hold(ticket(number), RowImage(b"", 0, 1, (1, 1))):
            await asyncio.Event().wait()

    gone, stays = (asyncio.create_task(hold(number)) for number in range(2))
    await encoding.wait()
    gone.cancel()  # while its image is encoded
    goes_on.set()
    while not len(queue):  # noqa: ASYNC110  (it does not notify)
        await asyncio.sleep(0.01)
    (place,) = queue.read(ticket(1), sharing_space())
    assert isinstance(place, SealedPlace)
    assert holders(place.name) == {os.getpid()}
    stays.cancel()
    await asyncio.gather(gone, stays, return_exceptions=True)
    assert not holders(place.name)


async def test_few_embeddings_have_such_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encodings, "MOST_SHARED", 2)
    async with holding(f"unix:{tmp_path}/encoder.sock", [b"abc"] * 4) as service:
        parts = [next(service.encodings.read(ticket(number), sharing_space())) for number in range(4)]
    assert [isinstance(each, SealedPlace) for each in parts] == [True, True, False, False]
    assert parts[2:] == [b"abc", b"abc"]


async def test_an_encoder_that_is_killed_leaves_no_memory_and_no_wrong_embeddings(tmp_path: Path) -> None:
    address, content = f"unix:{tmp_path}/encoder.sock", CONTENTS[-1]
    before = shared_files()
    with encoding_process(address, [content]) as process:
        async with peer_reader() as reader:
            place = await _place(reader, address)
            assert holders(place.name) == {process.pid}
            with open(f"/proc/{place.process}/fd/{place.descriptor}", "rb") as opened:  # noqa: ASYNC230
                process.kill()
                process.join(60)
                # One that has opened it reads on.
                assert opened.read() == content
            assert not holders(place.name)
            with pytest.raises(SharingError):
                copy_sealed(place, len(content))
            with pytest.raises(UnavailableError):
                await reader.read_embeddings(address, ticket(0), len(content))
    assert not [each for each in shared_files() - before if "pando" in each.name]


def test_a_reader_that_is_killed_leaves_no_memory() -> None:
    memory = SealedMemory(CONTENTS[-1])
    path = f"/proc/{memory.place.process}/fd/{memory.place.descriptor}"
    command = [sys.executable, "-c", OPEN_AND_WAIT, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"open\n"
        memory.close()
        assert holders(memory.place.name) == {reader.pid}
        reader.send_signal(signal.SIGKILL)
        reader.wait(60)
    wait_until(lambda: not holders(memory.place.name))


@given(st.binary() | st.builds(SealedPlace, st.binary(), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)))
def test_parts_of_embeddings_pass_the_wire_unchanged(part: bytes | SealedPlace) -> None:
    assert embeddings_from_wire(embeddings_to_wire(part)) == part


async def _place(reader: PeerReader, address: str) -> SealedPlace:
    request = worker_pb2.ReadEmbeddingsRequest(ticket=ticket(0), space=sharing_space())
    response = await worker_pb2_grpc.WorkerStub(reader._channel(address)).ReadEmbeddings(request).read()
    assert isinstance(response, worker_pb2.ReadEmbeddingsResponse)
    place = embeddings_from_wire(response)
    assert isinstance(place, SealedPlace)
    return place
