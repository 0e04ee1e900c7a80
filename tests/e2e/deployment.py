"""A whole deployment as one object, supervised inside the tests' own process."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections import Counter
from typing import TYPE_CHECKING

from common.errors import ConfigurationError
from deploy.supervisor.console import format_event, parse_line
from deploy.supervisor.layout import ONE_OF_EACH, Replicas, lay_out
from deploy.supervisor.process import Probes
from deploy.supervisor.supervisor import Supervisor

if TYPE_CHECKING:
    from pathlib import Path

    from common.settings import Settings
    from deploy.supervisor.layout import Layout


class PlainReporter:
    """Writes everything to standard error as plain text, each line with its service's name, and counts log events."""

    def __init__(self) -> None:
        self.logged: Counter[str] = Counter()

    def line(self, service: str, text: str) -> None:
        """Write a service's line."""
        event = parse_line(text)
        self.logged[event.text] += 1
        sys.stderr.write(format_event(service, event) + "\n")

    def note(self, text: str) -> None:
        """Write a remark of the supervisor's."""
        self.line("pando", text)

    def alive(self, service: str) -> None:
        """Services log their start themselves."""

    def ready(self, layout: Layout) -> None:
        """Write where the deployment serves."""
        self.note(f"serving {layout.model} at {layout.url}")


class Deployment:
    """All services of one configuration as child processes, supervised by a thread of this process."""

    def __init__(self, settings: Settings, ranks: int, root: Path, replicas: Replicas = ONE_OF_EACH) -> None:
        """Prepare a deployment of `settings` with `ranks` tensor-parallel workers; port 0 takes a free one."""
        self.layout, self.run_directory = lay_out(settings, ranks, root, replicas)
        self._reporter = PlainReporter()
        self._thread = threading.Thread(target=self._run, name="pando-supervisor", daemon=True)
        self._settled = threading.Event()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._supervisor: Supervisor | None = None

    @property
    def url(self) -> str:
        """Base URL of the gateway, without a path."""
        return self.layout.url

    @property
    def logged(self) -> Counter[str]:
        """How often the services have logged each event."""
        return self._reporter.logged

    def address_of(self, name: str) -> str:
        """Return the gRPC address of a service."""
        return self.layout.find(name).address

    def start(self, timeout_s: float = 300.0) -> None:
        """Start all services and wait until a request would be served.

        Raises:
            ServiceFailedError: a service cannot be kept running.
            TimeoutError: the deployment serves nothing within `timeout_s`; it has been stopped.
        """
        self._thread.start()
        settled = self._settled.wait(timeout_s)
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        if not settled:
            self.stop()
            raise TimeoutError(f"no request would be served {timeout_s:g} s after the start")

    def stop(self) -> None:
        """End all services in order, and wait for it; a deployment that has ended already stays so."""
        if self._loop is not None and self._stopping is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
        if self._thread.ident is not None:
            self._thread.join()

    def pid_of(self, name: str) -> int | None:
        """Return the process id of a service, None while it restarts."""
        return self._running.pid_of(name)

    def restarts_of(self, name: str) -> int:
        """Return the number of restarts of a service."""
        return self._running.restarts_of(name)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a service's processes; the supervisor starts it again if it dies."""
        self._running.kill(name, number)

    @property
    def _running(self) -> Supervisor:
        if self._supervisor is None:
            raise ConfigurationError("the deployment has not been started")
        return self._supervisor

    def _run(self) -> None:
        try:
            asyncio.run(self._supervise())
        except BaseException as error:  # noqa: BLE001  (raised again by the thread that waits in `start`)
            self._failure = error
        finally:
            self._settled.set()

    async def _supervise(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        self._supervisor = Supervisor(self.layout, self.run_directory, self._reporter, Probes())
        announcing = asyncio.create_task(self._announce(self._supervisor))
        try:
            await self._supervisor.run(self._stopping)
        finally:
            announcing.cancel()

    async def _announce(self, supervisor: Supervisor) -> None:
        await supervisor.ready.wait()
        self._settled.set()
