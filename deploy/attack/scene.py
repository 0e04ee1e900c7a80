"""What every oracle works with: the server, the effort, and who is who."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deploy.attack.prober import AttackError

if TYPE_CHECKING:
    import random

    from deploy.attack.prober import Prober
    from deploy.attack.texts import Texts

UNKNOWN = "unknown"
# Beyond an epoch, so that the boundary itself has passed: the scheduler looks at its clock four times a second.
MARGIN_S = 0.6
# What a boundary may take on a busy machine until the harness says that there is none.
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Server:
    """A server under attack. What is not known of it makes oracles not applicable, never wrong.

    `mode` is `UNKNOWN` if nobody has said; `capacity_tokens` is the KV memory that a flood has to fill; `rival_key` an
    API key of another tenant; `sibling_url` another server over the same storage, with the same keys.
    """

    mode: str = UNKNOWN
    promotion_subjects: int = 3
    epoch_seconds: float = 10.0
    capacity_tokens: int | None = None
    rival_key: str | None = None
    sibling_url: str | None = None

    @property
    def promotes(self) -> bool:
        """Whether what enough users have asked becomes public."""
        return self.mode == "user_aware"


@dataclass(frozen=True, slots=True)
class Effort:
    """How many observations are made; the defaults are enough to decide every oracle (± 0.06 of AUC).

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
    texts: Texts
    chance: random.Random
    sibling: Prober | None = None
    _names: int = field(default=0)

    def name(self) -> str:
        """Return a name that was not used before."""
        self._names += 1
        return f"{self._names}"

    def user(self, role: str) -> str:
        """Return a principal that has asked nothing yet."""
        return f"{role}-{self.name()}"

    async def pass_epoch(self) -> None:
        """Wait until an epoch boundary has passed after everything that was asked before.

        Where text becomes public by evidence, a text that has enough of it tells when: that it does is also the proof
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
                raise AttackError("what enough users ask does not become public: is --epoch-seconds right?")
            await self.prober.clock.sleep(0.2)
