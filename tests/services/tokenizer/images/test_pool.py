"""The processes that decode images: what they cannot do, and what happens when they die."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest
from PIL import Image
from structlog.testing import capture_logs

from common.errors import InvalidRequestError, PandoError, QueueFullError
from common.recent_images import LEAST_BYTES, RecentImages, key_of
from common.requests import ImageFile
from common.types import ErrorCode, Subject, View
from services.tokenizer.images import decoding_process, pool
from services.tokenizer.images.child import LENGTH, ChildLimits
from services.tokenizer.images.pool import WAITING_PIECES, ImagePool, MissingImageError, usual_processes
from services.tokenizer.images.processor import Detail, PreparedImage, prepared, prepared_video
from services.tokenizer.images.registry import read_processor
from services.tokenizer.images.sampling import FrameTimes
from tests.services.tokenizer.images.pictures import file_of, picture
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

ADA = Subject("acme", "ada")
MEMORY = 96 * 1024 * 1024
MOST_BYTES = 64 * 1024 * 1024
LIMITS = ChildLimits(max_pixels=40_000_000, max_frames=768, memory_bytes=MEMORY, cpu_seconds=20.0)
KEPT_BYTES = 1024 * 1024


def _decodes(process: psutil.Process) -> bool:
    try:
        return "services.tokenizer.images.child" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # it has ended since it was listed
        return False


class Bench:
    """A pool, and the processes that it has started."""

    def __init__(
        self, directory: Path, timeout_s: float = 60.0, processes: int = 1, limits: ChildLimits = LIMITS
    ) -> None:
        self.processor = read_processor(directory, "<image>")
        self.recent: RecentImages[PreparedImage] = RecentImages(KEPT_BYTES)
        self.pool = ImagePool(directory, self.processor, limits, processes, timeout_s, self.recent)

    @property
    def children(self) -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if _decodes(child)]

    async def refusal(self, *files: bytes) -> str:
        with pytest.raises(InvalidRequestError) as caught:
            await self.pool.prepare(ADA, [ImageFile(data) for data in files], "messages", MOST_BYTES)
        assert caught.value.param == "messages"
        return str(caught.value)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", "vision_config": {}}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 3136, "max_pixels": 100_000}))
    return tmp_path


@pytest.fixture
async def bench(directory: Path) -> AsyncIterator[Bench]:
    made = Bench(directory)
    async with running(made):
        yield made


@contextlib.asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[None]:
    task = asyncio.create_task(bench.pool.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_images_are_those_that_this_process_would_cut(bench: Bench) -> None:
    pictures = [picture(120, 90, seed=1), picture(300, 40, seed=2)]
    files = [ImageFile(file_of(image)) for image in pictures]
    found = (await bench.pool.prepare(ADA, files, "messages", MOST_BYTES)).images
    for image, one in zip(pictures, found, strict=True):
        grid, values = bench.processor.cut(image, Detail.AUTO)
        expected = prepared(bench.processor, grid, values.tobytes())
        assert (one.digest, one.grid, one.text) == (expected.digest, expected.grid, expected.text)
        assert np.array_equal(one.pixels.unpacked(), expected.pixels.unpacked())


async def test_an_image_that_its_view_sends_again_is_not_decoded_again(bench: Bench) -> None:
    first, second = (ImageFile(file_of(picture(60, 60, seed=seed))) for seed in (1, 2))
    view, salted = View(ADA), View(ADA, "other")
    (decoded,) = (await bench.pool.prepare(ADA, [first], "messages", MOST_BYTES, view)).images
    again, new = (await bench.pool.prepare(ADA, [first, second], "messages", MOST_BYTES, view)).images
    assert again is decoded
    assert new.digest != decoded.digest
    for other in (None, salted, View(Subject("acme", "bob")), View(Subject("globex", ADA.name))):
        (image,) = (await bench.pool.prepare(ADA, [first], "messages", MOST_BYTES, other)).images
        assert image is not decoded
        assert image.digest == decoded.digest
    (closer,) = (await bench.pool.prepare(ADA, [ImageFile(first.data, "low")], "messages", MOST_BYTES, view)).images
    assert closer is not decoded
    damaged = ImageFile(first.data[:-40])
    with pytest.raises(InvalidRequestError, match="Image 2 of 2 is damaged"):
        await bench.pool.prepare(ADA, [first, damaged], "messages", MOST_BYTES, view)
    with pytest.raises(InvalidRequestError, match="the first 2 of 2 take"):
        await bench.pool.prepare(ADA, [first, second], "messages", again.pixels.nbytes, view)


async def test_an_image_is_found_by_its_key_alone_in_the_view_that_sent_it_only(bench: Bench) -> None:
    file = ImageFile(file_of(picture(60, 60, seed=1)))
    bare, view = replace(file, key=key_of(file)).bare(), View(ADA)
    (decoded,) = (await bench.pool.prepare(ADA, [file], "messages", MOST_BYTES, view)).images
    (found,) = (await bench.pool.prepare(ADA, [bare], "messages", MOST_BYTES, view)).images
    assert found is decoded
    # With a file, what the sender calls it does not matter.
    misnamed = ImageFile(file_of(picture(60, 60, seed=2)), key=bare.key)
    for _ in range(2):
        (image,) = (await bench.pool.prepare(ADA, [misnamed], "messages", MOST_BYTES, view)).images
        assert image.digest != decoded.digest
    for other in (None, View(ADA, "other"), View(Subject("acme", "bob"))):
        for unknown in (bare, replace(bare, key=b"never sent")):
            with pytest.raises(MissingImageError, match="not kept any more"):
                await bench.pool.prepare(ADA, [file, unknown], "messages", MOST_BYTES, other)
    # Nothing was put into the other views, not even the image beside the missing one.
    assert bench.recent.get(View(ADA, "other"), key_of(file)) is None


async def test_images_are_said_to_be_kept_if_the_view_finds_all_of_them_afterwards(bench: Bench) -> None:
    view = View(ADA)
    files = [ImageFile(file_of(picture(60, 60, seed=seed))) for seed in (1, 2)]
    prepared = await bench.pool.prepare(ADA, files, "messages", MOST_BYTES, view)
    assert prepared.are_kept
    assert not (await bench.pool.prepare(ADA, files, "messages", MOST_BYTES)).are_kept, "of no view"
    # One picture each of many others leaves room for one of the two, which the second one takes.
    bench.recent.forget(ADA)
    for number in range(KEPT_BYTES // LEAST_BYTES):
        bench.recent.put(View(Subject("acme", f"user/{number}")), b"", prepared.images[0])
    assert not (await bench.pool.prepare(ADA, files, "messages", MOST_BYTES, view)).are_kept
    assert [bench.recent.has(view, key_of(file)) for file in files] == [False, True]


async def test_videos_are_those_that_this_process_would_cut(bench: Bench) -> None:
    frames = [picture(120, 90, seed=number) for number in range(3)]
    files = tuple(file_of(frame) for frame in frames)
    still = ImageFile(file_of(frames[0]))
    asked = [ImageFile(b"", frames=files, frames_per_second=4), still, ImageFile(b"", "low", files)]
    first, _, last = (await bench.pool.prepare(ADA, asked, "messages", MOST_BYTES)).images
    grid, values = bench.processor.cut_frames(iter(frames), 3, Detail.AUTO)
    expected = prepared_video(bench.processor, grid, values.tobytes(), FrameTimes.even(3, 4))
    assert (first.digest, first.grid, first.text) == (expected.digest, expected.grid, expected.text)
    assert np.array_equal(first.pixels.unpacked(), expected.pixels.unpacked())
    assert last.digest != first.digest, "of another rate"


async def test_hostile_videos_are_refused_by_name_and_end_no_process(bench: Bench) -> None:
    good = file_of(picture(60, 40))
    huge = file_of(Image.new("L", (9000, 9000)))
    for words, frames in {
        "The video is damaged": (good, good[: len(good) // 2]),
        "or not an image": (good, b"\x00\x00\x00 ftypisom" + bytes(100)),
        "9000 x 9000 pixels": (huge, huge),
        "different sizes": (good, file_of(picture(40, 60))),
        "fewer than 2 frames": (good,),
    }.items():
        with pytest.raises(InvalidRequestError, match=words):
            await bench.pool.prepare(ADA, [ImageFile(b"", frames=frames)], "messages", MOST_BYTES)
    slow = ImageFile(b"", frames=(good, good, good), frames_per_second=0.001)
    with pytest.raises(InvalidRequestError, match="The video is too slow for its size"):
        await bench.pool.prepare(ADA, [slow], "messages", MOST_BYTES)
    (process,) = bench.children
    many = ImageFile(b"", frames=(file_of(picture(28, 28)),) * 2000)
    (video,) = (await bench.pool.prepare(ADA, [many], "messages", MOST_BYTES)).images
    assert video.grid[0] == 1000
    assert bench.children == [process]


async def test_a_refused_file_is_freed_without_a_search_for_cycles(bench: Bench) -> None:
    damaged = b"no image" * 1000
    gc.disable()
    try:
        # `pytest.raises` would keep the error.
        with contextlib.suppress(InvalidRequestError):
            await bench.pool.prepare(ADA, [ImageFile(damaged)], "messages", MOST_BYTES)
        await bench.pool.prepare(ADA, [ImageFile(file_of(picture(60, 60)))], "messages", MOST_BYTES)
        assert not any(isinstance(each, ImageFile) and each.data is damaged for each in gc.get_objects())
    finally:
        gc.enable()


async def test_digests_are_of_pixels_not_of_files(bench: Bench) -> None:
    image, other = picture(60, 60, seed=1), picture(60, 60, seed=2)
    exif = Image.Exif()
    exif[0x010E] = "the same picture, described"
    files = [
        file_of(image),
        file_of(image, exif=exif),
        file_of(image, "WEBP", lossless=True),
        file_of(other, exif=exif),
    ]
    first, described, rewritten, different = [
        one.digest
        for one in (await bench.pool.prepare(ADA, [ImageFile(data) for data in files], "messages", MOST_BYTES)).images
    ]
    assert first == described == rewritten != different


async def test_a_low_detail_makes_fewer_embeddings_and_another_digest(directory: Path) -> None:
    (directory / "preprocessor_config.json").write_text(json.dumps({"max_pixels": 2_000_000}))
    bench = Bench(directory)
    async with running(bench):
        data = file_of(picture(900, 900))
        files = [ImageFile(data, detail) for detail in ("auto", "high", "low")]
        auto, high, low = (await bench.pool.prepare(ADA, files, "messages", MOST_BYTES)).images
    assert (auto.digest, auto.embeddings) == (high.digest, high.embeddings)
    assert low.embeddings < auto.embeddings / 2


async def test_a_refused_image_is_numbered_and_its_process_goes_on(bench: Bench) -> None:
    good = file_of(picture(30, 30))
    assert (await bench.refusal(b"<svg/>")).startswith("The image is damaged")
    (before,) = bench.children
    assert (await bench.refusal(good, good[:200])).startswith("Image 2 of 2 is damaged")
    assert [child.pid for child in bench.children] == [before.pid]


async def test_an_image_that_needs_more_memory_is_refused(bench: Bench) -> None:
    # 36 million pixels, of four bytes each when they are decoded.
    assert "too much memory" in await bench.refusal(file_of(Image.new("RGBA", (6000, 6000), (1, 2, 3, 4))))
    await bench.pool.prepare(ADA, [ImageFile(file_of(picture(30, 30)))], "messages", MOST_BYTES)


async def test_a_process_that_dies_fails_its_image_only_and_is_replaced(bench: Bench) -> None:
    good = ImageFile(file_of(picture(30, 30)))
    await bench.pool.prepare(ADA, [good], "messages", MOST_BYTES)
    (before,) = bench.children
    before.kill()
    before.wait()
    assert "decoder crashed" in await bench.refusal(good.data)
    await bench.pool.prepare(ADA, [good], "messages", MOST_BYTES)
    assert before.pid not in [child.pid for child in bench.children]


async def test_an_image_that_takes_too_long_is_refused(directory: Path) -> None:
    bench = Bench(directory, timeout_s=0.5)
    async with running(bench):
        await until(lambda: len(bench.children) == 1)
        good = ImageFile(file_of(picture(30, 30)))
        with contextlib.suppress(InvalidRequestError):  # on a slow machine
            await bench.pool.prepare(ADA, [good], "messages", MOST_BYTES)
        await until(lambda: len(bench.children) == 1)
        (child,) = bench.children
        child.suspend()
        assert "takes longer than 0.5 s" in await bench.refusal(good.data)
        await until(lambda: not child.is_running())


# Speaks the protocol of a decoding process. The first image gets ANSWER, and later ones a refusal.
FAKE_CHILD = """
import json, pathlib, struct, sys
def write(part): sys.stdout.buffer.write(struct.pack(LENGTH, len(part)) + part); sys.stdout.buffer.flush()
def read(): return sys.stdin.buffer.read(struct.unpack(LENGTH, sys.stdin.buffer.read(struct.calcsize(LENGTH)))[0])
write(json.dumps({"is_filtered": True}).encode())
mark = pathlib.Path(MARK)
while True:
    read(), read()
    if mark.exists():
        write(json.dumps({"refusal": "is of the second process"}).encode()); write(b"")
        continue
    mark.touch()
    ANSWER
