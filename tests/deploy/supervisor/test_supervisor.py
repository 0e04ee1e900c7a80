"""The supervisor with real, but tiny, child processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from deploy.supervisor.layout import Stage
from deploy.supervisor.state import read_state
from deploy.supervisor.supervisor import RestartPolicy, ServiceFailedError, Supervisor, Timing
from tests.deploy.supervisor.fakes import FileProbes, RecordingReporter, layout_of, service
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from deploy.supervisor.layout import ServiceSpec

# Nobody hangs here but where a test has it so; a machine that is busy with other things may stand still for a while.
TIMING = Timing(probe_interval_s=0.01, liveness_interval_s=0.02, hang_after_s=30.0)
POLICY = RestartPolicy(first_delay_s=0.01, max_delay_s=0.02, stable_after_s=30.0, give_up_after=3)


class Running:
    """A supervisor whose deployment runs beside the test."""

    def __init__(self, directory: Path, *services: ServiceSpec, timing: Timing = TIMING) -> None:
        self.directory = directory / "run" / "1"
        self.reporter = RecordingReporter()
        self.probes = FileProbes()
        self.stopping = asyncio.Event()
        self.supervisor = Supervisor(layout_of(*services), self.directory, self.reporter, self.probes, timing, POLICY)

    @contextlib.asynccontextmanager
    async def deployed(self) -> AsyncIterator[Supervisor]:
        task = asyncio.create_task(self.supervisor.run(self.stopping))
        ready = asyncio.create_task(self.supervisor.ready.wait())
        await asyncio.wait({task, ready}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        try:
            yield self.supervisor
        finally:
            self.stopping.set()
            await task


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_services_start_without_waiting_for_others_to_be_alive(tmp_path: Path) -> None:
    first = service(tmp_path, "first", "obedient", Stage.COMPUTE)
    second = service(tmp_path, "second", "obedient", Stage.EDGE)
    running = Running(tmp_path, first, second)
    alive = asyncio.Event()
    running.probes.answers = lambda address: alive.is_set() or "first" not in address
    task = asyncio.create_task(running.supervisor.run(running.stopping))
    await until(lambda: running.reporter.alive_services == ["second"])
    assert not running.supervisor.ready.is_set()
    alive.set()
    await until(running.supervisor.ready.is_set)
    running.stopping.set()
    await task


async def test_readiness_is_announced_once_and_only_when_the_gateway_says_so(tmp_path: Path) -> None:
    running = Running(tmp_path, service(tmp_path, "worker", "obedient"))
    running.probes.is_serving = False
    task = asyncio.create_task(running.supervisor.run(running.stopping))
    await until(lambda: running.reporter.alive_services == ["worker"])
    await asyncio.sleep(0.1)
    assert not running.supervisor.ready.is_set()
    running.probes.is_serving = True
    await until(lambda: len(running.reporter.announced) == 1)
    running.stopping.set()
    await task
    assert len(running.reporter.announced) == 1


async def test_a_killed_service_is_started_again_and_the_others_are_left_alone(tmp_path: Path) -> None:
    running = Running(tmp_path, service(tmp_path, "worker", "obedient"), service(tmp_path, "gateway", "obedient"))
    async with running.deployed() as supervisor:
        before, other = supervisor.pid_of("worker"), supervisor.pid_of("gateway")
        supervisor.kill("worker")
        await until(lambda: supervisor.pid_of("worker") not in (None, before))
        assert supervisor.pid_of("gateway") == other
        assert supervisor.restarts_of("worker") == 1
        await until(lambda: any("serving again" in note for note in running.reporter.notes))


async def test_ranks_of_one_group_are_started_again_together(tmp_path: Path) -> None:
    ranks = [service(tmp_path, f"worker-{rank}", "obedient", group="worker") for rank in range(2)]
    running = Running(tmp_path, *ranks, service(tmp_path, "detokenizer", "obedient"))
    async with running.deployed() as supervisor:
        peer, other = supervisor.pid_of("worker-1"), supervisor.pid_of("detokenizer")
        supervisor.kill("worker-0")
        await until(lambda: supervisor.pid_of("worker-1") not in (None, peer))
        await until(lambda: supervisor.pid_of("worker-0") is not None)
        assert supervisor.pid_of("detokenizer") == other


async def test_a_service_that_never_answers_ends_the_deployment_with_its_last_words(tmp_path: Path) -> None:
    running = Running(tmp_path, service(tmp_path, "good", "obedient"), service(tmp_path, "bad", "crashing"))
    with pytest.raises(ServiceFailedError, match="bad died 3 times in a row without having answered") as caught:
        await running.supervisor.run(running.stopping)
    assert caught.value.last_lines[-1] == "out of luck"
    assert running.supervisor.pid_of("good") is None


async def test_a_service_that_refuses_its_settings_is_not_tried_again(tmp_path: Path) -> None:
    running = Running(tmp_path, service(tmp_path, "bad", "misconfigured"))
    with pytest.raises(ServiceFailedError, match="refused to start") as caught:
        await running.supervisor.run(running.stopping)
    assert caught.value.last_lines == ("unknown setting: worker.colour",)
    assert running.supervisor.restarts_of("bad") == 0


async def test_a_service_whose_configuration_is_refused_before_anything_was_served_ends_the_deployment(
    tmp_path: Path,
) -> None:
    running = Running(tmp_path, service(tmp_path, "scheduler", "refused"))
    running.probes.is_serving = False
    with pytest.raises(
        ServiceFailedError, match="died 3 times in a row because its configuration is refused"
    ) as caught:
        await asyncio.wait_for(running.supervisor.run(running.stopping), 60)
    assert caught.value.last_lines[-1] == "worker: no experts that groups could share"
    assert running.reporter.alive_services


async def test_a_process_that_stops_answering_is_killed_and_started_again(tmp_path: Path) -> None:
    timing = replace(TIMING, hang_after_s=0.3)
    running = Running(tmp_path, service(tmp_path, "worker", "obedient"), timing=timing)
    async with running.deployed() as supervisor:
        before = supervisor.pid_of("worker")
        running.probes.answers = lambda _address: False
        await until(lambda: supervisor.pid_of("worker") != before)
        running.probes.answers = lambda _address: True
        await until(lambda: supervisor.pid_of("worker") not in (None, before))
        assert any("has not answered" in note for note in running.reporter.notes)


async def test_services_stop_before_the_services_that_they_depend_on(tmp_path: Path) -> None:
    stages = {"worker": Stage.COMPUTE, "scheduler": Stage.CONTROL, "gateway": Stage.EDGE}
    running = Running(tmp_path, *(service(tmp_path, name, "obedient", stage) for name, stage in stages.items()))
    async with running.deployed():
        pass
    ends = [text for _, text in running.reporter.lines if text.endswith("ends")]
    assert ends == ["gateway ends", "scheduler ends", "worker ends"]


async def test_a_service_that_dies_while_an_edge_service_drains_is_started_again(tmp_path: Path) -> None:
    edge = service(tmp_path, "gateway", "draining", Stage.EDGE)
    running = Running(tmp_path, edge, service(tmp_path, "worker", "obedient"))
    async with running.deployed() as supervisor:
        running.stopping.set()
        await until(lambda: ("gateway", "gateway drains") in running.reporter.lines)
        alive = ("worker", "worker is alive")
        for starts in (2, 3):
            supervisor.kill("worker")
            await until(lambda starts=starts: running.reporter.lines.count(alive) == starts)  # type: ignore[misc]
        assert supervisor.pid_of("gateway") is not None
        (tmp_path / "gateway.release").touch()
    assert supervisor.pid_of("worker") is None
    assert [text for _, text in running.reporter.lines if text.endswith("ends")] == ["worker ends"]


async def test_a_termination_signal_to_every_process_leaves_the_end_to_the_supervisor(tmp_path: Path) -> None:
    # systemd sends SIGTERM to all processes of a unit.
    edge = service(tmp_path, "gateway", "draining", Stage.EDGE)
    running = Running(tmp_path, edge, service(tmp_path, "worker", "obedient"))
    async with running.deployed() as supervisor:
        before = {name: supervisor.pid_of(name) for name in ("gateway", "worker")}
        for name in before:
            supervisor.kill(name, signal.SIGTERM)
        running.stopping.set()
        await until(lambda: ("gateway", "gateway drains") in running.reporter.lines)
        assert {name: supervisor.pid_of(name) for name in before} == before
        (tmp_path / "gateway.release").touch()


async def test_a_service_that_ignores_the_request_to_end_is_killed_after_its_grace(tmp_path: Path) -> None:
    running = Running(tmp_path, service(tmp_path, "worker", "stubborn", stop_s=0.3))
    async with running.deployed() as supervisor:
        pid = supervisor.pid_of("worker")
        assert pid is not None
    assert not is_running(pid)
    assert ("worker", "did not end within 0.3 s: killed") in running.reporter.lines


async def test_abort_does_not_wait_for_any_grace(tmp_path: Path) -> None:
    running = Running(tmp_path, service(tmp_path, "worker", "stubborn", stop_s=600.0))
    async with running.deployed() as supervisor:
        running.stopping.set()
        await asyncio.sleep(0.1)
        supervisor.abort()
    assert not any("did not end within" in text for _, text in running.reporter.lines)


async def test_the_state_file_follows_the_processes_and_goes_with_the_deployment(tmp_path: Path) -> None:
    running = Running(tmp_path, service(tmp_path, "worker", "obedient"))
    async with running.deployed() as supervisor:
        state = read_state(running.directory)
        assert state is not None
        assert state.pid == os.getpid()
        assert state.services["worker"].pid == supervisor.pid_of("worker")
        supervisor.kill("worker", signal.SIGKILL)
        await until(lambda: (read_state(running.directory) or state).services["worker"].restarts == 1)
    assert not running.directory.exists()


async def test_a_service_that_has_answered_is_started_again_however_often_it_dies(tmp_path: Path) -> None:
    running = Running(tmp_path, service(tmp_path, "worker", "obedient"), service(tmp_path, "gateway", "obedient"))
    async with running.deployed() as supervisor:
        kept = supervisor.pid_of("gateway")
        for restarts in range(3 * POLICY.give_up_after):
            await until(lambda: supervisor.pid_of("worker") is not None)
            assert supervisor.restarts_of("worker") == restarts
            pid = supervisor.pid_of("worker")
            supervisor.kill("worker")
            await until(lambda pid=pid: supervisor.pid_of("worker") != pid)  # type: ignore[misc]
        await until(lambda: any("serving again" in note for note in running.reporter.notes))
        assert supervisor.pid_of("gateway") == kept


async def test_a_model_that_cannot_be_kept_running_is_given_up_and_the_others_go_on(tmp_path: Path) -> None:
    good = replace(service(tmp_path, "good/worker", "obedient"), model="good")
    bad = replace(service(tmp_path, "bad/worker", "spoiled"), model="bad")
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
    running = Running(tmp_path, good, bad)
    async with running.deployed() as supervisor:
        kept = supervisor.pid_of("good/worker")
        supervisor.kill("bad/worker")
        await until(lambda: any("not served any more" in note for note in running.reporter.notes))
        assert supervisor.pid_of("good/worker") == kept


async def test_the_last_model_that_is_lost_ends_the_deployment(tmp_path: Path) -> None:
    (tmp_path / "only").mkdir()
    running = Running(tmp_path, replace(service(tmp_path, "only/worker", "spoiled"), model="only"))
    task = asyncio.create_task(running.supervisor.run(running.stopping))
    await asyncio.wait_for(running.supervisor.ready.wait(), 30)
    running.supervisor.kill("only/worker")
    with pytest.raises(ServiceFailedError, match="only/worker refused to start"):
        await asyncio.wait_for(task, 60)
