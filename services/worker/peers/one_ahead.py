"""Having the next part of something come while the one before is used."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

T = TypeVar("T")


async def one_ahead(parts: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Yield `parts`, the next of which is under way meanwhile; closes them when it is closed."""
    coming = asyncio.ensure_future(anext(parts))
    try:
        while True:
            try:
                part = await coming
            except StopAsyncIteration:
                return
            coming = asyncio.ensure_future(anext(parts))
            yield part
    finally:
        coming.cancel()
        await asyncio.wait([coming])
        if not coming.cancelled():
            coming.exception()  # read here: it is of a part that is not used any more
        await parts.aclose()
