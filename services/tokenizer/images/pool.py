"""The processes that decode images, shared fairly between tenants and subjects."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from common.errors import InvalidRequestError, PandoError, UnavailableError
from common.logs import get_logger
from common.recent_images import EXPIRY_S, NOT_KEPT, key_of
from common.room import SharedRoom
from services.tokenizer import metrics
from services.tokenizer.encoding_pool import FairQueue
from services.tokenizer.images.decoding_process import ABANDONED_S, DecodingProcess
from services.tokenizer.images.faults import described
from services.tokenizer.images.processor import PreparedImage, RefusedImageError, prepared, prepared_video
from services.tokenizer.images.sampling import MAX_FRAMES, MAX_SECONDS, Footage, FrameTimes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from common.recent_images import RecentImages
    from common.requests import ImageFile
    from common.types import Subject, View
    from services.tokenizer.images.child import ChildLimits
    from services.tokenizer.images.processor import Grid, ImageProcessor, JsonObject

# Pause after a process that did not start.
RETRY_S = 1.0
RETRY_AFTER_MS = 1000
# The room for files that wait, in pieces of this many bytes.
PIECE_BYTES = 64 * 1024
WAITING_PIECES = 8192
# The cost of an image in addition to its file's bytes.
IMAGE_COST = 65_536
# The cost of a second of decoding, charged as far as it exceeds the above: small files may take long.
SECOND_COST = 16 * 1024 * 1024
# Of replacing a process, in seconds of decoding.
REPLACEMENT_S = 0.5
# For how long a tenant that has sent an image is expected to send another one.
PRESENCE_S = 300.0
# Of processes, where their number is not configured: one user cannot use the last one.
FEWEST_PROCESSES, MOST_PROCESSES = 2, 8
CRASHED = "cannot be decoded: its decoder crashed, or took more memory than allowed"
FAILED = "could not be decoded because of an error of this server, which was logged"


@dataclass(slots=True, eq=False)
class _Job:
    """An image, and the event loop's future for its result.

    A refusal or failure is a result, too: as the future's exception, it would keep the file until a search for cycles,
    as its traceback refers to the code that awaits the job.
    """

    subject: Subject
    file: ImageFile
    result: asyncio.Future[PreparedImage | PandoError]

    @property
    def cost(self) -> int:
        """The charge to its subject before it is decoded."""
        return self.file.size + IMAGE_COST


@dataclass(frozen=True, slots=True)
class PreparedImages:
    """The images of a request, as the model takes them."""

    images: list[PreparedImage]
    # Whether the next requests of the view may name all of them by their keys alone.
    are_kept: bool


class MissingImageError(UnavailableError):
    """An image that is named by its key alone is not kept for the view; it has to be sent."""


class ImagePool:
    """Prepares images in `processes` confined processes, each of which is replaced when it ends.

    Tenants share the processes, and in each tenant its subjects, by bytes of files and by the time that decoding takes
    (`FairQueue`). A subject that has an image decoded gets another process only while one is left for others, so with
    two processes or more the images of one subject, which may take `timeout_s` each, stop no other's. The same holds
    for all subjects of a tenant while other tenants send images.
    """

    def __init__(
        self, directory: Path, processor: ImageProcessor, limits: ChildLimits, processes: int, timeout_s: float,
        recent: RecentImages[PreparedImage],
    ) -> None:  # fmt: skip
        """Cut images for the model in `directory`, whose processor is `processor`; an image may take `timeout_s`."""
        self._arguments = (
            str(directory), str(limits.max_pixels), str(limits.max_frames), str(limits.memory_bytes),
            str(limits.cpu_seconds),
        )  # fmt: skip
        self._processor = processor
        self._cpu_seconds = limits.cpu_seconds
        self._max_values = limits.memory_bytes
        self._max_frames = limits.max_frames
        self._processes = processes
        self._timeout_s = timeout_s
        self._recent = recent
        self._queue: FairQueue[_Job] = FairQueue()
        # Images that are decoded now, those of cancelled requests included.
        self._running: Counter[Subject] = Counter()
        # When tenants have last sent an image, or had one decoded.
        self._seen: dict[str, float] = {}
        # Set when a job may have become able to start.
        self._changed = asyncio.Event()
        self._room = SharedRoom(WAITING_PIECES, "waiting for their images", RETRY_AFTER_MS)
        self._log = get_logger("images")

    async def run(self) -> NoReturn:
        """Decode images until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._expire())
            for _ in range(self._processes):
                tasks.create_task(self._work())
        raise AssertionError("processes decode until they are cancelled")

    async def prepare(
        self, subject: Subject, files: Sequence[ImageFile], param: str, max_bytes: int, view: View | None = None
    ) -> PreparedImages:
        """Return images as the model takes them. Those that follow a refused one are not decoded.

        Those that a request of the same `view` has sent before are not decoded again, and new ones are kept for it;
        None: neither.

        Raises:
            MissingImageError: an image has nothing but its key, and is not kept for `view`.
            InvalidRequestError: an image is refused, and the text says which one and why; or the pixels of all take
                more than `max_bytes`.
            QueueFullError: too many images are waiting.
        """
        # Hashing megabytes would delay the event loop, and the images of a request one after the other its answer.
        keys = await asyncio.gather(*map(_key_of, files)) if view else []
        found = [self._recent.get(view, key) for key in keys] if view else [None] * len(files)
        if any(file.is_bare and image is None for file, image in zip(files, found, strict=True)):
            raise MissingImageError(NOT_KEPT, retry_after_ms=0)
        pieces = sum(-(-file.size // PIECE_BYTES) for file, image in zip(files, found, strict=True) if image is None)
        self._room.take(subject, pieces)
        started = time.perf_counter()
        loop = asyncio.get_running_loop()
        wanted = [
            _Job(subject, file, loop.create_future()) if image is None else image
            for file, image in zip(files, found, strict=True)
        ]
        jobs = [each for each in wanted if isinstance(each, _Job)]
        metrics.IMAGES_TOTAL.labels("kept").inc(len(wanted) - len(jobs))
        try:
            if jobs:
                self._seen[subject.tenant] = time.monotonic()
            for job in jobs:
                self._queue.add(subject, job, job.cost)
            self._changed.set()
            images = await self._gathered(wanted, param, max_bytes)
        finally:
            for job in jobs:
                self._queue.remove(subject, job)
                job.result.cancel()
            self._room.give_back(subject, pieces)
        if view:
            for key, image in zip(keys, images, strict=True):
                self._recent.put(view, key, image)
        metrics.IMAGE_SECONDS.observe(time.perf_counter() - started)
        # Of many images, the last ones may have taken the place of the first.
        return PreparedImages(images, view is not None and all(self._recent.has(view, key) for key in keys))

    async def _gathered(
        self, wanted: Sequence[_Job | PreparedImage], param: str, max_bytes: int
    ) -> list[PreparedImage]:
        images: list[PreparedImage] = []
        size = 0
        for number, each in enumerate(wanted, 1):
            image = await each.result if isinstance(each, _Job) else each
            if isinstance(each, _Job) and isinstance(image, PandoError):
                kind = "video" if each.file.is_video else "image"
                which = f"The {kind}" if len(wanted) == 1 else f"{kind.capitalize()} {number} of {len(wanted)}"
                is_refused = isinstance(image, InvalidRequestError)
                raise type(image)(f"{which} {image}.", param=param if is_refused else None)
            assert not isinstance(image, PandoError)
            size += image.pixels.nbytes
            if size > max_bytes:
                message = (
                    f"The images take more than the {max_bytes} bytes that are allowed at the model's resolution: the "
                    f"first {number} of {len(wanted)} take {size}. Send fewer or smaller images, or with the detail "
                    "low."
                )
                raise InvalidRequestError(message, param=param)
            images.append(image)
        return images

    async def _expire(self) -> NoReturn:
        while True:
            await asyncio.sleep(EXPIRY_S)
            self._recent.expire()
            now = time.monotonic()
            self._seen = {tenant: seen for tenant, seen in self._seen.items() if now - seen < PRESENCE_S}

    async def _work(self) -> NoReturn:
        process: DecodingProcess | None = None
        try:
            while True:
                if process is None:
                    process = await self._started()
                job = await self._next()
                started, is_usable = time.perf_counter(), False
                try:
                    if process.has_ended:
                        # Not by this image.
                        await process.kill()
                        process = await self._started()
                    is_usable = await self._serve(process, job)
                finally:
                    self._end(job, time.perf_counter() - started + (0.0 if is_usable else REPLACEMENT_S))
                if not is_usable:
                    # Once, also if this is cancelled meanwhile.
                    ended, process = process, None
                    await ended.kill()
        finally:
            if process is not None:
                await process.kill()

    async def _next(self) -> _Job:
        """Wait for an image that may start, and count it as running."""
        while (job := self._queue.take(self._may_start)) is None:
            self._changed.clear()
            await self._changed.wait()
        self._running[job.subject] += 1
        return job

    def _may_start(self, job: _Job) -> bool:
        """Whether a process is left for others then, or the last one may go to this subject."""
        tenant = job.subject.tenant
        if self._processes - self._running.total() > 1 or all(each.tenant != tenant for each in self._running):
            return True
        return job.subject not in self._running and not self._has_others(tenant)

    def _has_others(self, tenant: str) -> bool:
        """Whether other tenants are expected to send images."""
        now = time.monotonic()
        return any(other != tenant and now - seen < PRESENCE_S for other, seen in self._seen.items())

    def _end(self, job: _Job, seconds: float) -> None:
        """Count an image as running no longer, and charge the time that its process took for it."""
        self._running[job.subject] -= 1
        if not self._running[job.subject]:
            del self._running[job.subject]
        self._queue.charge(job.subject, max(0.0, seconds * SECOND_COST - job.cost))
        self._seen[job.subject.tenant] = time.monotonic()
        self._changed.set()

    async def _started(self) -> DecodingProcess:
        while True:
            try:
                process = await DecodingProcess.start(self._arguments)
            except (OSError, TimeoutError, ValueError, EOFError) as error:
                self._log.error("images.process_failed", reason=str(error) or type(error).__name__)
                await asyncio.sleep(RETRY_S)
                continue
            if not process.is_filtered:
                self._log.warning("images.calls_not_filtered", pid=process.pid)
            return process

    async def _serve(self, process: DecodingProcess, job: _Job) -> bool:
        """Decode an image; return whether the process can decode another one."""
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                with _hurried(deadline, job.result):
                    answer, values = await process.decode(job.file, self._max_values)
        except TimeoutError:
            outcome = "abandoned" if job.result.cancelled() else "timeout"
            return self._refuse(job, f"takes longer than {self._timeout_s:g} s to decode", outcome)
        except (OSError, EOFError):
            return await self._refuse_ended(process, job)
        except (ValueError, RecursionError):
            return self._refuse(job, CRASHED, "crash")
        except asyncio.CancelledError:
            self._answer(job, UnavailableError("the tokenizer is stopping", retry_after_ms=RETRY_AFTER_MS))
            raise
        return await self._take(job, answer, values)

    async def _take(self, job: _Job, answer: JsonObject, values: bytes) -> bool:
        """Answer an image as its process has done; return whether the process can decode another one."""
        if isinstance(answer.get("refusal"), str):
            self._refuse(job, answer["refusal"], "refused")
            return True
        if isinstance(answer.get("failure"), str):
            # Replaced, as nothing is known of its state.
            return self._fail(job, answer["failure"])
        try:
            grid = tuple(map(int, answer["grid"]))
            times = self._times(job.file, answer)
            # Packing and hashing megabytes would delay the event loop.
            image = await asyncio.to_thread(_prepared, self._processor, grid, values, times)
        except RefusedImageError as error:
            self._refuse(job, str(error), "refused")
            return True
        except (KeyError, TypeError, ValueError, OverflowError):
            return self._refuse(job, CRASHED, "crash")
        except Exception as error:  # noqa: BLE001  (others' images go on)
            return self._fail(job, described(error))
        metrics.IMAGES_TOTAL.labels("prepared").inc()
        self._answer(job, image)
        return True

    def _times(self, file: ImageFile, answer: JsonObject) -> FrameTimes | None:
        """Return the times of a video's frames; None: it is an image.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: the answer is malformed.
        """
        if not file.is_video:
            return None
        if self._processor.video is None:
            raise ValueError("a video for a model that takes none")
        sampling = self._processor.video.sampling
        if not file.is_video_file:
            return FrameTimes.even(len(file.frames), file.frames_per_second or sampling.rate)
        footage = Footage(int(answer["frames"]), float(answer["rate"]))
        # The rate of two frames may be that of two and a half.
        if not (1 <= footage.frames <= MAX_FRAMES and 0.5 / MAX_SECONDS <= footage.rate < math.inf):
            raise ValueError(f"{footage}")
        return FrameTimes.chosen(footage, sampling.choose(footage, file.frames_per_second, self._max_frames))

    async def _refuse_ended(self, process: DecodingProcess, job: _Job) -> bool:
        """Refuse an image during which its process has ended; return False."""
        status = None
        try:
            status = await process.exit_status()
        finally:
            if status == -signal.SIGXCPU:
                self._refuse(job, f"takes more than {self._cpu_seconds:g} s of a processor to decode", "timeout")
            else:
                self._refuse(job, CRASHED, "crash")
        return False

    def _refuse(self, job: _Job, problem: str, outcome: str) -> bool:
        if outcome != "refused":
            self._log.warning("images.process_replaced", outcome=outcome, bytes=job.file.size)
        metrics.IMAGES_TOTAL.labels(outcome).inc()
        self._answer(job, InvalidRequestError(problem))
        return False

    def _fail(self, job: _Job, reason: str) -> bool:
        """Answer an image for which its process, or this one, has failed by an error of its own."""
        self._log.error("images.failed", reason=reason, bytes=job.file.size, is_video=job.file.is_video)
        metrics.IMAGES_TOTAL.labels("failed").inc()
        self._answer(job, PandoError(FAILED))
        return False

    def _answer(self, job: _Job, result: PreparedImage | PandoError) -> None:
        if job.result.done():
            return
        if isinstance(result, UnavailableError):
            job.result.set_exception(result)
        else:
            job.result.set_result(result)


def usual_processes(processors: int, memory_bytes: int, limit_bytes: int) -> int:
    """Return the default number of processes that decode images.

    Half of the `processors` are left to other work, and half of `memory_bytes`, those that are free; each process may
    take `limit_bytes`.
    """
    room = min(MOST_PROCESSES, processors // 2, memory_bytes // 2 // limit_bytes)
    return max(FEWEST_PROCESSES, room)


@contextlib.contextmanager
def _hurried(deadline: asyncio.Timeout, result: asyncio.Future[Any]) -> Iterator[None]:
    """Bring `deadline` forward to `ABANDONED_S` from when `result` is cancelled."""
    is_over = False

    def hurry(result: asyncio.Future[Any]) -> None:
        soon, limit = asyncio.get_running_loop().time() + ABANDONED_S, deadline.when()
        # The loop may call this after the end, and a deadline that has passed cannot be changed.
        if result.cancelled() and not is_over and not deadline.expired() and (limit is None or soon < limit):
            deadline.reschedule(soon)

    result.add_done_callback(hurry)
    try:
        yield
    finally:
        is_over = True
        result.remove_done_callback(hurry)


async def _key_of(file: ImageFile) -> bytes:
    return file.key if file.is_bare else await asyncio.to_thread(key_of, file)


def _prepared(processor: ImageProcessor, grid: Grid, values: bytes, times: FrameTimes | None) -> PreparedImage:
    return prepared(processor, grid, values) if times is None else prepared_video(processor, grid, values, times)
