"""The faults of the campaign, by name. Each is applied to a system under load and returns the pause that it implies."""

from __future__ import annotations

import asyncio
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
STOPS_S = (8, 40, 75)
LINK_FAULT_S = 8.0
# Longer than peers wait for each other.
LONG_LINK_FAULT_S = 25.0
DELAY_S = 0.2
RESET_PAUSE_S = 0.5
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


def all_faults() -> list[Fault]:
    """Return the whole catalogue, in the order of the report."""
    return [
        *_kills("one"),
        *_stops("one", STOPS_S),
        *_link_faults("one"),
        *_redis_faults("one"),
        *_flips(),
        *_kills("two"),
        *_stops("two", (8, 40)),
        *_link_faults("two"),
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
            return seconds
        # The supervisor has taken it for stuck.
        return await system.until_up_again(found, started)

    return inject


# --- links ------------------------------------------------------------------------------------------------------------


def _link_faults(setting: str) -> Iterator[Fault]:
    black_hole = Weather(drops_requests=True, drops_answers=True)
    weathers = {
        "delayed": (delayed(DELAY_S), LINK_FAULT_S),
        "stalled": (Weather(is_stalled=True), LINK_FAULT_S),
        "requests-lost": (Weather(drops_requests=True), LINK_FAULT_S),
        "answers-lost": (Weather(drops_answers=True), LINK_FAULT_S),
        "black-hole": (black_hole, LONG_LINK_FAULT_S),
    }
    for link in LINKS if setting == "one" else ("tokenizer-scheduler", "scheduler-worker", "scheduler-detokenizer"):
        for times in (1, 7):
            short = setting == "one" and times == 7
            yield Fault(f"{setting}/{link}-reset-x{times}", setting, _reset(link, times), is_short=short)
        yield Fault(f"{setting}/{link}-refused", setting, _refuse(link))
        for name, (weather, seconds) in weathers.items():
            short = setting == "one" and (name, link) == ("requests-lost", "scheduler-detokenizer")
            yield Fault(f"{setting}/{link}-{name}", setting, _weather(link, weather, seconds), is_short=short)


def _flips() -> Iterator[Fault]:
    """Between services, links use mutual TLS, without which the bits of a token could flip without a trace."""
    weather = Weather(flip_bytes=FLIP_BYTES)
    for link in LINKS:
        short = link == "gateway-redis"
        yield Fault(f"tls/{link}-bits-flipped", "tls", _weather(link, weather, LINK_FAULT_S), is_short=short)


def _reset(link: str, times: int) -> Callable[[System], Awaitable[float]]:
    async def inject(system: System) -> float:
        for _ in range(times):
            await system.links[system.of_first_group(link)].reset()
            await asyncio.sleep(RESET_PAUSE_S)
        return RESET_PAUSE_S * (times - 1)

    return inject


def _refuse(link: str) -> Callable[[System], Awaitable[float]]:
    async def inject(system: System) -> float:
        async with system.links[system.of_first_group(link)].refusing():
            await asyncio.sleep(LINK_FAULT_S)
        return LINK_FAULT_S

    return inject


def _weather(link: str, weather: Weather, seconds: float) -> Callable[[System], Awaitable[float]]:
    async def inject(system: System) -> float:
        async with system.links[system.of_first_group(link)].under(weather):
            await asyncio.sleep(seconds)
        return seconds

    return inject


# --- the shared state -------------------------------------------------------------------------------------------------


def _redis_faults(setting: str) -> Iterator[Fault]:
    yield Fault(f"{setting}/redis-killed", setting, _redis_killed(REDIS_AWAY_S))
    yield Fault(f"{setting}/redis-restarted", setting, _redis_killed(0.0), is_short=True)
    yield Fault(f"{setting}/redis-hung", setting, _redis_hung)


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
