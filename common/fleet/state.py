"""The state that the scheduler groups and tokenizers of a fleet share, in a Redis or Valkey server."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from common.errors import ConfigurationError, UnavailableError
from common.fleet.names import FleetKeys
from common.section import read_secret

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable, Sequence

    from redis.asyncio import Redis

    from common.settings import FleetSettings

T = TypeVar("T")

SCHEMES = ("redis://", "rediss://", "unix://")
LEAST_SECRET = 32
TIMEOUT_S = 1.0
# Facts that are kept for groups that start later or were away; a demotion or quarantine is one.
KEPT_FACTS = 65_536
# Facts read at a time.
_FACTS_A_CALL = 1000
_NAMES_A_CALL = 4096
# Windows counted in one script, which others wait for.
_WINDOWS_A_CALL = 64
_FIELD = b"sealed"


class FleetStateAwayError(UnavailableError):
    """The server does not answer in time, or answers with an error."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the state that the scheduler groups share is not available: {reason}", retry_after_ms=1000)


class FleetRulesError(UnavailableError):
    """Another group of the fleet has other rules of promotion."""

    def __init__(self, theirs: str) -> None:
        super().__init__(f"other groups of the fleet promote by other rules: {theirs}", retry_after_ms=1000)
        self.theirs = theirs


@dataclass(frozen=True, slots=True)
class PromotionRules:
    """When evidence makes a prefix shared; all groups of a fleet must have the same."""

    subjects: int
    factor: int
    epochs: int
    epoch_s: float

    def __str__(self) -> str:
        return f"{self.subjects} subjects (×{self.factor}) within {self.epochs} epochs of {self.epoch_s:g} s"

    @property
    def window_ms(self) -> int:
        """Lifetime of evidence, and of a decision that is not used."""
        return max(1, round((self.epochs + 1) * self.epoch_s * 1000))


@dataclass(frozen=True, slots=True)
class NamedEvidence:
    """One subject's computation of nested prefixes: (name, tag, whether a demotion is known) of each."""

    prefixes: tuple[tuple[bytes, bytes, bool], ...]
    age_epochs: int = 0


@dataclass(frozen=True, slots=True)
class NamedWindow:
    """One group's part of a window that has closed: hits, and the marks of distinct subjects or continuations."""

    name: bytes
    hits: int
    marks: tuple[bytes, ...]


