"""The scene of every oracle: the server, the effort, and the identities."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from deploy.evaluation.attack.prober import AttackError, at_once

if TYPE_CHECKING:
    import random
    from collections.abc import Coroutine, Iterable
    from pathlib import Path

    from deploy.evaluation.attack.prober import Prober, ProbeTexts

UNKNOWN = "unknown"
# Requests that are sent at the same time where their order does not matter.
PARALLEL = 6
T = TypeVar("T")
# Beyond an epoch, so that the boundary itself has passed: the scheduler looks at its clock four times a second.
MARGIN_S = 0.6
# What a boundary may take on a busy machine until the harness says that there is none.
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class VictimKeys:
    """API keys beside the prober's own, which vouches for its users: these are the victims and their neighbours.

    `plain` and `personal` belong to the victims' tenant: an ordinary key, and one that stands for a person. `rival` and
    `third` are ordinary keys of two other tenants; `rival_app` belongs to the first of these and vouches for its users.
    `isolated` belongs to a tenant that shares nothing, and vouches for its users. `admin` may administrate: what it
    reads is the positive control of what others must not.
    """

    plain: str | None = None
    personal: str | None = None
    rival: str | None = None
    rival_app: str | None = None
    third: str | None = None
    isolated: str | None = None
    admin: str | None = None


@dataclass(frozen=True, slots=True)
class Server:
    """A server under attack. What is not known of it makes oracles not applicable, never wrong.

    `mode` is `UNKNOWN` if it is not given; `capacity_tokens` is the KV memory that a flood has to fill; `rows` the
    number of requests that run at the same time; `sibling_url` another server over the same storage, with the same
    keys; `storage` the directory of that storage, if the attacker can write to it; `policy` the order of the waiting
    queue; `has_keys` says whether requests need a credential; `model` is the model's name in results, if it is not the
    one that the server gives.
    """

    mode: str = UNKNOWN
    model: str | None = None
    promotion_subjects: int = 3
    epoch_seconds: float = 10.0
    capacity_tokens: int | None = None
    credentials: VictimKeys = field(default_factory=VictimKeys)
    sibling_url: str | None = None
    storage: Path | None = None
    policy: str | None = None
    rows: int = 64
    has_keys: bool = True

    @property
    def promotes(self) -> bool:
        """Whether text that enough people have sent becomes shared; without credentials, people cannot be named."""
        return self.mode == "user_aware" and self.has_keys


@dataclass(frozen=True, slots=True)
class Effort:
    """Numbers of observations; the defaults are enough to decide every oracle (± 0.06 of AUC).

    `QUICK` is enough for the exact ones. `times`: whether times are looked at, which takes many pairs.
    """

    times: bool = True
    pairs: int = 250
    queues: int = 16
    candidates: int = 40
    duplicate_batches: int = 45
    duplicates: int = 8
    boundary_texts: int = 24
    stored_texts: int = 16
    flood_capacities: float = 1.25


QUICK = Effort(times=False, pairs=8, queues=12, boundary_texts=6, stored_texts=4)


@dataclass(slots=True)
class Scene:
    """One attack on one server, and on `sibling` where storage is looked into.

    Names are counted, so that no oracle's texts and users are another's.
    """

    prober: Prober
    server: Server
    effort: Effort
    texts: ProbeTexts
    chance: random.Random
    sibling: Prober | None = None
    _names: int = field(default=0)

    def name(self) -> str:
        """Return a name that was not used before."""
        self._names += 1
        return f"{self._names}"

    def user(self, role: str) -> str:
        """Return the name of a user who has asked nothing yet."""
        return f"{role}-{self.name()}"

    async def at_once(self, work: Iterable[Coroutine[None, None, T]]) -> list[T]:
        """Do independent pieces of work, a few of them at the same time; return their results in order."""
        room = asyncio.Semaphore(PARALLEL)

        async def one(piece: Coroutine[None, None, T]) -> T:
            async with room:
                return await piece

        return await at_once(one(piece) for piece in work)

    async def pass_epoch(self) -> None:
        """Wait until an epoch boundary has passed after everything that was asked before.

        Where text becomes public by evidence, a text that has enough of it shows when: that it does is also the proof
        that the server shares anything at all.

        Raises:
            AttackError: nothing becomes public.
        """
        if not self.server.promotes:
            await self.prober.clock.sleep(self.server.epoch_seconds + MARGIN_S)
            return
        marker = self.texts.document(f"marker/{self.name()}")
        for _ in range(self.server.promotion_subjects):
            await self.prober.ask(marker, self.user("marker"))
        deadline = self.prober.clock.now() + self.server.epoch_seconds + PATIENCE_S
        await self.prober.clock.sleep(self.server.epoch_seconds / 2)
        while not (await self.prober.ask(marker, self.user("marker"))).cached_tokens:
            if self.prober.clock.now() > deadline:
                raise AttackError(
                    "what enough users ask does not become public: is --epoch-seconds right, and does the key vouch "
                    "for its users?"
                )
            await self.prober.clock.sleep(0.2)
