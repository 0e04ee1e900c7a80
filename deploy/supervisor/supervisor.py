"""The supervisor, which keeps all services of one deployment running, from the first start to an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from common.runtime import REFUSED_EXIT
from deploy.supervisor.process import ServiceProcess
from deploy.supervisor.state import DeploymentState, ServiceState, make_private, write_state

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from deploy.supervisor.layout import Layout, ServiceSpec, Stage

# Exit status of `common.settings` for invalid settings, with which a restart would fail again.
CONFIGURATION_EXIT = 2
SHOWN_LINES = 20


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Delays between restarts, and the number of quick deaths after which a service that never answered is given up."""

    first_delay_s: float = 0.1
    max_delay_s: float = 5.0
    # A service that ran at least this long counts as stable: its next death is the first of a new series.
    stable_after_s: float = 20.0
    # Deaths in a row after which the deployment ends with the last one's log, if the service has never answered, or if
    # it refuses its configuration before anything was served. Otherwise a restart may help: a request that ends the
    # engine, or a lack of memory, passes.
    give_up_after: int = 5


class RestartHistory:
    """Counts the deaths in a row of one service."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._quick_deaths = 0
        self._has_answered = False

    def delay_after(self, lived_s: float, *, has_answered: bool, is_refused: bool = False) -> float | None:
        """Record a death after `lived_s` seconds; return the delay before the next start in seconds, or None.

        `is_refused`: it refused a configuration with which nothing was served yet. It may have answered probes before,
        and have loaded a model for long.
        """
        self._has_answered = self._has_answered or (has_answered and not is_refused)
        is_stable = lived_s >= self._policy.stable_after_s and not is_refused
        self._quick_deaths = 1 if is_stable else self._quick_deaths + 1
        if self._quick_deaths >= self._policy.give_up_after and not self._has_answered:
            return None
        delay: float = self._policy.first_delay_s * 2 ** min(self._quick_deaths - 1, 16)
        return min(delay, self._policy.max_delay_s)


class ServiceFailedError(Exception):
    """A service cannot be kept running; the deployment ends."""

    def __init__(self, name: str, cause: str, last_lines: tuple[str, ...]) -> None:
        """Store the service's name, the cause, and the last lines of its log."""
        super().__init__(f"{name} {cause}")
        self.name = name
        self.cause = cause
        self.last_lines = last_lines


class Reporter(Protocol):
    """Receives the supervisor's events, for output."""

    def line(self, service: str, text: str) -> None:
        """A service has written a line."""

    def note(self, text: str) -> None:
        """The supervisor has a message for the operator."""

    def alive(self, service: str) -> None:
        """A service has answered for the first time since its last start."""

    def ready(self, layout: Layout) -> None:
        """The deployment can serve, for the first time."""


class HealthProbes(Protocol):
    """The supervisor's health checks; `Probes` implements them for real services."""

    async def is_alive(self, address: str) -> bool:
        """Whether the process at `address` answers."""

    async def is_ready(self, url: str) -> bool:
        """Whether the gateway at `url` can serve a request now."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Intervals and timeouts of the supervisor's health checks."""

    probe_interval_s: float = 0.1
    start_timeout_s: float = 300.0
    liveness_interval_s: float = 5.0
    # A process that answers no probe for this long counts as stuck; far longer than any pause caused by work.
    hang_after_s: float = 60.0


