"""Has an engine take part in passes of other groups whose tokens need its experts."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

from common.logs import get_logger
from services.worker import metrics
from services.worker.engine.execution.interface import ExpertGroupError

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.worker.engine.execution.interface import Engine, PassCalls
    from services.worker.session import EngineCommand

    OnLost = Callable[[PassCalls | None, str], None]


class PassFollower:
    """Listens for calls to passes in a thread of its own; the engine's thread answers them between plans.

    A call that comes while the engine has plans is stale once their pass has begun, which is the same one.
    """

    def __init__(
        self,
        engine: Engine,
        submit: Callable[[EngineCommand], None],
        on_joined: Callable[[], None],
        on_lost: OnLost,
    ) -> None:
        """Run commands with `submit`, on the engine's thread, as `on_joined` after each pass.

        `on_lost` is called in any thread if ranks have to meet again.
        """
        # Passes without tokens of this rank.
        self.joined = 0
        self._engine = engine
        self._submit = submit
        self._on_joined = on_joined
        self._on_lost = on_lost
        self._calls: PassCalls | None = None
        self._log = get_logger("engine")

    def follow(self) -> None:
        """Listen for calls of the model that the engine has loaded, if it shares experts; on the engine's thread."""
        calls = self._engine.pass_calls
        if calls is None or calls is self._calls:
            return
        self._calls = calls
        threading.Thread(target=self._listen, args=(calls,), name="pass-calls", daemon=True).start()

    def _listen(self, calls: PassCalls) -> None:
        try:
            while (number := calls.next_call()) is not None:
                self._submit(partial(self._join, calls, number))
        except ExpertGroupError as error:
            self._on_lost(calls, str(error))

    def _join(self, calls: PassCalls, number: int) -> None:
        if self._engine.pass_calls is not calls:
            return
        try:
            if not self._engine.join_pass(number):
                return
            self.joined += 1
            metrics.JOINED_PASSES_TOTAL.inc()
            self._on_joined()
        except ExpertGroupError as error:
            self._on_lost(calls, str(error))
        except Exception as error:  # noqa: BLE001  (ends the stream of plans, if there is one)
            self._log.exception("pass.not_joined", number=number)
            self._on_lost(calls, f"{type(error).__name__}: {error}")
