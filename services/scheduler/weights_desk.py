"""Replaces the weights of a running group: checks them, deals with the requests that run, and has them loaded."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from common.errors import InvalidRequestError, UnavailableError
from common.logs import get_logger
from services.scheduler import metrics
from services.scheduler.rank import LoadedWeights

if TYPE_CHECKING:
    from services.scheduler.group import WorkerGroup
    from services.scheduler.loop import SchedulerLoop

POLL_S = 0.02
# A label of metrics, and a part of every response.
MAX_VERSION_CHARACTERS = 128


class UpdateMode(Enum):
    """Treatment of running requests; see `WeightsUpdateMode` in protos/pando/v1/scheduler.proto."""

    DRAIN = "drain"
    RECOMPUTE = "recompute"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class UpdatedWeights:
    """The name of the weights that serve, and the number of requests that ran when the update began.

    `paused_s` is the time in which none could run; `beside` says that all ranks had read the new weights before.
    """

    version: str
    running: int
    paused_s: float
    beside: bool


class WeightsDesk:
    """Makes one update at a time."""

    def __init__(self, loop: SchedulerLoop, group: WorkerGroup) -> None:
        """Update the weights of `group`, which runs the plans of `loop`."""
        self._loop = loop
        self._group = group
        self._update: asyncio.Task[UpdatedWeights] | None = None
        self._log = get_logger("weights")

    @property
    def is_updating(self) -> bool:
        """Whether an update runs."""
        return self._update is not None and not self._update.done()

    async def update(self, model: str, load_format: str, mode: UpdateMode, version: str) -> UpdatedWeights:
        """Replace the weights; goes on if the caller is cancelled.

        Args:
            model: A path or name that all workers can resolve.
            load_format: Empty: that of the loaded weights.
            mode: What becomes of the requests that run.
            version: The new weights' name; empty: a number.

        Raises:
            InvalidRequestError: the weights do not fit, or cannot be loaded. The earlier ones serve on.
            UnavailableError: another update runs, or a worker was lost; the earlier weights serve on, or soon will.
        """
        if not model:
            raise InvalidRequestError("model_path must name a directory or a file", param="model_path")
        if len(version) > MAX_VERSION_CHARACTERS or not version.isprintable():
            raise InvalidRequestError(
                f"weight_version must have at most {MAX_VERSION_CHARACTERS} printable characters",
                param="weight_version",
            )
        if self._group.shares_experts:
            raise InvalidRequestError(
                "groups that share experts (scheduler.data_parallel) cannot replace their weights one by one; restart "
                "them with the other weights"
            )
        if self._loop.is_sleeping or self._loop.holds_all:
            raise UnavailableError("the model sleeps; wake it before its weights are replaced")
        if self.is_updating:
            raise UnavailableError("another update of the weights runs", retry_after_ms=1000)
        before = self._group.weights
        weights = LoadedWeights(model, load_format or before.load_format, version or _next(before.version))
        self._update = asyncio.create_task(self._replace(weights, mode))
        self._update.add_done_callback(_count)
        return await asyncio.shield(self._update)

    async def _replace(self, weights: LoadedWeights, mode: UpdateMode) -> UpdatedWeights:
        await self._group.check_weights(weights)
        beside = await self._group.prepare_weights(weights)
        try:
            running, paused_s = await self._commit(weights, mode)
        except BaseException:
            await self._group.drop_prepared_weights()
            raise
        metrics.WEIGHTS_PAUSE_SECONDS.observe(paused_s)
        self._log.info(
            "weights.replaced",
            model=weights.model,
            version=weights.version,
            running=running,
            beside=beside,
            paused_s=round(paused_s, 3),
        )
        return UpdatedWeights(weights.version, running, paused_s, beside)

    async def _commit(self, weights: LoadedWeights, mode: UpdateMode) -> tuple[int, float]:
        """Treat running requests by `mode` and switch weights; return their number, and the pause in seconds."""
        running = self._loop.count_started()
        try:
            match mode:
                case UpdateMode.DRAIN:
                    self._loop.hold_new(held=True)
                    while self._loop.count_started():  # noqa: ASYNC110  (sequences end in many ways)
                        await asyncio.sleep(POLL_S)
                case UpdateMode.ABORT:
                    self._loop.abort_started()
                case UpdateMode.RECOMPUTE:
                    pass
            began_at = time.monotonic()
            await self._group.replace_weights(weights)
            return running, time.monotonic() - began_at
        finally:
            self._loop.hold_new(held=False)


def _next(version: str) -> str:
    return str(int(version) + 1) if version.isdecimal() else "1"


def _count(update: asyncio.Task[UpdatedWeights]) -> None:
    is_done = not update.cancelled() and update.exception() is None
    metrics.WEIGHT_UPDATES_TOTAL.labels("replaced" if is_done else "failed").inc()
