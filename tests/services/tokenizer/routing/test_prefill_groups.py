"""Which group computes a prompt for another one: the one that has its prefix, unless its queue is too long."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from common.types import GroupRole
from protos.gen.pando.v1 import scheduler_pb2
from services.tokenizer.routing.policies import FREE_LOAD, LOAD_FACTOR, PrefixAware
from tests.services.tokenizer.routing.requests import schedule
from tests.services.tokenizer.routing.test_fleet import Tier
from tests.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from services.tokenizer.routing.fleet import Fleet

PREFILL, DECODE = scheduler_pb2.SCHEDULER_ROLE_PREFILL, scheduler_pb2.SCHEDULER_ROLE_DECODE
PROMPT = range(100)


class Roles(Tier):
    """Two prefill groups, then a decode group."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 3)
        for number in range(3):
            self.report(number, 0)
        self._sent = 0

    def report(self, number: int, load: int) -> None:
        """Have a group report so many open requests."""
        role = DECODE if number == 2 else PREFILL
        self.groups[number].scheduler.load = scheduler_pb2.SchedulerLoad(open_choices=load, serves=True, role=role)

    async def know(self, fleet: Fleet, *loads: int) -> None:
        """Wait until the fleet knows the roles, and these loads of the prefill groups."""
        for number, load in enumerate(loads):
            self.report(number, load)
        replicas = [fleet._replicas[group.address] for group in self.groups]
        await until(lambda: [replica.role for replica in replicas] == [GroupRole.PREFILL] * 2 + [GroupRole.DECODE])
        await until(lambda: [replica.load for replica in replicas[:2]] == list(loads))

    async def chosen(self, fleet: Fleet, user: str = "ann", count: int = 1) -> Counter[str]:
        """Send equal prompts at once, and return how many each prefill group is to compute."""
        before = self._sent
        self._sent += count
        fleet.submit([schedule(f"{number}", user=user, ids=PROMPT) for number in range(before, self._sent)])
        decode = self.groups[2].scheduler
        await until(lambda: len(decode.requests) == self._sent)
        return Counter(request.prefill_group for request in decode.requests[before:])


async def test_of_equally_long_queues_the_one_with_the_prefix_is_chosen(tmp_path: Path) -> None:
    tier = Roles(tmp_path)
    async with tier.run(PrefixAware(LOAD_FACTOR)) as fleet:
        await tier.know(fleet, 0, 0)
        homes = {}
        for user in "abcdef":
            [homes[user]] = await tier.chosen(fleet, user)
        assert len(set(homes.values())) == 2, "users are distributed"
        for load in (1, 40):
            await tier.know(fleet, load, load)
            assert [await tier.chosen(fleet, user) for user in homes] == [{home: 1} for home in homes.values()]


async def test_a_group_with_the_prefix_loses_to_an_idle_one_once_its_queue_is_long(tmp_path: Path) -> None:
    tier = Roles(tmp_path)
    async with tier.run(PrefixAware(LOAD_FACTOR)) as fleet:
        await tier.know(fleet, 0, 0)
        [home] = await tier.chosen(fleet)
        number = [group.address for group in tier.groups].index(home)
        other = tier.groups[1 - number].address
        choices: list[str] = []
        for load in range(2 * FREE_LOAD):
            await tier.know(fleet, *((load, 0) if number == 0 else (0, load)))
            choices += await tier.chosen(fleet)
        assert choices == [home] * FREE_LOAD + [other] * FREE_LOAD


async def test_prompts_that_arrive_at_once_are_divided_before_any_report(tmp_path: Path) -> None:
    tier = Roles(tmp_path)
    async with tier.run(PrefixAware(LOAD_FACTOR)) as fleet:
        await tier.know(fleet, 0, 0)
        shares = await tier.chosen(fleet, count=40)
        assert sorted(shares.values())[0] >= 40 - LOAD_FACTOR * 41 / 2 - 1
        # A report includes what it has been sent.
        await tier.know(fleet, 3, 0)
