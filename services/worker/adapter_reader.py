"""Reads adapters into host memory while plans run, and keeps the names that a scheduler has given them."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from common.errors import ConfigurationError, InvalidRequestError
from common.models.adapters import resolve_adapter

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.adapters import AdapterInfo
    from services.worker.engine.execution.interface import AdapterSize, AdapterStore

_THREADS = 8


class AdapterReader:
    """Fills a rank's store of adapters, on behalf of the scheduler; belongs to the event loop."""

    def __init__(self, store: Callable[[], AdapterStore | None]) -> None:
        """Read for the store that the loaded model has, None if it serves no adapters."""
        self.named: list[AdapterInfo] = []
        """As the scheduler has named them last, also before the model was loaded again."""
        self._store = store
        # Apart from other work in threads, which files on a slow disk must not hold up.
        self._threads = ThreadPoolExecutor(_THREADS, "adapters")

    @property
    def digests(self) -> list[str]:
        """Digests of the adapters in memory."""
        store = self._store()
        return [] if store is None else [*store.kept]

    async def read(self, adapter: AdapterInfo) -> AdapterInfo:
        """Have an adapter in host memory; return it with its digest, rank and bytes.

        It is not kept if the caller is cancelled, who would not know that it is there.

        Raises:
            InvalidRequestError: it cannot be read or does not fit the model, or the model has no slots for adapters.
        """
        store = self._store()
        if store is None:
            raise InvalidRequestError(
                "this model serves no adapters: set scheduler.adapters.slots, and serve a decoder that Pando implements"
            )
        size = store.kept.get(adapter.digest)
        if size is None:
            size = await self._read(store, adapter)
            store.keep(size)
        return replace(adapter, digest=size.digest, rank=size.rank, bytes=size.bytes)

    def drop(self, digest: str) -> None:
        """Free the memory of an adapter."""
        store = self._store()
        if store is not None:
            store.drop(digest)

    async def _read(self, store: AdapterStore, adapter: AdapterInfo) -> AdapterSize:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, _read, store, adapter)
        except ConfigurationError as error:
            raise InvalidRequestError(str(error), param="lora_path") from error


def _read(store: AdapterStore, adapter: AdapterInfo) -> AdapterSize:
    return store.read(resolve_adapter(adapter.source), adapter.digest)
