"""The adapters that requests may name: loaded at start or at run time, and again when workers have restarted."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from common.adapters import AdapterInfo, check_adapter_name
from common.errors import ConfigurationError, InvalidRequestError, PandoError, UnavailableError
from common.logs import get_logger
from common.types import ErrorCode
from services.scheduler.adapter_manifest import AdapterManifest
from services.scheduler.defects import changing_state

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from common.audit.log import Audit
    from common.settings import AdapterSettings
    from services.scheduler.core.core import SchedulerCore
    from services.scheduler.rank import RankConnection

# Bounds the memory and threads of the workers that reading takes when many adapters are loaded at start.
READS_AT_ONCE = 8

T = TypeVar("T")


class AdapterDesk:
    """Owns the names of adapters.

    The workers keep the adapters themselves in host memory, by their digests, and the list of names for a scheduler
    that has been restarted. An adapter that is replaced or unloaded stays there until the requests that use it have
    ended.
    """

    def __init__(
        self,
        settings: AdapterSettings,
        core: Callable[[], SchedulerCore | None],
        ranks: Callable[[], Sequence[RankConnection]],
        on_lost: Callable[[], None],
        audit: Audit,
    ) -> None:
        """Start with no names. `ranks` are those that are ready; `on_lost` is called when sequences were ended.

        Adapters that are loaded at the start or lost are recorded in `audit`.
        """
        self.pinned: set[str] = set()
        self._settings = settings
        self._core = core
        self._ranks = ranks
        self._on_lost = on_lost
        self._audit = audit
        self._manifest = AdapterManifest(settings.manifest)
        self._by_name: dict[str, AdapterInfo] = {}
        # Digests without a name that open requests may still use.
        self._retired: dict[str, AdapterInfo] = {}
        # Digests that workers may have read for nothing.
        self._unused: set[str] = set()
        self._has_begun = False
        # Whether workers may have another list of names than this.
        self._is_list_stale = False
        # One change at a time, as ranks must have the same adapters. Files are read before: that may take minutes.
        self._changing = asyncio.Lock()
        self._reading = asyncio.Semaphore(READS_AT_ONCE)
        self._log = get_logger("adapters")

    @property
    def all(self) -> list[AdapterInfo]:
        """All adapters, by name."""
        return [self._by_name[name] for name in sorted(self._by_name)]

    def find(self, name: str) -> str | None:
        """Return the digest of the adapter called `name`, None if there is none."""
        adapter = self._by_name.get(name)
        return None if adapter is None else adapter.digest

    async def restore(self, ranks: Sequence[RankConnection]) -> None:
        """Have configured ranks read all adapters: at first those of the settings, and those that were loaded before.

        Raises:
            ConfigurationError: an adapter of the settings cannot be loaded.
            UnavailableError: a rank is unreachable.
        """
        if not self._settings.slots:
            return
        async with self._changing:
            if not self._has_begun:
                await self._begin(ranks)
            known = (*self.all, *self._retired.values())
            read = await self._read_all(ranks, known)
            # Also by another name, whose files are still there.
            present = {made.digest for made in read if isinstance(made, AdapterInfo)}
            for adapter, made in zip(known, read, strict=True):
                if isinstance(made, InvalidRequestError) and adapter.digest not in present:
                    self._log.error("adapter.lost", name=adapter.name, reason=str(made))
                    self._lose(adapter)
            await _answered(asyncio.gather(*(self._reconcile(rank) for rank in ranks)))
            self._unused.clear()
            self._is_list_stale = False

    async def load(self, name: str, source: str, *, pinned: bool) -> AdapterInfo:
        """Make an adapter available under a name, in place of the one that has it; without `source`, change its pin.

        Raises:
            InvalidRequestError: it cannot be read, does not fit the model, or there would be too many.
            UnavailableError: the workers are not connected.
        """
        check_adapter_name(name)
        if not self._settings.slots:
            raise InvalidRequestError("this server serves no adapters; set scheduler.adapters.slots")
        if source:
            made = await self._load_files(AdapterInfo(name, source, pinned=pinned))
        else:
            async with self._changing:
                known = self._by_name.get(name)
                if known is None:
                    raise InvalidRequestError(f"the adapter '{name}' is not loaded", param="lora_name")
                made = replace(known, pinned=pinned)
                self._check_pins(made)
                await self._commit(made)
        self._log.info("adapter.loaded", name=name, digest=made.digest[:12], rank=made.rank, pinned=made.pinned)
        return made

    async def unload(self, name: str) -> bool:
        """Make an adapter unavailable; return whether there was one. Requests that use it continue.

        Raises:
            UnavailableError: the workers are not connected.
        """
        async with self._changing:
            adapter = self._by_name.get(name)
            if adapter is None:
                return False
            await self._announce([each for each in self.all if each.name != name])
            del self._by_name[name]
            self._retire(adapter)
            self._manifest.write(self.all)
        self._log.info("adapter.unloaded", name=name)
        return True

    async def tidy(self) -> None:
        """Free the memory of adapters that no request uses any more, and repeat to workers what they have missed."""
        core = self._core()
        has_work = self._retired or self._unused or self._is_list_stale
        if core is None or not has_work or self._changing.locked() or not self._ranks():
            return
        async with self._changing:
            if self._is_list_stale:
                with contextlib.suppress(PandoError):
                    await self._announce(self.all)
            for digest in [digest for digest in self._retired if not core.uses_adapter(digest)]:
                with changing_state():
                    del self._retired[digest]
                    core.adapters.drop(digest)
                self._unused.add(digest)
            # Reads that end meanwhile add to it, also what has a name.
            while self._unused:
                digest = self._unused.pop()
                if digest in self._used:
                    continue
                try:
                    await asyncio.gather(*(rank.drop_adapter(digest) for rank in self._ranks()))
                except PandoError as error:
                    self._log.warning("adapter.not_dropped", reason=str(error))
                    self._unused.add(digest)
                    break

    async def _begin(self, ranks: Sequence[RankConnection]) -> None:
        named, _ = await _answered(ranks[0].adapters())
        for adapter in named or self._manifest.read():
            self._put(adapter)
        given = self._settings.load.items()
        wanted = [AdapterInfo(name, source) for name, source in given if name not in self._by_name]
        for adapter, made in zip(wanted, await self._read_all(ranks, wanted), strict=True):
            if isinstance(made, InvalidRequestError):
                raise ConfigurationError(f"scheduler.adapters.load: {adapter.name}: {made}") from made
            self._put(made)
        for adapter in self.all:
            self._audit.note("adapter.loaded", {"name": adapter.name, "digest": adapter.digest, "cause": "start"})
        self._has_begun = True

    async def _read_all(
        self, ranks: Sequence[RankConnection], adapters: Sequence[AdapterInfo]
    ) -> list[AdapterInfo | InvalidRequestError]:
        """Have all ranks read adapters, some at a time; return for each what `_read` returns, or why it is refused.

        Raises:
            UnavailableError: a rank is unreachable.
        """
        places = asyncio.Semaphore(READS_AT_ONCE)

        async def read(adapter: AdapterInfo) -> AdapterInfo | InvalidRequestError:
            async with places:
                try:
                    check_adapter_name(adapter.name)
                    return await self._read(ranks, adapter)
                except InvalidRequestError as error:
                    return error

        try:
            async with asyncio.TaskGroup() as tasks:
                reads = [tasks.create_task(read(adapter)) for adapter in adapters]
        except* UnavailableError as errors:
            raise UnavailableError(str(errors.exceptions[0]), retry_after_ms=1000) from errors
        return [each.result() for each in reads]

    async def _read(self, ranks: Sequence[RankConnection], adapter: AdapterInfo) -> AdapterInfo:
        """Have all ranks read an adapter; return it with its digest and size."""
        calls = [asyncio.ensure_future(rank.read_adapter(adapter)) for rank in ranks]
        try:
            # Calls are not cancelled: an answer on its way would be lost, and the adapter stay in the rank's memory.
            made = await _answered(asyncio.shield(asyncio.gather(*calls)))
            if len({each.digest for each in made}) > 1:
                raise InvalidRequestError("the ranks have read different files; all hosts must have the same adapter")
        except BaseException:
            for call in calls:
                call.add_done_callback(self._note_unused)
            raise
        return replace(made[0], bytes=sum(each.bytes for each in made))

    def _note_unused(self, call: asyncio.Future[AdapterInfo]) -> None:
        if not call.cancelled() and call.exception() is None:
            self._unused.add(call.result().digest)

    async def _load_files(self, wanted: AdapterInfo) -> AdapterInfo:
        """Read an adapter and make it available; nothing is left of it if that fails, or the caller goes away."""
        # Held until the end, so that loads that wait for another change fill no memory.
        async with self._reading:
            self._check_room(wanted)
            made = await self._read(self._ready(), wanted)
            try:
                async with self._changing:
                    self._check_room(made)
                    self._check_pins(made)
                    # It is not there any more where ranks have restarted, or another change has freed it.
                    made = await self._read(self._ready(), made)
                    await self._commit(made)
            except BaseException:
                self._unused.add(made.digest)
                raise
        return made

    async def _commit(self, made: AdapterInfo) -> None:
        await self._announce([*(each for each in self.all if each.name != made.name), made])
        self._put(made)
        self._manifest.write(self.all)

    async def _announce(self, adapters: Iterable[AdapterInfo]) -> None:
        """Have the workers keep a list of names.

        Raises:
            UnavailableError: one is not connected, or does not answer; `tidy` repeats the list that is true.
        """
        ranks = self._ready()
        self._is_list_stale = True
        await _answered(asyncio.gather(*(rank.set_adapters(adapters) for rank in ranks)))
        self._is_list_stale = False

    async def _reconcile(self, rank: RankConnection) -> None:
        """Have a rank keep the adapters in use and no others, which it has read before, for another scheduler."""
        _, kept = await rank.adapters()
        for digest in set(kept) - self._used:
            await rank.drop_adapter(digest)
        await rank.set_adapters(self.all)

    @property
    def _used(self) -> set[str]:
        return {*(each.digest for each in self._by_name.values()), *self._retired}

    def _ready(self) -> Sequence[RankConnection]:
        ranks = self._ranks()
        if not ranks:
            raise UnavailableError("the scheduler waits for its workers", retry_after_ms=1000)
        return ranks

    def _check_room(self, made: AdapterInfo) -> None:
        if made.name not in self._by_name and len(self._by_name) >= self._settings.limit:
            raise InvalidRequestError(
                f"{len(self._by_name)} adapters are loaded, which is the limit (scheduler.adapters.limit)"
            )

    def _check_pins(self, made: AdapterInfo) -> None:
        pinned = {each.digest for each in self.all if each.pinned and each.name != made.name}
        if made.pinned and len(pinned | {made.digest}) >= max(self._settings.slots, 2):
            raise InvalidRequestError(
                f"{len(pinned)} of {self._settings.slots} slots have pinned adapters; one has to stay for others",
                param="pinned",
            )

    def _put(self, adapter: AdapterInfo) -> None:
        known = self._by_name.get(adapter.name)
        self._by_name[adapter.name] = adapter
        self._retired.pop(adapter.digest, None)
        if known is not None and known.digest != adapter.digest:
            self._retire(known)
        self._note_pins()

    def _retire(self, adapter: AdapterInfo) -> None:
        if all(other.digest != adapter.digest for other in self._by_name.values()):
            self._retired[adapter.digest] = adapter
        self._note_pins()

    def _lose(self, adapter: AdapterInfo) -> None:
        self._retired.pop(adapter.digest, None)
        self._audit.note("adapter.lost", {"name": adapter.name, "digest": adapter.digest})
        if self.find(adapter.name) == adapter.digest:
            del self._by_name[adapter.name]
        self._note_pins()
        core = self._core()
        if core is not None:
            message = "the adapter was lost with the workers, as its files have changed or gone since it was loaded"
            core.lose_adapter(adapter.digest, UnavailableError(message))
            self._on_lost()

    def _note_pins(self) -> None:
        self.pinned.clear()
        self.pinned.update(each.digest for each in self._by_name.values() if each.pinned)


async def _answered(call: Awaitable[T]) -> T:
    """Return the ranks' answer.

    Raises:
        InvalidRequestError: one refuses.
        UnavailableError: one is unreachable, or fails.
    """
    try:
        return await call
    except PandoError as error:
        failure = error.to_failure()
        if failure.code is ErrorCode.INVALID_REQUEST:
            raise InvalidRequestError(failure.message, param=failure.param) from error
        raise UnavailableError(failure.message, retry_after_ms=1000) from error
