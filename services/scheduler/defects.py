"""Unexpected exceptions: those of a desk's own work end that work, those within the core end the service."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

from common.errors import BrokenStateError, ConfigurationError, PandoError
from common.logs import get_logger
from services.scheduler import metrics

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from typing import NoReturn

# Pause before work that has failed begins again; it doubles while the work fails at once.
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0


@contextmanager
def changing_state() -> Iterator[None]:
    """Change the core or the cache, which other requests need; PandoErrors are refusals, and leave them as they were.

    Raises:
        BrokenStateError: another exception has interrupted the change.
    """
    try:
        yield
    except (PandoError, BrokenStateError):
        raise
    except Exception as error:
        raise BrokenStateError("a change of the scheduler's state was interrupted") from error


class BrokenStates:
    """Has a change that was interrupted end the service, wherever it was made: within a call of a peer, or a task."""

    def __init__(self) -> None:
        self._errors: asyncio.Queue[BrokenStateError] = asyncio.Queue()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change the core or the cache as within `changing_state`; `watch` raises the error, too."""
        try:
            with changing_state():
                yield
        except BrokenStateError as error:
            self._errors.put_nowait(error)
            raise

    async def watch(self) -> NoReturn:
        """Raise the first error.

        Raises:
            BrokenStateError: a change was interrupted.
        """
        raise await self._errors.get()


def note_defect(part: str) -> None:
    """Log the current exception with its traceback, and count it."""
    metrics.DEFECTS_TOTAL.labels(part).inc()
    get_logger("defects").exception("scheduler.defect", part=part)


async def begin_again(part: str, work: Callable[[], Awaitable[None]]) -> None:
    """Do the work of one part of the scheduler, from its beginning again after exceptions that nothing expects.

    Raises:
        ConfigurationError: the work cannot be done with these settings.
        BrokenStateError: it has left the core or the cache half changed.
    """
    loop, pause_s = asyncio.get_running_loop(), FIRST_PAUSE_S
    while True:
        began_at = loop.time()
        try:
            return await work()
        except (ConfigurationError, BrokenStateError):
            raise
        except Exception:  # noqa: BLE001  (one part of the work must not end that of all requests)
            note_defect(part)
        if loop.time() - began_at > MAX_PAUSE_S:
            pause_s = FIRST_PAUSE_S
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)
