"""The faults of the campaign, by name. Each is applied to a system under load and returns the pause that it implies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.chaos.links import Weather, delayed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from tests.chaos.system import System

SERVICES = ("gateway", "tokenizer", "scheduler", "worker", "detokenizer")
LINKS = (
    "gateway-tokenizer",
    "tokenizer-scheduler",
    "scheduler-worker",
    "scheduler-detokenizer",
    "detokenizer-gateway",
    "gateway-redis",
)
# Of calls for prompts, and of their pages.
BETWEEN_GROUPS = ("scheduler-1-scheduler-0", "worker-1-worker-0")
STOPS_S = (8, 40, 75)
LINK_FAULT_S = 8.0
# Longer than peers wait for each other.
LONG_LINK_FAULT_S = 25.0
SHORT_RESETS = ("gateway-tokenizer", "scheduler-worker", "scheduler-detokenizer", "gateway-redis")
SHORT_LINK_FAULTS = ("one/scheduler-detokenizer-requests-lost", "one/scheduler-worker-answers-lost")
DELAY_S = 0.2
BLACK_HOLE = Weather(drops_requests=True, drops_answers=True)
RESET_PAUSE_S = 0.5
# More than a handshake, and less than the pages of a prompt.
CUT_BYTES = 16_384
CUT_WAIT_S = 10.0
# So that a second of an idle link has some, and of a busy one many.
FLIP_BYTES = 3000
# A restarted service has not answered yet at this time.
WHILE_RECOVERING_S = 0.4
REDIS_AWAY_S = 4.0


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of `setting`, one of `SETTINGS` of the campaign.

    `inject` returns once the fault has ended, with the seconds in which the failed part itself could not serve. Streams
    may break `reconnects` times.
    """

    name: str
    setting: str
    inject: Callable[[System], Awaitable[float]]
    reconnects: int = 0
    # One of the faults of the short campaign.
    is_short: bool = False
    # It ends the system, which has to finish what is open; no request begins after it.
    ends: bool = False


class BrokenPromiseError(Exception):
    """What a service has kept is gone, or it refuses what it could do."""


def all_faults() -> list[Fault]:
    """Return the whole catalogue, in the order of the report."""
    return [
        *_kills("one"),
        *_stops("one", STOPS_S),
        *_link_faults("one"),
        *_redis_faults("one"),
        _upgrade("one"),
        *_endings("one"),
        *_flips(),
        *_disk_faults(),
        *_kills("two"),
        *_stops("two", (8, 40)),
        *_link_faults("two"),
        _upgrade("two"),
        *_stage_faults(),
        *_role_faults(),
        *_mixed_faults(),
    ]


# --- processes --------------------------------------------------------------------------------------------------------


def _kills(setting: str) -> Iterator[Fault]:
    for name in SERVICES:
        short = setting == "one" or name in ("scheduler", "worker")
        yield Fault(f"{setting}/kill-{name}", setting, _kill(name), _reconnects(name), is_short=short)
    if setting == "two":
        yield Fault("two/kill-scheduler+worker", setting, _kill("scheduler", "worker"))
        return
    for first, second in itertools.combinations(SERVICES, 2):
        name = f"{setting}/kill-{first}+{second}"
        short = (first, second) == ("scheduler", "detokenizer")
        yield Fault(name, setting, _kill(first, second), _reconnects(first, second), is_short=short)
    for name in SERVICES:
        yield Fault(f"{setting}/kill-{name}-recovering", setting, _kill_twice(name), _reconnects(name))


def _stage_faults() -> Iterator[Fault]:
    """Of two stages of a pipeline, `worker-1` is the last one, which samples.

    No token is in the answers of `worker-0`: they are lost for longer than the scheduler waits for its heartbeats.
    """
    for names in (("worker-0",), ("worker-1",), ("worker-0", "worker-1"), ("scheduler", "worker-1")):
        short = names == ("worker-0",)
        yield Fault(f"stages/kill-{'+'.join(names)}", "stages", _kill(*names), is_short=short)
    yield Fault("stages/kill-worker-1-recovering", "stages", _kill_twice("worker-1"))
    for name in ("worker-0", "worker-1"):
        yield Fault(f"stages/stop-8s-{name}", "stages", _stop(name, STOPS_S[0]))
        link = f"scheduler-{name}"
        lost = Weather(drops_answers=True)
        yield Fault(f"stages/{link}-answers-lost", "stages", _weather(link, lost, LONG_LINK_FAULT_S))


