"""Several groups' caches, whose fleet desks share one state."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from pydantic import SecretStr

from common.fleet.state import PromotionRules, open_fleet
from common.settings import FleetSettings
from services.scheduler.fleet_desk import FleetDesk
from tests.services.scheduler.cache.driver import PLAIN, Driver, with_rules

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SECRET = "a secret of forty characters, or of more"
RULES = PromotionRules(subjects=3, factor=2, epochs=30, epoch_s=10.0)
FLEET = with_rules(PLAIN, has_fleet=True)


class Group:
    """One scheduler group: its cache and its desk."""

    def __init__(self, url: str, rules: PromotionRules = RULES, capacity: int = 400) -> None:
        self.driver = Driver("user_aware", config=FLEET, capacity=capacity)
        opened = open_fleet(FleetSettings(state=SecretStr(url), secret=SecretStr(SECRET)))
        assert opened is not None
        self.state, self.keys = opened
        self.desk = FleetDesk(self.state, self.keys, rules, lambda: self.driver.cache)


class Groups(list[Group]):
    """Groups whose epochs advance together."""

    async def poll(self) -> None:
        """Let each group send, and then each receive."""
        for _ in range(2):
            for group in self:
                await group.desk.poll()

    async def next_epoch(self, epochs: int = 1) -> None:
        """Advance all caches; then exchange, so that the news has its effect at the boundary after."""
        for group in self:
            group.driver.next_epoch(epochs)
        await self.poll()


@asynccontextmanager
async def groups_at(url: str, count: int) -> AsyncIterator[Groups]:
    """Create `count` groups with one state."""
    groups = Groups(Group(url) for _ in range(count))
    try:
        yield groups
    finally:
        for group in groups:
            await group.state.close()