"""
# More than a pipe and its reader hold, and not all of it.
ENDLESS = """
    write(b"{}")
    sys.stdout.buffer.write(struct.pack(LENGTH, 1 << 24) + bytes(1 << 23))
    sys.stdout.buffer.flush()
    import time; time.sleep(600)
"""


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (ENDLESS, "takes longer than"),
        ('write(b"[" * 4000); write(b"")', "crashed"),
        ("write(b'{\"grid\": [1, 1e999, 2]}'); write(b'')", "crashed"),
        ("write(b'{\"grid\": [1, 2000000000, 2000000000]}'); write(b'')", "crashed"),
        ("write(b'{\"grid\": [1, -2, -2]}'); write(b'')", "crashed"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGXCPU)", "takes more than 20 s of a processor"),
    ],
    ids=["endless", "nested", "infinite", "large", "negative", "ended", "out of time"],
)
async def test_a_process_that_ends_or_answers_nonsense_fails_its_image_only(
    answer: str, words: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = FAKE_CHILD.replace("ANSWER", answer).replace("MARK", repr(str(tmp_path / "mark")))
    monkeypatch.setattr(
        decoding_process, "COMMAND", (sys.executable, "-c", program.replace("LENGTH", repr(LENGTH.format)))
    )
    bench = Bench(directory, timeout_s=1.0 if answer == ENDLESS else 60.0)
    async with running(bench):
        assert words in await bench.refusal(file_of(picture(30, 30)))
        assert "is of the second process" in await bench.refusal(file_of(picture(30, 30)))


async def test_an_error_of_the_decoding_process_is_no_fault_of_the_image(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = "write(b'{\"failure\": \"TypeError: no such thing\"}'); write(b'')"
    program = FAKE_CHILD.replace("ANSWER", answer).replace("MARK", repr(str(tmp_path / "mark")))
    monkeypatch.setattr(
        decoding_process, "COMMAND", (sys.executable, "-c", program.replace("LENGTH", repr(LENGTH.format)))
    )
    bench, file = Bench(directory), ImageFile(file_of(picture(30, 30)))
    async with running(bench):
        with capture_logs() as logged, pytest.raises(PandoError) as caught:
            await bench.pool.prepare(ADA, [file, file], "messages", MOST_BYTES)
        assert (caught.value.code, caught.value.param) == (ErrorCode.INTERNAL, None)
        assert str(caught.value).startswith("Image 1 of 2 could not be decoded because of an error of this server")
        assert "is of the second process" in await bench.refusal(file.data)
    failures = [entry for entry in logged if entry["event"] == "images.failed"]
    assert [entry["reason"] for entry in failures] == ["TypeError: no such thing"]


async def test_an_error_outside_of_the_decoding_process_is_no_fault_of_the_image_and_ends_no_pool(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ImageFile(file_of(picture(30, 30)))
    with monkeypatch.context() as patched:
        patched.setattr(pool, "_prepared", lambda *_: [][0])
        with pytest.raises(PandoError) as caught:
            await bench.pool.prepare(ADA, [file], "messages", MOST_BYTES)
    assert caught.value.code is ErrorCode.INTERNAL
    assert len((await bench.pool.prepare(ADA, [file], "messages", MOST_BYTES)).images) == 1


# Notes each file, and answers those that begin with "held" only once MARK exists.
NOTING_CHILD = """
import json, pathlib, struct, sys, time
def write(part): sys.stdout.buffer.write(struct.pack(LENGTH, len(part)) + part); sys.stdout.buffer.flush()
def read(): return sys.stdin.buffer.read(struct.unpack(LENGTH, sys.stdin.buffer.read(struct.calcsize(LENGTH)))[0])
write(json.dumps({"is_filtered": True}).encode())
mark, notes = pathlib.Path(MARK), pathlib.Path(MARK + ".notes")
while True:
    detail, file = read(), read().decode()
    with notes.open("a") as stream:
        stream.write(file + "\\n")
    while file.startswith("held") and not mark.exists():
        time.sleep(0.01)
    write(json.dumps({"refusal": "is " + file}).encode()); write(b"")