def _role_faults() -> Iterator[Fault]:
    """Group 0 computes prompts, group 1 reads their pages and generates."""
    pairs = ("scheduler-0", "worker-1"), ("worker-0", "scheduler-1")
    for names in (("scheduler-0",), ("worker-0",), ("scheduler-1",), ("worker-1",), *pairs):
        yield Fault(f"roles/kill-{'+'.join(names)}", "roles", _kill(*names), is_short=names == ("worker-1",))
    for name in ("scheduler-0", "worker-0", "worker-1"):
        yield Fault(f"roles/stop-8s-{name}", "roles", _stop(name, STOPS_S[0]))
    for link in ("tokenizer-scheduler-0", "scheduler-worker-0", *BETWEEN_GROUPS):
        yield Fault(f"roles/{link}-black-hole", "roles", _weather(link, BLACK_HOLE, LONG_LINK_FAULT_S))
    for link in BETWEEN_GROUPS:
        yield Fault(f"roles/{link}-delayed", "roles", _weather(link, delayed(DELAY_S), LINK_FAULT_S))
        yield Fault(f"roles/{link}-refused", "roles", _refuse(link))
    for times in (1, 7):
        name = f"roles/worker-1-worker-0-cut-in-transfer-x{times}"
        yield Fault(name, "roles", _cut("worker-1-worker-0", times), is_short=times == 7)


def _mixed_faults() -> Iterator[Fault]:
    """Faults while requests of all kinds are answered."""
    for name in SERVICES:
        yield Fault(f"mixed/kill-{name}", "mixed", _kill(name), _reconnects(name), is_short=name == "worker")
        yield Fault(f"mixed/stop-8s-{name}", "mixed", _stop(name, STOPS_S[0]))
    for link in LINKS:
        yield Fault(f"mixed/{link}-reset-x7", "mixed", _reset(link, 7))
    for link in ("gateway-tokenizer", "scheduler-worker"):
        lost = Weather(drops_answers=True)
        yield Fault(f"mixed/{link}-answers-lost", "mixed", _weather(link, lost, LINK_FAULT_S))


def _stops(setting: str, durations_s: tuple[int, ...]) -> Iterator[Fault]:
    for seconds, name in itertools.product(durations_s, SERVICES):
        # The supervisor kills a gateway that hangs.
        reconnects = _reconnects(name) if seconds > 60 else 0
        short = setting == "one" and seconds == STOPS_S[0] and name in ("worker", "detokenizer")
        yield Fault(f"{setting}/stop-{seconds}s-{name}", setting, _stop(name, seconds), reconnects, is_short=short)


def _reconnects(*names: str) -> int:
    return 1 if "gateway" in names else 0


def _kill(*names: str) -> Callable[[System], Awaitable[float]]:
    async def inject(system: System) -> float:
        found = [system.of_first_group(name) for name in names]
        since = time.monotonic()
        for name in found:
            system.kill(name)
        return max([await system.until_up_again(name, since) for name in found])

    return inject


def _kill_twice(name: str) -> Callable[[System], Awaitable[float]]:
    async def inject(system: System) -> float:
        found = system.of_first_group(name)
        started, first = time.monotonic(), system.supervisor.pid_of(found)
        system.kill(found)
        async with asyncio.timeout(60):
            while system.supervisor.pid_of(found) in (None, first):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await asyncio.sleep(WHILE_RECOVERING_S)
        since = time.monotonic()
        system.kill(found)
        return since - started + await system.until_up_again(found, since)

    return inject


