"""Runs several ranks of one model in one pod or container, where no supervisor manages them individually.

`python -m deploy.ranks --ranks 8 --config pando.toml` runs eight worker processes with the same settings; rank i
listens on the configured port + i, reports metrics on the configured port + i, and uses the configured GPU + i. When
one rank ends, all are ended, because a rank that lost a peer may hang in a collective forever; the container is then
expected to be restarted.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING

from common.errors import ConfigurationError
from common.settings import SettingsParser, parse_settings
from deploy.supervisor.layout import available_cores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.settings import Settings

MODULE = "services.worker"
# Seconds that ranks have to end after SIGTERM, once their scheduler has drained, before they are killed.
STOP_S = 8.0


def main() -> int:
    """Run the ranks until a signal arrives or one of them ends; return the exit status."""
    parser = SettingsParser(prog="python -m deploy.ranks", description=__doc__, allow_abbrev=False)
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="processes to run")
    try:
        settings, arguments = parse_settings(parser, sys.argv[1:])
        commands = commands_of(settings, arguments.ranks, available_cores(), _without_ranks(sys.argv[1:]))
    except ConfigurationError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    stop_s = settings.scheduler.drain_s + STOP_S
    return asyncio.run(run_together([(sys.executable, *command) for command in commands], stop_s))


def commands_of(settings: Settings, ranks: int, cores: int, arguments: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the interpreter's arguments for each rank: `arguments`, then the settings of the rank.

    Raises:
        ConfigurationError: `ranks` is less than 1, or the worker's address has no port.
    """
    worker = settings.worker
    if ranks < 1:
        raise ConfigurationError(f"--ranks must be at least 1, not {ranks}")
    host, colon, port = worker.address.rpartition(":")
    if not colon or not port.isdecimal():
        raise ConfigurationError(f"worker.address must be host:port for several ranks, not {worker.address}")
    threads = worker.threads or max(1, cores // ranks)
    commands = []
    for rank in range(ranks):
        own: dict[str, object] = {
            "worker.address": f"{host}:{int(port) + rank}",
            "worker.device_index": worker.device_index + rank,
            "worker.threads": threads,
        }
        if worker.metrics_port is not None:
            own["worker.metrics_port"] = worker.metrics_port + rank
        if settings.rpc.probe_port is not None:
            own["rpc.probe_port"] = settings.rpc.probe_port + rank
        flags = [text for name, value in own.items() for text in (f"--{name}", str(value))]
        # The child is killed when this process ends, even by SIGKILL.
        commands.append(("-m", "deploy.supervisor.child", str(os.getpid()), MODULE, *arguments, *flags))
    return commands


async def run_together(commands: Sequence[Sequence[str]], stop_s: float = STOP_S) -> int:
    """Run all commands until a signal arrives or one of them ends; return 0 after a signal, otherwise the first status.

    After a signal, they have `stop_s` seconds to end.

    If a command ends without a signal, the group has failed: a status of 0 becomes 1.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    processes = [await asyncio.create_subprocess_exec(*command) for command in commands]
    ends = [asyncio.create_task(process.wait()) for process in processes]
    signalled = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait([*ends, signalled], return_when=asyncio.FIRST_COMPLETED)
        first = next((end.result() for end in ends if end.done()), 0)
    finally:
        signalled.cancel()
        # After a failure, the other ranks may hang.
        await _end(processes, ends, stop_s if stopping.is_set() else STOP_S)
    return 0 if stopping.is_set() else (first if first > 0 else 1)


async def _end(
    processes: Sequence[asyncio.subprocess.Process], ends: Sequence[asyncio.Task[int]], stop_s: float
) -> None:
    for process in processes:
        if process.returncode is None:
            process.terminate()
    _, late = await asyncio.wait(ends, timeout=stop_s)
    for process in processes:
        if late and process.returncode is None:
            process.kill()
    await asyncio.gather(*ends)


def _without_ranks(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without --ranks and its number."""
    kept = list(arguments)
    for index, argument in enumerate(kept):
        if argument.startswith("--ranks"):
            del kept[index : index + (1 if "=" in argument else 2)]
            break
    return kept


if __name__ == "__main__":
    sys.exit(main())
