"""Keeps workers that only encode images configured, and has the group's ranks read what they encode."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import grpc

from common.errors import PandoError, UnavailableError
from common.logs import get_logger
from services.scheduler import metrics
from services.scheduler.cache.encoder_outputs import OutputState
from services.scheduler.defects import BrokenStates, begin_again, note_defect
from services.scheduler.group import GroupState
from services.scheduler.rank import CONNECT_TIMEOUT_S, RankConnection, RankLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from common.steps import EngineSpec
    from services.scheduler.core.core import SchedulerCore
    from services.scheduler.core.encodings import Encoding
    from services.scheduler.group import WorkerGroup
    from services.scheduler.loop import SchedulerLoop

TICKET_BYTES = 16
# Embeddings that an encoder may have to compute at a time, in steps of `scheduler.vision.step_embeddings`: enough that
# it does not wait for the next image while the ranks read one.
ROOM_STEPS = 4
BEAT_S = 0.5
# Between attempts to use an encoder that was lost, or that cannot be used.
RETRY_S = 1.0
# Without progress of its engine for longer, an encoder that has failed is not asked again: it may hang.
MOVING_S = 5.0


@dataclass(slots=True, eq=False)
class _Encoder:
    """A worker that only encodes."""

    address: str
    # None: it does not serve.
    rank: RankConnection | None = None
    # What it is configured with.
    spec: EngineSpec | None = None
    # `EngineCapacity.encoder_identity` of the ranks, which it had when it was configured.
    identity: str = ""
    # Embeddings that it has to compute, or that ranks read.
    embeddings: int = 0
    # A call has failed, and its engine has made no progress since, as far as is known.
    is_suspect: bool = False
    # Why it does not serve, as far as that was logged.
    reason: str = ""


class EncoderDesk:
    """Owns the connections to encoders, and one call for each image; see `RemoteEncoders`.

    Whatever fails, the image is left to the group's workers.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        connect: Callable[[str], grpc.aio.Channel],
        loop: SchedulerLoop,
        group: WorkerGroup,
        step_embeddings: int,
        timeout_s: float,
    ) -> None:
        """Use the workers at `addresses`, to which `connect` opens channels, for the images of `group`.

        One whose call has failed, and whose engine makes no progress for `timeout_s` seconds, is configured again.
        """
        self._encoders = [_Encoder(address) for address in addresses]
        self._connect = connect
        self._loop = loop
        self._group = group
        self._step_embeddings = step_embeddings
        self._timeout_s = timeout_s
        self._calls: set[asyncio.Task[None]] = set()
        self._broken = BrokenStates()
        # The group's configuration, and that of encoders for it.
        self._group_spec = group.spec
        self._spec = encoder_spec(group.spec)
        self._log = get_logger("encoders")

    @property
    def room(self) -> int:
        """Embeddings that the encoders may have to compute at a time; 0: none of them serves."""
        return len(self._serving()) * ROOM_STEPS * self._step_embeddings

    def start(self, core: SchedulerCore, encoding: Encoding) -> None:
        """Have an image encoded by the least busy encoder."""
        call = asyncio.create_task(self._call(core, encoding))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def run(self) -> None:
        """Own the connections and calls until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._broken.watch())
                for encoder in self._encoders:
                    tasks.create_task(begin_again("encoders", partial(self._keep, encoder)))
        finally:
            for call in self._calls:
                call.cancel()
            await asyncio.gather(*self._calls, return_exceptions=True)

    def _serving(self) -> list[_Encoder]:
        wanted = self._wanted()
        return [
            encoder
            for encoder in self._encoders
            if encoder.rank is not None and encoder.spec == wanted and not encoder.is_suspect
        ]

    def _wanted(self) -> EngineSpec:
        """Return the configuration that encoders must have now."""
        if self._group.spec is not self._group_spec:
            self._group_spec = self._group.spec
            self._spec = encoder_spec(self._group_spec)
        return self._spec

    async def _call(self, core: SchedulerCore, encoding: Encoding) -> None:
        encoder = min(self._serving(), key=lambda each: each.embeddings, default=None)
        is_kept = False
        try:
            if encoder is not None:
                is_kept = await self._encode(encoder, encoding)
        except Exception:  # noqa: BLE001  (the image is left to the workers)
            note_defect("encoders")
        finally:
            with self._broken.changing():
                core.memory.images.encodings.finish(encoding, is_kept=is_kept)
            self._loop.wake()

    async def _encode(self, encoder: _Encoder, encoding: Encoding) -> bool:
        """Have an image encoded, and its embeddings read by all ranks; return whether all have them."""
        assert encoder.rank is not None, "it serves"
        ticket, image = secrets.token_bytes(TICKET_BYTES), encoding.image
        encoder.embeddings += image.length
        try:
            async with encoder.rank.encoding(ticket, image, encoder.identity):
                if encoding.output.state is not OutputState.PROMISED or not self._group.ranks:
                    return False  # the user was forgotten, or the ranks were lost
                # None of these is cancelled: a rank that reads on would keep an output after it was dropped.
                fetched = await asyncio.gather(
                    *(
                        rank.fetch_embeddings(encoding.output.output_id, encoder.address, ticket, image.length)
                        for rank in self._group.ranks
                    ),
                    return_exceptions=True,
                )
        except (PandoError, TimeoutError) as error:
            self._suspect(encoder, error)
            return False
        finally:
            encoder.embeddings -= image.length
        # Not raised, as its traceback and this list would keep the pixels until a search for cycles.
        failure = next((each for each in fetched if isinstance(each, BaseException)), None)
        if failure is not None:
            self._suspect(encoder, failure)
        return failure is None

    def _suspect(self, encoder: _Encoder, error: BaseException) -> None:
        encoder.is_suspect = True
        self._note_serving()
        reason = str(error) or "no answer"
        self._log.warning("image.left_to_workers", encoder=encoder.address, reason=reason)

    async def _keep(self, encoder: _Encoder) -> NoReturn:
        """Keep an encoder configured."""
        while True:
            channel = self._connect(encoder.address)
            rank = RankConnection(channel)
            try:
                await self._serve(encoder, rank)
            except (RankLostError, PandoError, grpc.aio.AioRpcError, TimeoutError) as error:
                reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                if reason != encoder.reason:
                    self._log.warning("encoder.away", encoder=encoder.address, reason=reason)
                encoder.reason = reason or ""
            finally:
                self._set(encoder, None, None)
                rank.end_encodings()
                await channel.close()
            await asyncio.sleep(RETRY_S)

    async def _serve(self, encoder: _Encoder, rank: RankConnection) -> None:
        """Configure an encoder; return when it has to be configured otherwise, or the group sleeps."""
        process = (await rank.wait_until_up()).process
        while self._group.state is not GroupState.READY:  # noqa: ASYNC110  (it does not notify)
            await asyncio.sleep(BEAT_S)
        spec = self._wanted()
        capacity, own = await rank.configure(spec, resumes=False), self._loop.capacity
        if own is None or not own.encoder_identity or own.encoder_identity != capacity.encoder_identity:
            raise UnavailableError("it has loaded another encoder than the group's workers")
        encoder.identity = own.encoder_identity
        self._set(encoder, rank, spec)
        encoder.reason = ""
        self._log.info("encoder.ready", encoder=encoder.address, device=capacity.device)
        while self._wanted() == spec and self._group.sleep_level is None:
            if (await rank.wait_until_up()).process != process:
                raise RankLostError("its process was replaced")
            if encoder.is_suspect and await self._is_moving(rank):
                encoder.is_suspect = False
                self._note_serving()
            await asyncio.sleep(BEAT_S)
        self._set(encoder, None, None)
        level = self._group.sleep_level
        if level is not None:
            await rank.sleep(level, keeps_host_pages=False)

    async def _is_moving(self, rank: RankConnection) -> bool:
        """Return whether the engine of an encoder makes progress.

        Raises:
            RankLostError: it has made none for too long; configuring it makes a process that hangs end.
        """
        pulse = await rank.pulse(CONNECT_TIMEOUT_S)
        if pulse is not None and pulse.engine_age_s > self._timeout_s:
            raise RankLostError(f"its engine has made no progress for {pulse.engine_age_s:.0f} s")
        return pulse is not None and pulse.engine_age_s < MOVING_S

    def _set(self, encoder: _Encoder, rank: RankConnection | None, spec: EngineSpec | None) -> None:
        encoder.rank, encoder.spec, encoder.is_suspect = rank, spec, False
        self._note_serving()

    def _note_serving(self) -> None:
        metrics.ENCODERS.set(len(self._serving()))
        self._loop.wake()


def encoder_spec(spec: EngineSpec) -> EngineSpec:
    """Return the configuration of an encoder for a group that is configured as `spec` says."""
    return replace(
        spec, only_encodes=True, rendezvous="", stages=1, expert_parallel=False, adapter_slots=0,
        data_parallel_size=1, data_parallel_rank=0, data_parallel_rendezvous="",
        device_pages=None, host_pages=None, host_bytes=0, window_pages=None, snapshots=None, host_snapshots=None,
    )  # fmt: skip