def _stop(name: str, seconds: float) -> Callable[[System], Awaitable[float]]:
    async def inject(system: System) -> float:
        found = system.of_first_group(name)
        started, pid = time.monotonic(), system.supervisor.pid_of(found)
        system.kill(found, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        if system.supervisor.pid_of(found) == pid:
            system.kill(found, signal.SIGCONT)
            return time.monotonic() - started
        # The supervisor has taken it for stuck.
        return await system.until_up_again(found, started)

    return inject


# --- links ------------------------------------------------------------------------------------------------------------


def _link_faults(setting: str) -> Iterator[Fault]:
    weathers = {
        "delayed": (delayed(DELAY_S), LINK_FAULT_S),
        "stalled": (Weather(is_stalled=True), LINK_FAULT_S),
        "requests-lost": (Weather(drops_requests=True), LINK_FAULT_S),
        "answers-lost": (Weather(drops_answers=True), LINK_FAULT_S),
        "black-hole": (BLACK_HOLE, LONG_LINK_FAULT_S),
    }
    for link in LINKS if setting == "one" else ("tokenizer-scheduler", "scheduler-worker", "scheduler-detokenizer"):
        for times in (1, 7):
            short = setting == "one" and times == 7 and link in SHORT_RESETS
            yield Fault(f"{setting}/{link}-reset-x{times}", setting, _reset(link, times), is_short=short)
        yield Fault(f"{setting}/{link}-refused", setting, _refuse(link))
        for name, (weather, seconds) in weathers.items():
            short = f"{setting}/{link}-{name}" in SHORT_LINK_FAULTS
            yield Fault(f"{setting}/{link}-{name}", setting, _weather(link, weather, seconds), is_short=short)


def _flips() -> Iterator[Fault]:
    """Between services, links use mutual TLS, without which the bits of a token could flip without a trace."""
    weather = Weather(flip_bytes=FLIP_BYTES)
    for link in LINKS:
        short = link == "gateway-redis"
        yield Fault(f"tls/{link}-bits-flipped", "tls", _weather(link, weather, LINK_FAULT_S), is_short=short)


def _reset(link: str, times: int) -> Callable[[System], Awaitable[float]]:
    async def inject(system: System) -> float:
        began_at = last_at = time.monotonic()
        for _ in range(times):
            last_at = time.monotonic()
            await system.links[system.of_first_group(link)].reset()
            await asyncio.sleep(RESET_PAUSE_S)
        return last_at - began_at

    return inject


def _cut(link: str, times: int) -> Callable[[System], Awaitable[float]]:
    """Reset connections while they carry an answer, which is slow, or after a time without one."""

    async def inject(system: System) -> float:
        began_at, cut, found = time.monotonic(), 0, system.links[link]
        async with found.under(delayed(DELAY_S)):
            for _ in range(times):
                before = found.answered_bytes
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CUT_WAIT_S):
                        while found.answered_bytes < before + CUT_BYTES:  # noqa: ASYNC110
                            await asyncio.sleep(0.005)
                        cut += 1
                await found.reset()
        if not cut:
            raise BrokenPromiseError(f"nothing was sent over {link} that could be cut")
        return time.monotonic() - began_at

    return inject


def _refuse(link: str) -> Callable[[System], Awaitable[float]]:
    async def inject(system: System) -> float:
        began_at = time.monotonic()
        async with system.links[system.of_first_group(link)].refusing():
            await asyncio.sleep(LINK_FAULT_S)
        return time.monotonic() - began_at

    return inject


def _weather(link: str, weather: Weather, seconds: float) -> Callable[[System], Awaitable[float]]:
    async def inject(system: System) -> float:
        began_at = time.monotonic()
        async with system.links[system.of_first_group(link)].under(weather):
            await asyncio.sleep(seconds)
        return time.monotonic() - began_at

    return inject


# --- the shared state -------------------------------------------------------------------------------------------------


def _redis_faults(setting: str) -> Iterator[Fault]:
    yield Fault(f"{setting}/redis-killed", setting, _redis_killed(REDIS_AWAY_S))
    yield Fault(f"{setting}/redis-restarted", setting, _redis_killed(0.0), is_short=True)
    yield Fault(f"{setting}/redis-hung", setting, _redis_hung)
    read_only = _writes_refused("REPLICAOF", "127.0.0.1", "1", undo=("REPLICAOF", "NO", "ONE"))
    yield Fault(f"{setting}/redis-read-only", setting, read_only)
    full = _writes_refused("CONFIG", "SET", "maxmemory", "1", undo=("CONFIG", "SET", "maxmemory", "0"))
    yield Fault(f"{setting}/redis-full", setting, full)
    yield Fault(f"{setting}/redis-records-damaged", setting, _records_damaged)


def _redis_killed(away_s: float) -> Callable[[System], Awaitable[float]]:
    async def inject(system: System) -> float:
        await asyncio.to_thread(system.redis.kill)
        await asyncio.sleep(away_s)
        await asyncio.to_thread(system.redis.start)
        return 0.0

    return inject


async def _redis_hung(system: System) -> float:
    system.redis.signal(signal.SIGSTOP)
    await asyncio.sleep(LINK_FAULT_S)
    system.redis.signal(signal.SIGCONT)
    return 0.0


def _writes_refused(*command: str, undo: tuple[str, ...]) -> Callable[[System], Awaitable[float]]:
    """Let the state server refuse writes between two commands."""

    async def inject(system: System) -> float:
        with system.redis.client() as client:
            await asyncio.to_thread(client.execute_command, *command)
            await asyncio.sleep(LINK_FAULT_S)
            await asyncio.to_thread(client.execute_command, *undo)
        return 0.0

    return inject


async def _records_damaged(system: System) -> float:
    """Overwrite owners and chunks of all recorded answers, which a gateway then cannot continue."""
    with system.redis.client() as client:
        for key in client.scan_iter("*item:*"):
            client.hset(key, "owner", "somebody:1")
        for key in client.scan_iter("*chunks:*"):
            client.lset(key, 0, "damaged")
    await asyncio.sleep(1.0)
    return 0.0


# --- upgrades and ends ------------------------------------------------------------------------------------------------