class Supervisor:
    """Starts all services at once, as each waits for its peers; restarts those that die; ends them stage by stage."""

    def __init__(
        self,
        layout: Layout,
        run_directory: Path,
        reporter: Reporter,
        probes: HealthProbes,
        timing: Timing | None = None,
        policy: RestartPolicy | None = None,
    ) -> None:
        """Prepare a deployment; `run` starts it."""
        self.layout = layout
        self.ready = asyncio.Event()
        self._directory = run_directory
        self._reporter = reporter
        self._probes = probes
        self._timing = timing or Timing()
        self._policy = policy or RestartPolicy()
        self._processes = {spec.name: ServiceProcess(spec, run_directory, reporter.line) for spec in layout.services}
        self._alive = {spec.name: asyncio.Event() for spec in layout.services}
        self._killed_with_group: set[str] = set()
        self._disturbed = asyncio.Event()
        self._given_up: set[str] = set()
        self._is_aborted = False

    async def run(self, stopping: asyncio.Event) -> None:
        """Run the deployment until `stopping` is set.

        Raises:
            ServiceFailedError: a service cannot be kept running; all others have been stopped.
        """
        make_private(self._directory.parent)
        make_private(self._directory)
        keepers = {name: asyncio.create_task(self._keep(process)) for name, process in self._processes.items()}
        others = [asyncio.create_task(self._follow_readiness()), asyncio.create_task(stopping.wait())]
        try:
            done, _ = await asyncio.wait({*keepers.values(), *others}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(others)
            await self._stop_all(keepers)
            shutil.rmtree(self._directory, ignore_errors=True)
        for task in done:
            task.result()

    def pid_of(self, name: str) -> int | None:
        """Return the process id of a service; None while it restarts."""
        return self._processes[name].pid

    def restarts_of(self, name: str) -> int:
        """Return the number of restarts of a service."""
        return self._processes[name].restarts

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a service; it is restarted if it dies."""
        self._processes[name].signal(number)

    def abort(self) -> None:
        """Kill all services at once, without another start; a `run` that is stopping then ends soon."""
        self._is_aborted = True
        for process in self._processes.values():
            process.signal(signal.SIGKILL)

    async def _keep(self, process: ServiceProcess) -> None:
        history = RestartHistory(self._policy)
        name = process.spec.name
        while True:
            await process.start()
            self._publish()
            status = await self._watch(process)
            self._disturbed.set()
            has_answered = self._alive[name].is_set()
            self._alive[name].clear()
            self._publish()
            try:
                delay = self._delay_after(process, status, history, has_answered=has_answered)
            except ServiceFailedError as error:
                if not self._can_do_without(process.spec.model):
                    raise
                self._reporter.note(f"{error}; {process.spec.model} is not served any more, other models are")
                await asyncio.Event().wait()
            await asyncio.sleep(delay)
            if self._is_aborted:
                return
            process.restarts += 1

    def _delay_after(
        self, process: ServiceProcess, status: int, history: RestartHistory, *, has_answered: bool
    ) -> float:
        """Return the pause before the next start after a death, in seconds; raise ServiceFailedError to give up."""
        name, lived = process.spec.name, process.lived_s
        if name in self._killed_with_group:
            self._killed_with_group.discard(name)
            return self._policy.first_delay_s
        how = describe_exit(status)
        if status == CONFIGURATION_EXIT:
            raise ServiceFailedError(name, f"refused to start ({how})", tuple(process.last_lines)[-SHOWN_LINES:])
        is_refused = status == REFUSED_EXIT and not self.ready.is_set()
        delay = history.delay_after(lived, has_answered=has_answered, is_refused=is_refused)
        if delay is None:
            times = f"{self._policy.give_up_after} times in a row"
            what = "because its configuration is refused" if is_refused else "without having answered"
            cause = f"died {times} {what}, the last time with {how} after {lived:.1f} s"
            raise ServiceFailedError(name, cause, tuple(process.last_lines)[-SHOWN_LINES:])
        self._reporter.note(f"{name} died ({how}) after {lived:.1f} s; starting it again in {delay:g} s")
        self._kill_group_of(process.spec)
        return delay

    def _can_do_without(self, model: str | None) -> bool:
        """Mark `model` as given up; return whether other models are still served."""
        if model is None or not self.ready.is_set():
            return False
        self._given_up.add(model)
        return bool({spec.model for spec in self.layout.services if spec.model} - self._given_up)

    def _kill_group_of(self, spec: ServiceSpec) -> None:
        for peer in self._processes.values():
            if peer.spec.group == spec.group and peer.spec.name != spec.name and peer.pid is not None:
                self._reporter.note(f"{peer.spec.name} is started again with it")
                self._killed_with_group.add(peer.spec.name)
                peer.signal(signal.SIGKILL)

    async def _watch(self, process: ServiceProcess) -> int:
        """Wait for the end of `process`; meanwhile probe it, and kill it if it hangs."""
        probing = asyncio.create_task(self._probe(process))
        try:
            return await process.wait()
        finally:
            probing.cancel()
            # Not `await probing`: a cancellation of this task in the meantime could not be distinguished from the
            # probe's own.
            await asyncio.gather(probing, return_exceptions=True)

    async def _probe(self, process: ServiceProcess) -> None:
        timing, clock = self._timing, asyncio.get_running_loop().time
        name = process.spec.name
        last_answer, patience = clock(), timing.start_timeout_s
        while clock() - last_answer < patience:
            if await self._probes.is_alive(process.spec.address):
                last_answer, patience = clock(), timing.hang_after_s
                if not self._alive[name].is_set():
                    self._alive[name].set()
                    self._reporter.alive(name)
            await asyncio.sleep(timing.liveness_interval_s if self._alive[name].is_set() else timing.probe_interval_s)
        self._reporter.note(f"{name} has not answered for {patience:g} s: killing it")
        process.signal(signal.SIGKILL)

    async def _follow_readiness(self) -> None:
        """Report when the deployment can serve for the first time, and each time that it can again after a death."""
        clock = asyncio.get_running_loop().time
        while True:
            since = clock()
            self._disturbed.clear()
            await self._until_ready()
            if self.ready.is_set():
                self._reporter.note(f"serving again after {clock() - since:.1f} s")
            else:
                self.ready.set()
                self._reporter.ready(self.layout)
            await self._disturbed.wait()

    async def _until_ready(self) -> None:
        while True:
            are_alive = all(event.is_set() for event in self._alive.values())
            if are_alive and await self._probes.is_ready(self.layout.probe_url or self.layout.url):
                return
            await asyncio.sleep(self._timing.probe_interval_s)

    async def _stop_all(self, keepers: Mapping[str, asyncio.Task[None]]) -> None:
        """Stop stage by stage: the gateway first, so that its open requests can finish, then the other services.

        Until its stage is reached, a service that dies is started again, as open requests still need it.
        """
        stages: dict[Stage, list[ServiceProcess]] = {}
        for process in self._processes.values():
            stages.setdefault(process.spec.stage, []).append(process)
        for stage in sorted(stages, key=lambda stage: -stage.value):
            await _cancel([keepers[process.spec.name] for process in stages[stage]])
            await asyncio.gather(*(process.stop() for process in stages[stage]))

    def _publish(self) -> None:
        services = {
            name: ServiceState(process.spec.address, process.pid, process.restarts)
            for name, process in self._processes.items()
        }
        layout = self.layout
        state = DeploymentState(os.getpid(), layout.url, layout.model, services, dict(layout.models))
        write_state(self._directory, state)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait for their ends."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def describe_exit(status: int) -> str:
    """Return a process's exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-status).name}"
    return f"signal {-status}"