class FleetState:
    """Commands to the state server; each raises `FleetStateAwayError` if the server does not answer in time.

    Keys: `e:NAME` are the tags of a prefix with their expiry, `s:NAME` exists while the prefix is shared, `g:NAME`
    after a demotion; `w:NAME` are the last windows of each group in which a prefix was hit; `facts` is a stream of
    sealed facts, `pins` a hash of sealed prompts, and `incarnation` changes when the server has lost its data.
    """

    def __init__(self, redis: Redis, root: str, timeout_s: float = TIMEOUT_S) -> None:
        self._redis = redis
        self._timeout_s = timeout_s
        self._root = root
        # Services without a fleet start sooner if they do not import the client.
        from common.lua_scripts import LuaScript

        self._evidence = LuaScript(redis, "common.fleet", "evidence.lua")
        self._probing = LuaScript(redis, "common.fleet", "probing.lua")

    async def incarnation(self) -> bytes:
        """Return an id that changes when the server has lost its data."""
        key = f"{self._root}:incarnation"
        await self._call(self._redis.set(key, secrets.token_bytes(8), nx=True))
        found = await self._call(self._redis.get(key))
        if not isinstance(found, bytes):
            raise FleetStateAwayError("it keeps nothing")
        return found

    async def add_evidence(self, evidence: Sequence[NamedEvidence], rules: PromotionRules) -> None:
        """Count evidence; each subject's is one atomic script, which also decides.

        Raises:
            FleetRulesError: other groups have other rules; nothing was counted.
        """
        window_ms = rules.window_ms
        # Also without evidence, so that a difference of the rules is found at the start.
        for one in evidence or (NamedEvidence(()),):
            age_ms = round(one.age_epochs * rules.epoch_s * 1000)
            arguments: list[str | int | bytes] = [str(rules), rules.subjects, rules.factor, window_ms, age_ms]
            for name, tag, is_demoted in one.prefixes:
                arguments += [name, tag, int(is_demoted)]
            await self._call(self._evidence(keys=[self._root], args=arguments))

    async def count_windows(
        self, group: bytes, windows: Sequence[NamedWindow], epoch_s: float
    ) -> list[tuple[int, int, int, int]]:
        """Add a group's windows of the epoch that has ended; return all groups' sums, in the same order.

        A sum is (hits, distinct marks, previous hits, previous distinct marks).
        """
        sums: list[tuple[int, int, int, int]] = []
        for first in range(0, len(windows), _WINDOWS_A_CALL):
            some = windows[first : first + _WINDOWS_A_CALL]
            arguments: list[bytes | int] = [group, max(1, round(1000 * epoch_s))]
            for window in some:
                arguments += [window.name, window.hits, len(window.marks), *window.marks]
            sums += await self._call(_sums(len(some), self._probing(keys=[self._root], args=arguments)))
        return sums

    async def look_up(self, names: Sequence[bytes]) -> set[bytes]:
        """Return those of the prefixes `names` that are shared."""
        found: set[bytes] = set()
        for first in range(0, len(names), _NAMES_A_CALL):
            some = names[first : first + _NAMES_A_CALL]
            values = self._redis.mget([self._key(b"s", name) for name in some])
            found |= await self._call(_present(some, values))
        return found

    async def renew(self, names: Iterable[bytes], window_ms: int) -> None:
        """Prolong the decisions about prefixes that are in use; those that have expired stay expired."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.pexpire(self._key(b"s", name), window_ms, gt=True)
            await self._call(pipeline.execute())

    async def revoke(self, names: Iterable[bytes], window_ms: int) -> None:
        """Stop sharing prefixes; sharing them again takes more evidence."""
        async with self._redis.pipeline(transaction=True) as pipeline:
            for name in names:
                pipeline.delete(self._key(b"s", name))
                pipeline.set(self._key(b"g", name), b"1", px=1000 * window_ms)
            await self._call(pipeline.execute())

    async def share_forever(self, name: bytes, *, is_shared: bool) -> None:
        """Declare a prefix shared, or not any more, without evidence."""
        key = self._key(b"s", name)
        await self._call(self._redis.set(key, b"1") if is_shared else self._redis.delete(key))

    async def publish(self, sealed: bytes) -> None:
        """Append a fact for all groups."""
        await self._call(self._redis.xadd(f"{self._root}:facts", {_FIELD: sealed}, maxlen=KEPT_FACTS))

    async def read(self, after: bytes) -> tuple[bytes, list[bytes]]:
        """Return all facts after the position `after` (`START` at first), and the new position."""
        facts: list[bytes] = []
        while True:
            answer = self._redis.xread({f"{self._root}:facts": after}, count=_FACTS_A_CALL)
            entries = await self._call(_entries(answer))
            facts.extend(fields[_FIELD] for _, fields in entries)
            after = entries[-1][0] if entries else after
            if len(entries) < _FACTS_A_CALL:
                return after, facts

    async def pin_names(self) -> set[bytes]:
        """Return the names of all pins."""
        return await self._call(_names(self._redis.hkeys(f"{self._root}:pins")))

    async def pin(self, name: bytes) -> bytes | None:
        """Return a sealed pin; None if it has been removed."""
        found = await self._call(self._redis.hget(f"{self._root}:pins", name))
        return found if isinstance(found, bytes) else None

    async def set_pin(self, name: bytes, sealed: bytes | None) -> None:
        """Add a pin, or remove it if `sealed` is None."""
        key = f"{self._root}:pins"
        await self._call(self._redis.hdel(key, name) if sealed is None else self._redis.hset(key, name, sealed))

    async def close(self) -> None:
        await self._redis.aclose()

    def _key(self, kind: bytes, name: bytes) -> bytes:
        return self._root.encode() + b":" + kind + b":" + name

    async def _call(self, command: Awaitable[T]) -> T:
        """Return the result of `command`, which includes reading the answer.

        Raises:
            FleetRulesError: other groups have other rules.
            FleetStateAwayError: the server answers with an error, unintelligibly or not in time.
        """
        from redis.exceptions import ResponseError

        try:
            async with asyncio.timeout(self._timeout_s):
                return await command
        except ResponseError as error:
            if str(error).startswith("RULES "):
                raise FleetRulesError(str(error).removeprefix("RULES ")) from error
            raise FleetStateAwayError(str(error)) from error
        except Exception as error:
            # Not only errors of the library: uvloop raises RuntimeError for a connection that has just been reset, and
            # an answer with a flipped bit may raise anything.
            raise FleetStateAwayError(str(error) or type(error).__name__) from error


START = b"0-0"


async def _sums(count: int, call: Awaitable[Iterable[int | bytes]]) -> list[tuple[int, int, int, int]]:
    """Return `count` sums of windows.

    Raises:
        ValueError: there is another number of them.
    """
    sums = list(zip(*[map(int, await call)] * 4, strict=True))
    if len(sums) != count:
        raise ValueError(f"{len(sums)} sums of {count} windows")
    return sums


async def _present(names: Sequence[bytes], call: Awaitable[Sequence[object]]) -> set[bytes]:
    """Return those names that have a value."""
    return {name for name, value in zip(names, await call, strict=True) if value is not None}


async def _names(call: Awaitable[Iterable[object]]) -> set[bytes]:
    return {name for name in await call if isinstance(name, bytes)}


async def _entries(call: Awaitable[object]) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Return the entries of the one stream in an answer of XREAD, in either version of the protocol."""
    answer = await call
    if not answer:
        return []
    if isinstance(answer, dict):
        (batches,) = answer.values()
        return [entry for batch in batches for entry in batch]
    assert isinstance(answer, list), "XREAD answers with a list or a map"
    ((_, entries),) = answer
    return list(entries)


def open_fleet(settings: FleetSettings, timeout_s: float = TIMEOUT_S) -> tuple[FleetState, FleetKeys] | None:
    """Prepare a connection to the state in the settings, without opening it; None if there is none.

    A command waits for its answer for `timeout_s`.

    Raises:
        ConfigurationError: the URL or the secret is invalid.
    """
    url = read_secret("fleet.state", settings.state)
    secret = read_secret("fleet.secret", settings.secret, LEAST_SECRET)
    if url is None or secret is None:
        return None
    if not url.startswith(SCHEMES):
        raise ConfigurationError(f"fleet.state should be a URL that begins with {', '.join(SCHEMES)}")
    # Services without a fleet start sooner if they do not import the client.
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    try:
        # `FleetState` sets deadlines, and calls again later.
        redis = Redis.from_url(url, socket_timeout=None, socket_connect_timeout=None, retry=Retry(NoBackoff(), 0))
    except (TypeError, ValueError) as error:
        # The error's own message may quote the URL, which may contain a password.
        raise ConfigurationError("fleet.state is not a URL of a Redis or Valkey server") from error
    keys = FleetKeys(secret)
    return FleetState(redis, keys.root, timeout_s), keys
