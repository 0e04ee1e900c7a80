"""Several worker processes as one: who listens where, and that they live and die together."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from common.errors import ConfigurationError
from common.settings import RpcSettings, Settings, WorkerSettings, load_settings
from deploy.ranks import commands_of, run_together
from tests.waiting import is_running, until

if TYPE_CHECKING:
    from pathlib import Path

SLEEP = "import time, os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"


def test_each_rank_has_its_own_port_device_and_metrics() -> None:
    worker = WorkerSettings(address="0.0.0.0:50053", device_index=2, metrics_port=9093)
    settings = Settings(worker=worker, rpc=RpcSettings(probe_port=9200))
    commands = commands_of(settings, ranks=2, cores=8, arguments=["--config", "pando.toml"])
    assert [command[-10:] for command in commands] == [
        ("--worker.address", "0.0.0.0:50053", "--worker.device_index", "2", "--worker.threads", "4",
         "--worker.metrics_port", "9093", "--rpc.probe_port", "9200"),
        ("--worker.address", "0.0.0.0:50054", "--worker.device_index", "3", "--worker.threads", "4",
         "--worker.metrics_port", "9094", "--rpc.probe_port", "9201"),
    ]  # fmt: skip
    assert all(command[3:6] == ("services.worker", "--config", "pando.toml") for command in commands)


def test_a_ranks_own_flags_win_over_those_that_were_given() -> None:
    worker = WorkerSettings(address="[::]:7000")
    arguments = ["--worker.address", "[::]:7000", "--worker.threads", "1"]
    last = commands_of(Settings(worker=worker), ranks=2, cores=2, arguments=arguments)[1]
    settings = load_settings("worker", "", last[4:], environ={})
    assert settings.worker.address == "[::]:7001"


@pytest.mark.parametrize(("address", "ranks"), [("unix:/tmp/worker.sock", 2), ("localhost", 2), ("host:1", 0)])
def test_addresses_and_rank_counts_without_consecutive_ports_are_refused(address: str, ranks: int) -> None:
    with pytest.raises(ConfigurationError):
        commands_of(Settings(worker=WorkerSettings(address=address)), ranks=ranks, cores=1, arguments=[])


async def test_a_rank_that_ends_stops_the_others(tmp_path: Path) -> None:
    lasting = (sys.executable, "-c", SLEEP, str(tmp_path / "pid"))
    failing = (sys.executable, "-c", f"import os, time\nwhile not os.path.exists({str(tmp_path / 'pid')!r}): "
               "time.sleep(0.01)\ntime.sleep(0.2); raise SystemExit(75)")  # fmt: skip
    assert await asyncio.wait_for(run_together([lasting, failing]), 30) == 75
    assert not is_running(int((tmp_path / "pid").read_text()))


async def test_a_rank_that_exits_normally_is_a_failure_of_the_group() -> None:
    assert await asyncio.wait_for(run_together([(sys.executable, "-c", "")]), 30) == 1


async def test_a_signal_ends_all_ranks_and_is_not_a_failure(tmp_path: Path) -> None:
    paths = [tmp_path / "first", tmp_path / "second"]
    running = asyncio.create_task(run_together([(sys.executable, "-c", SLEEP, str(path)) for path in paths]))
    await until(lambda: all(path.exists() and path.read_text() for path in paths))
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 30) == 0
    assert not any(is_running(int(path.read_text())) for path in paths)
