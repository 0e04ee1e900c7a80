"""Compile processes, some of them started ahead."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from common.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from common.grammars import Grammar
    from services.worker.engine.grammars.vocabulary_source import VocabularySource
    from services.worker.grammars.process import Verdict


class Compiles(Protocol):
    """What the pool and the desk need of `CompileProcess`."""

    source: VocabularySource

    @property
    def is_alive(self) -> bool:
        """Whether it can take a grammar."""

    async def compile(self, grammar: Grammar) -> Verdict:
        """Compile a grammar; killed if cancelled."""

    async def kill(self) -> None:
        """End the process."""


class ProcessPool:
    """Keeps at most one idle process: starting one takes longer than most grammars take."""

    def __init__(self, start: Callable[[VocabularySource], Awaitable[Compiles]]) -> None:
        """Get processes from `start`."""
        self._start = start
        self._idle: Compiles | None = None
        self._starting: asyncio.Task[None] | None = None

    async def take(self, source: VocabularySource) -> Compiles:
        """Return an idle process for a vocabulary, or a new one.

        Raises:
            UnavailableError: it does not start.
        """
        if self._starting is not None:
            await asyncio.wait({self._starting})
        idle, self._idle = self._idle, None
        if idle is not None:
            if idle.is_alive and idle.source == source:
                return idle
            await idle.kill()
        return await self._start(source)

    async def give_back(self, process: Compiles) -> None:
        """Keep a process for the next grammar, unless there is one or it has died."""
        if self._idle is None and process.is_alive:
            self._idle = process
        else:
            await process.kill()

    def start_ahead(self, source: VocabularySource) -> None:
        """Start a process beside those that work, so that the next grammar need not wait for it."""
        if self._idle is None and self._starting is None:
            self._starting = asyncio.create_task(self._add(source))

    async def close(self) -> None:
        """End the processes that do not work."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})
        if self._idle is not None:
            await self._idle.kill()

    async def _add(self, source: VocabularySource) -> None:
        try:
            process = await self._start(source)
        except UnavailableError:
            return  # logged; whoever needs one tries again
        finally:
            self._starting = None
        await self.give_back(process)
