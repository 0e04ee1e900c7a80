"""Levels and parts of sleep on the wire, as schedulers and workers read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import InvalidRequestError
from common.steps import SleepLevel, SleepPart

if TYPE_CHECKING:
    from collections.abc import Iterable


def sleep_level_from_wire(level: int) -> SleepLevel:
    """Decode a level.

    Raises:
        InvalidRequestError: there is no such level.
    """
    if level not in (*SleepLevel,):
        raise InvalidRequestError(f"level must be 1 or 2, not {level}", param="level")
    return SleepLevel(level)


def sleep_parts_from_wire(parts: Iterable[str]) -> tuple[SleepPart, ...]:
    """Decode the parts to restore; an empty list stands for all.

    Raises:
        InvalidRequestError: there is no such part.
    """
    found = dict.fromkeys(parts)
    for part in found:
        if part not in (*SleepPart,):
            raise InvalidRequestError(f"tags must be {' or '.join(SleepPart)}, not {part!r}", param="tags")
    return tuple(map(SleepPart, found)) or tuple(SleepPart)