"""
BOB, RIVAL = Subject("acme", "bob"), Subject("rival", "r")


class NotedBench(Bench):
    """A pool whose processes note their files, and hold some of them back."""

    def __init__(self, directory: Path, processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(directory, processes=processes)
        self.mark = directory / "mark"
        program = NOTING_CHILD.replace("LENGTH", repr(LENGTH.format)).replace("MARK", repr(str(self.mark)))
        monkeypatch.setattr(decoding_process, "COMMAND", (sys.executable, "-c", program))

    @property
    def noted(self) -> list[str]:
        notes = self.mark.with_name("mark.notes")
        return notes.read_text().splitlines() if notes.exists() else []

    def send(self, subject: Subject, *files: str) -> asyncio.Task[str]:
        """Return a task for the refusal of the first file."""

        async def refused() -> str:
            with pytest.raises(InvalidRequestError) as caught:
                await self.pool.prepare(subject, [ImageFile(name.encode()) for name in files], "messages", MOST_BYTES)
            return str(caught.value)

        return asyncio.create_task(refused())


async def test_images_of_one_user_leave_a_process_to_others(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = NotedBench(directory, 2, monkeypatch)
    async with running(bench):
        slow = [bench.send(ADA, f"held {number}") for number in range(3)]
        await until(lambda: bench.noted == ["held 0"])
        assert "is quick" in await bench.send(BOB, "quick")
        assert "is quick too" in await bench.send(RIVAL, "quick too")
        assert bench.noted == ["held 0", "quick", "quick too"]
        bench.mark.touch()
        await asyncio.gather(*slow)


async def test_users_of_one_tenant_leave_a_process_to_other_tenants(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = NotedBench(directory, 2, monkeypatch)
    async with running(bench):
        assert "is first" in await bench.send(RIVAL, "first")
        slow = [bench.send(ADA, "held 0")]
        await until(lambda: "held 0" in bench.noted)
        slow.append(bench.send(BOB, "held 1"))
        assert "is quick" in await bench.send(RIVAL, "quick")
        assert bench.noted == ["first", "held 0", "quick"]
        bench.mark.touch()
        await asyncio.gather(*slow)


async def test_users_of_one_tenant_have_all_processes_while_there_are_no_others(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = NotedBench(directory, 2, monkeypatch)
    async with running(bench):
        slow = [bench.send(ADA, "held 0"), bench.send(BOB, "held 1")]
        await until(lambda: sorted(bench.noted) == ["held 0", "held 1"])
        bench.mark.touch()
        await asyncio.gather(*slow)
        bench.mark.unlink()
        assert "is last" in await bench.send(RIVAL, "last")
        monkeypatch.setattr(pool, "PRESENCE_S", 0.0)
        slow = [bench.send(ADA, "held 2"), bench.send(BOB, "held 3")]
        await until(lambda: {"held 2", "held 3"} <= set(bench.noted))
        bench.mark.touch()
        await asyncio.gather(*slow)


async def test_images_of_cancelled_requests_are_not_decoded(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = NotedBench(directory, 1, monkeypatch)
    async with running(bench):
        first = bench.send(ADA, "held")
        await until(lambda: bench.noted == ["held"])
        waiting = bench.send(BOB, "one", "two")
        await asyncio.sleep(0)
        waiting.cancel()
        # The one that is being decoded may end soon; its process is free afterwards.
        first.cancel()
        last = bench.send(BOB, "three")
        bench.mark.touch()
        assert "is three" in await last
    assert bench.noted == ["held", "three"]


async def test_a_process_is_replaced_if_its_image_is_cancelled_and_takes_long(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = NotedBench(directory, 1, monkeypatch)
    async with running(bench):
        first = bench.send(ADA, "held")
        await until(lambda: bench.noted == ["held"])
        first.cancel()
        async with asyncio.timeout(30):  # half of what an image may take here
            assert "is next" in await bench.send(ADA, "next")
    assert bench.noted == ["held", "next"]


async def test_images_that_take_long_are_charged_to_their_subject(directory: Path) -> None:
    bench = Bench(directory, processes=1)
    names = asyncio.gather(
        *(
            bench.pool.prepare(subject, [ImageFile(b"12345678")], "messages", MOST_BYTES)
            for subject in (ADA, ADA, ADA, RIVAL, RIVAL, RIVAL)
        )
    )
    await asyncio.sleep(0)
    taken = []
    for seconds in (2.0, 0.0, 0.0, 0.0, 0.0, 0.0):
        job = await bench.pool._next()
        taken.append(job.subject)
        bench.pool._end(job, seconds)
    assert taken == [ADA, RIVAL, RIVAL, RIVAL, ADA, ADA]
    names.cancel()


async def test_images_that_fit_into_no_message_are_refused(bench: Bench) -> None:
    file = ImageFile(file_of(picture(100, 100)))
    (image,) = (await bench.pool.prepare(ADA, [file], "messages", MOST_BYTES)).images
    most = 2 * image.pixels.nbytes
    assert len((await bench.pool.prepare(ADA, [file] * 2, "messages", most)).images) == 2
    with pytest.raises(InvalidRequestError, match="Send fewer or smaller images"):
        await bench.pool.prepare(ADA, [file] * 5, "messages", most)


async def test_files_that_wait_have_a_bound(bench: Bench) -> None:
    large = ImageFile(bytes(WAITING_PIECES * 64 * 1024 + 1))
    with pytest.raises(QueueFullError, match="waiting for their images"):
        await bench.pool.prepare(ADA, [large], "messages", MOST_BYTES)


@pytest.mark.parametrize(
    ("processors", "memory_gib", "processes"),
    [(1, 64, 2), (4, 64, 2), (6, 64, 3), (16, 64, 8), (96, 64, 8), (16, 3, 2), (16, 8, 5)],
)
def test_by_default_there_are_as_many_processes_as_the_host_has_room_for(
    processors: int, memory_gib: int, processes: int
) -> None:
    assert usual_processes(processors, memory_gib * 2**30, 768 * 2**20) == processes


async def test_processes_end_with_the_pool(directory: Path) -> None:
    bench = Bench(directory, processes=2)
    async with running(bench):
        await until(lambda: len(bench.children) == 2)
    assert bench.children == []


PROBE = """
import ctypes, os, resource, socket, sys, time
from services.tokenizer.images.confinement import allow_time, confine
is_filtered = confine(64 * 1024 * 1024)
attempts = {
    "open": lambda: open("/etc/hostname"), "create": lambda: open("/tmp/written", "w"), "socket": socket.socket,
    "fork": os.fork, "execute": lambda: os.execv("/bin/true", ["true"]), "signal": lambda: os.kill(os.getppid(), 0),
    "memory": lambda: bytearray(128 * 1024 * 1024), "list": lambda: os.listdir("/"),
    "limits": lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CORE),
}
refused = []
for name, attempt in attempts.items():
    try:
        attempt()
    except (OSError, MemoryError):
        refused.append(name)
print(is_filtered, sorted(refused) == sorted(attempts), flush=True)
"""


def test_a_confined_process_reaches_nothing() -> None:
    answer = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, cwd=os.getcwd())
    filtered, refused = answer.stdout.split()
    assert refused == "True"
    if filtered == "False":
        pytest.skip("the kernel has no filters of system calls; the limits of resources refused all the same")
