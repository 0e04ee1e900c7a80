"""Has other groups compute prompts for waiting requests of this one."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import grpc

from common.errors import PandoError, UnavailableError
from common.logs import get_logger
from common.rpc.channel import renew
from common.rpc.status import CLOSED_DURING_CALL, is_own_cancellation
from common.wire.requests import schedule_request_to_wire
from protos.gen.pando.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.scheduler import metrics
from services.scheduler.defects import note_defect

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.scheduler.cache.tiers.peer_reads import PeerFetch
    from services.scheduler.core.core import SchedulerCore
    from services.scheduler.core.load_back import LoadBack
    from services.scheduler.core.sequence import Sequence
    from services.scheduler.loop import SchedulerLoop

    PrefillCall = grpc.aio.UnaryStreamCall[scheduler_pb2.PrefillRequest, scheduler_pb2.PrefillResponse]

# Without a message for so long the other group counts as away; it sends one every half second.
SILENCE_S = 2.0
# Time to wait for pages of a group that computes other prompts: a multiple of the time in which all that were asked
# for could be computed here, and at least so many seconds.
PATIENCE = 2.0
LEAST_PATIENCE_S = 2.0
# Between looks at a request whose last pages are being read, as the end of that is not announced.
WATCH_S = 0.1


class PrefillClient:
    """One call to another group for each prompt; whatever fails, the prompt is computed here."""

    def __init__(
        self,
        loop: SchedulerLoop,
        connect: Callable[[str, str], grpc.aio.Channel],
        min_tokens: int | None,
        silence_s: float = SILENCE_S,
    ) -> None:
        """Ask for prompts of which at least `min_tokens` tokens are missing, or an image.

        None: as many as has been measured to pay.
        `connect` opens a channel by address and the name in its certificate; an empty name: the address's host.
        """
        self.asked = 0
        self.failed = 0
        self._loop = loop
        self._connect = connect
        self._min_tokens = min_tokens
        self._silence_s = silence_s
        self._channels: dict[tuple[str, str], grpc.aio.Channel] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = get_logger("prefill")

    def consider(self, core: SchedulerCore, sequence: Sequence) -> None:
        """Have a new request's prompt computed elsewhere if a group is named for that, and it is long or has images."""
        request, loads = sequence.request, core.memory.loads
        options = request.options
        is_plain = options.pooling is None and options.prompt_logprobs is None
        if not request.prefill_group or not is_plain or loads is None or core.memory.windows:
            return
        fetch = loads.await_peer(sequence, self._min_tokens)
        self._export(loads)
        if fetch is None:
            return
        self.asked += 1
        metrics.REMOTE_PREFILLS_TOTAL.labels("asked").inc()
        task = asyncio.create_task(self._run(core, sequence, fetch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def run(self) -> None:
        """Own the calls until cancelled; then stop them and close the channels."""
        try:
            await asyncio.Event().wait()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for channel in self._channels.values():
                await channel.close()

    async def _run(self, core: SchedulerCore, sequence: Sequence, fetch: PeerFetch) -> None:
        group = sequence.request.prefill_group
        try:
            reason = await self._ask(core, sequence, fetch)
        except Exception as error:  # noqa: BLE001  (the request must not wait for a call that has ended)
            note_defect("prefills")
            reason = type(error).__name__
        if reason:
            self.failed += 1
            metrics.REMOTE_PREFILLS_TOTAL.labels("failed").inc()
            self._log.warning("prefill.failed", group=group, reason=reason)
            fetch.stop()
            self._loop.wake()

    async def _ask(self, core: SchedulerCore, sequence: Sequence, fetch: PeerFetch) -> str:
        """Follow one call; return why it failed, if it did."""
        request = sequence.request
        wire = schedule_request_to_wire(request)
        wire.ClearField("turn")
        wire.ClearField("resume")
        call: PrefillCall | None = None
        try:
            channel = self._channel(request.prefill_group, request.prefill_group_name)
            call = scheduler_pb2_grpc.SchedulerStub(channel).Prefill(scheduler_pb2.PrefillRequest(request=wire))
            await self._follow(call, core, sequence, fetch)
        except grpc.aio.AioRpcError as error:
            return error.details() or str(error.code())
        except TimeoutError:
            # The connection may lose messages without breaking; other calls on it fail, too.
            renew(channel)
            return f"no answer for {self._silence_s:g} s"
        except PandoError as error:
            return str(error)
        except asyncio.CancelledError:
            if is_own_cancellation():
                raise
            return CLOSED_DURING_CALL
        finally:
            # The other group may free the pages now.
            if call is not None:
                call.cancel()
        return ""

    async def _follow(self, call: PrefillCall, core: SchedulerCore, sequence: Sequence, fetch: PeerFetch) -> None:
        """Offer the pages that the other group computes, until all have been read or the request does not wait."""
        heard_at = time.monotonic()
        computing_s = None
        while not fetch.is_complete:
            async with asyncio.timeout(self._silence_s):
                message = await call.read()
            if not isinstance(message, scheduler_pb2.PrefillResponse):
                raise UnavailableError("the call ended early")
            if not self._loop.can_use_pages(message.fingerprint, message.kv_identity):
                raise UnavailableError("it serves another model, or its shards are of no use here")
            if message.device_pages:
                heard_at = time.monotonic()
            elif time.monotonic() - heard_at > (patience_s := self._patience_s(core)):
                raise UnavailableError(f"nothing was computed for {patience_s:.1f} s, so computing here is faster")
            fetch.found_tokens = message.cached_tokens
            fetch.offer(message.workers, message.lease, message.device_pages)
            if message.HasField("device_snapshot"):
                fetch.offer_snapshot(message.device_snapshot)
            if message.is_last:
                computing_s = message.computing_us / 1e6 if message.HasField("computing_us") else None
                fetch.complete(self._loop.now)
            self._loop.wake()
        while not fetch.is_done:  # noqa: ASYNC110  (the core cannot notify)
            await asyncio.sleep(WATCH_S)
        if fetch.has_arrived:
            self._note_fetched(core, sequence, fetch, computing_s)

    def _note_fetched(
        self, core: SchedulerCore, sequence: Sequence, fetch: PeerFetch, computing_s: float | None
    ) -> None:
        """Count a fetched prompt, and learn by how much it was later here than where it was computed."""
        metrics.REMOTE_PREFILLS_TOTAL.labels("fetched").inc()
        metrics.REMOTE_PREFILL_TRANSFER_SECONDS_TOTAL.inc(fetch.transfer_s)
        metrics.REMOTE_PREFILL_EXPOSED_SECONDS_TOTAL.inc(fetch.exposed_s)
        loads = core.memory.loads
        # Earlier versions of the other group do not say how long it computed. Images are fetched whatever the threshold
        # is, and may have waited there for their encoder.
        is_text = not sequence.request.images
        if is_text and loads is not None and fetch.ready_at is not None and computing_s is not None:
            loads.costs.saw_peer_start(fetch.ready_at - sequence.arrived_at - computing_s)
            self._export(loads)

    def _export(self, loads: LoadBack) -> None:
        least = loads.costs.least_peer_tokens() if self._min_tokens is None else self._min_tokens
        metrics.REMOTE_PREFILL_MIN_TOKENS.set(least)

    def _patience_s(self, core: SchedulerCore) -> float:
        loads = core.memory.loads
        assert loads is not None, "only a host tier has fetches"
        return max(LEAST_PATIENCE_S, PATIENCE * loads.costs.prefill_s(loads.host.peers.awaited_tokens))

    def _channel(self, address: str, name: str) -> grpc.aio.Channel:
        if (address, name) not in self._channels:
            self._channels[address, name] = self._connect(address, name)
        return self._channels[address, name]
