"""The recording of what a rank computes: at most one at a time, for a limited time, into a limited directory."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from common.errors import InvalidRequestError
from common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

T = TypeVar("T")

SUFFIX = ".json.gz"


class ProfileRecorder(Protocol):
    """Records what happens in the thread that it is started in, and on its device."""

    def start(self) -> None:
        """Begin; in the engine's thread."""

    def stop(self) -> None:
        """End; in the engine's thread."""

    def write(self, path: Path) -> None:
        """Write what was recorded as a trace in Chrome's format; in any thread."""

    def span(self, name: str) -> AbstractContextManager[object]:
        """Return a context that marks a span of time in the trace; for the engine's thread."""


@dataclass(frozen=True, slots=True)
class ProfileRules:
    """Where traces go (None: nowhere, so there are none), and how large they may become.

    A recording ends by itself after `max_seconds` or `max_passes` forward passes, whichever comes first. None begins
    when the traces in `directory` take `max_bytes` or more.
    """

    directory: Path | None = None
    max_seconds: float = 60.0
    max_passes: int = 1000
    max_bytes: int = 2**30


@dataclass(frozen=True, slots=True)
class Profile:
    """A recording: where it is or will be, how long it may take, and when it has ended what it holds."""

    path: Path
    max_seconds: float
    passes: int = 0
    bytes: int = 0


class ProfileRefusedError(InvalidRequestError):
    """A recording cannot begin or end now."""


class Profiles:
    """Owns the recording. Methods belong to the event loop unless they say otherwise."""

    def __init__(
        self,
        rules: ProfileRules,
        make_recorder: Callable[[], ProfileRecorder],
        run: Callable[[Callable[[], None]], Awaitable[None]],
    ) -> None:
        """Keep to `rules`; `run` has the engine's thread run something, and waits for it.

        `make_recorder` is called in the engine's thread, as it may have to load a library.
        """
        self._rules = rules
        self._make_recorder = make_recorder
        self._run = run
        self._loop = asyncio.get_running_loop()
        self._current: Profile | None = None
        # Ended by itself, and not asked for yet.
        self._ended: Profile | None = None
        self._recorder: ProfileRecorder | None = None
        self._passes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[Profile] | None = None
        self._log = get_logger("profiles")

    async def start(self, name: str, max_seconds: float = 0.0) -> Profile:
        """Begin to record; `name` becomes part of the file's.

        Raises:
            ProfileRefusedError: there is a recording already, or no room for one.
        """
        directory = self._check_room()
        seconds = min(max_seconds or self._rules.max_seconds, self._rules.max_seconds)
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        number = 1 + sum(1 for _ in directory.glob(f"profile-{moment}-{name}-*{SUFFIX}"))
        self._current = profile = Profile(directory / f"profile-{moment}-{name}-{number}{SUFFIX}", seconds)
        self._passes, self._ended = 0, None
        try:
            await self._run(self._begin)
        except Exception:
            self._current = None
            raise
        self._timer = self._loop.call_later(seconds, self._end_by_itself)
        self._log.info("profile.started", path=str(profile.path), max_seconds=seconds)
        return profile

    async def stop(self) -> Profile:
        """End the recording, write it, and say where it is; also of one that has ended by itself, once.

        Raises:
            ProfileRefusedError: there is none.
        """
        if self._ending is not None:
            return await asyncio.shield(self._ending)
        if self._current is None:
            ended, self._ended = self._ended, None
            if ended is None:
                raise ProfileRefusedError("no profile is being recorded: start one first")
            return ended
        profile = await asyncio.shield(self._end())
        self._ended = None
        return profile

    def note_pass(self) -> None:
        """Count a forward pass; in the engine's thread."""
        if self._recorder is None:
            return
        self._passes += 1
        if self._passes == self._rules.max_passes:
            self._loop.call_soon_threadsafe(self._end_by_itself)

    def span(self, name: str) -> AbstractContextManager[object]:
        """Return a context that marks a span of time in the recording, if there is one; for the engine's thread."""
        return contextlib.nullcontext() if self._recorder is None else self._recorder.span(name)

    def _check_room(self) -> Path:
        rules = self._rules
        if rules.directory is None:
            raise ProfileRefusedError("this worker records no profiles: set worker.profile.directory")
        if self._current is not None:
            raise ProfileRefusedError(f"a profile is being recorded already, to {self._current.path}")
        rules.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        taken = sum(file.stat().st_size for file in rules.directory.glob(f"*{SUFFIX}"))
        if taken >= rules.max_bytes:
            raise ProfileRefusedError(
                f"the profiles in {rules.directory} take {taken >> 20} MiB of the {rules.max_bytes >> 20} that they "
                "may: remove some"
            )
        return rules.directory

    def _begin(self) -> None:
        recorder = self._make_recorder()
        recorder.start()
        self._recorder = recorder

    def _end_by_itself(self) -> None:
        if self._current is not None and self._ending is None:
            self._log.info("profile.limit_reached", passes=self._passes)
            self._end()

    def _end(self) -> asyncio.Task[Profile]:
        assert self._current is not None, "there is a recording"
        self._ending = asyncio.create_task(self._finish(self._current))
        return self._ending

    async def _finish(self, profile: Profile) -> Profile:
        recorder, passes = self._recorder, self._passes
        assert recorder is not None, "it has begun"
        if self._timer is not None:
            self._timer.cancel()

        def halt() -> None:
            self._recorder = None
            recorder.stop()

        try:
            await self._run(halt)
            # Compressing takes seconds, in which plans go on.
            await asyncio.to_thread(recorder.write, profile.path)
            written = Profile(profile.path, profile.max_seconds, passes, profile.path.stat().st_size)
        finally:
            self._recorder = self._current = self._ending = None
        self._ended = written
        self._log.info("profile.written", path=str(written.path), passes=passes, bytes=written.bytes)
        return written