def _upgrade(setting: str) -> Fault:
    """Replace all services in order, as an upgrade does: each drains, ends, and starts again."""

    async def inject(system: System) -> float:
        longest = 0.0
        groups = [[name for name in system.services if name.endswith(f"-{number}")] for number in range(system.groups)]
        together = groups if system.groups > 1 else [["scheduler", "worker"]]
        for names in [*together, ["detokenizer"], ["tokenizer"], ["gateway"]]:
            since = time.monotonic()
            for name in names:
                system.kill(name, signal.SIGINT)
            longest = max([longest, *[await system.until_up_again(name, since) for name in names]])
            await system.until_ready()
        return longest

    # The only gateway drains, but ends what is open after its `drain_s`.
    return Fault(f"{setting}/upgrade", setting, inject, 1, is_short=setting == "one")


def _endings(setting: str) -> Iterator[Fault]:
    """systemd sends SIGTERM to all processes of a unit at once, and again while they end."""
    yield Fault(f"{setting}/systemd-stop", setting, _end(None), is_short=True, ends=True)
    for name in ("tokenizer", "scheduler", "worker", "detokenizer"):
        yield Fault(f"{setting}/systemd-stop-kill-{name}", setting, _end(name), ends=True)


def _end(killed: str | None) -> Callable[[System], Awaitable[float]]:
    async def inject(system: System) -> float:
        ending = asyncio.create_task(system.end())
        for _ in range(2):
            for name in system.services:
                system.kill(name, signal.SIGTERM)
            await asyncio.sleep(0.1)
        since = time.monotonic()
        if killed is not None:
            system.kill(killed)
        await ending
        # It is started again only while open requests need it.
        return max((at - since for at in system.reporter.came_up.get(killed or "", ()) if at > since), default=0.0)

    return inject


# --- disks ------------------------------------------------------------------------------------------------------------

KEYRING = "keyring.db"
RESPONSES = "responses.sqlite"
STORES_AGAIN_S = 15.0
HOLDERS = {KEYRING: "scheduler", RESPONSES: "gateway"}


def _disk_faults() -> Iterator[Fault]:
    """Stored responses, the keyring and stored pages are on one disk; its users are restarted meanwhile."""
    for name, service in HOLDERS.items():
        what, reconnects = name.partition(".")[0], _reconnects(service)
        yield Fault(f"disk/{what}-full", "disk", _full(name), reconnects, is_short=name == RESPONSES)
        # The gateway is restarted twice.
        yield Fault(f"disk/{what}-read-only", "disk", _read_only(name), 2)
        yield Fault(f"disk/{what}-damaged", "disk", _damaged(name), reconnects)


def _full(name: str) -> Callable[[System], Awaitable[float]]:
    async def inject(system: System) -> float:
        kept = await system.store_response()
        async with system.disk.full():
            await system.try_to_store()
            own_s = await _restarted(system, HOLDERS[name])
            await system.until_ready()
            await system.try_to_store()
        await _check_kept(system, kept)
        return own_s

    return inject


def _read_only(name: str) -> Callable[[System], Awaitable[float]]:
    async def inject(system: System) -> float:
        kept = await system.store_response()
        since = time.monotonic()
        # Processes that have files open for writing keep a disk from becoming read-only.
        users = ["gateway", "scheduler", "worker"]
        for user in users:
            system.kill(user)
        async with system.disk.read_only():
            own_s = max([await system.until_up_again(user, since) for user in users])
            await system.until_ready()
            await system.try_to_store()
            await asyncio.sleep(LINK_FAULT_S)
        # Files that could only be read are opened for writing by a process that starts.
        own_s = max(own_s, await _restarted(system, HOLDERS[name]))
        await system.until_ready()
        await _check_kept(system, kept)
        return own_s

    return inject


def _damaged(name: str) -> Callable[[System], Awaitable[float]]:
    async def inject(system: System) -> float:
        await system.store_response()
        system.disk.damage(name)
        own_s = await _restarted(system, HOLDERS[name])
        await system.until_ready()
        await _check_kept(system, await system.store_response())
        return own_s

    return inject


async def _restarted(system: System, name: str) -> float:
    since = time.monotonic()
    system.kill(name)
    return await system.until_up_again(name, since)


async def _check_kept(system: System, response_id: str) -> None:
    if not await system.has_response(response_id):
        raise BrokenPromiseError("a response that had been stored is gone")
    give_up_at = time.monotonic() + STORES_AGAIN_S
    while not await system.try_to_store():
        if time.monotonic() > give_up_at:
            raise BrokenPromiseError(f"responses are not stored again within {STORES_AGAIN_S:g} s")
        await asyncio.sleep(0.5)
