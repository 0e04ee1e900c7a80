"""Many groups, one evidence: promotion, quarantine, demotion and pins through the shared state."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from common.fleet.names import routing_digest
from common.fleet.state import PromotionRules
from common.images import image_ids
from common.types import RowImage, Subject, View
from services.scheduler.cache.keys import image_tags
from services.scheduler.cache.sharing.fleet import rungs
from services.scheduler.fleet_desk import LEASE_EPOCHS
from tests.examples import one_in
from tests.fakes.redis_process import temporary_redis
from tests.services.scheduler.cache.driver import ANN, BOB, CID, DAN, EVE, PLAIN, Driver, int32
from tests.services.scheduler.fleet import Group, Groups, groups_at

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.types import TokenIds
    from tests.fakes.redis_process import RedisProcess

# Longer than the first tokens by which prompts are routed; a multiple of the pages at which evidence is counted.
SYSTEM = list(range(1, 81))


@pytest.fixture(name="server")
def running_server() -> Iterator[RedisProcess]:
    with temporary_redis() as process:
        yield process


def tagged_by_images(ids: TokenIds, images: list[RowImage]) -> TokenIds:
    tags = image_tags(ids, images, page_size=2)[: len(ids)]
    return ids ^ tags


async def settle(groups: Groups) -> None:
    """Let all groups report, then learn of the decision, then apply it."""
    for _ in range(3):
        await groups.next_epoch()


async def spread(groups: Groups, *users: View, text: list[int] = SYSTEM) -> None:
    """Let each user ask at another group, and let the fleet decide."""
    for group, user in zip(groups, users, strict=False):
        group.driver.serve(user, [*text, 900])
    await settle(groups)


def check(groups: Groups) -> None:
    for group in groups:
        group.driver.check()


async def test_subjects_of_several_groups_are_evidence_together(server: RedisProcess) -> None:
    async with groups_at(server.url, 3) as groups:
        await spread(groups, ANN, BOB, CID)
        assert [group.driver.peek(DAN, [*SYSTEM, 7]) for group in groups] == [80, 80, 80]
        check(groups)


async def test_several_subjects_ask_at_once_for_a_prompt_that_is_shared(server: RedisProcess) -> None:
    async with groups_at(server.url, 4) as groups:
        await spread(groups, ANN, BOB, CID)
        for user in (DAN, EVE):
            groups[3].driver.serve(user, SYSTEM)
        # Within an epoch, only their prompts are looked up, which are the same.
        await groups.poll()
        await groups.next_epoch()
        assert groups[3].driver.peek(View(Subject("tenant", "fay")), [*SYSTEM, 7]) == 80
        check(groups)


async def test_too_few_subjects_share_nothing_in_any_group(server: RedisProcess) -> None:
    async with groups_at(server.url, 4) as groups:
        # One subject at many groups, with many salts, is one subject (B2, B5).
        await spread(groups, ANN, BOB, ANN, View(Subject("tenant", "bob"), "salt"))
        await groups.next_epoch()
        assert [group.driver.peek(DAN, [*SYSTEM, 7]) for group in groups] == [0, 0, 0, 0]


async def test_subjects_of_another_tenant_are_no_evidence(server: RedisProcess) -> None:
    async with groups_at(server.url, 3) as groups:
        await spread(groups, ANN, BOB, View(Subject("rival", "cid")))
        assert [group.driver.peek(DAN, [*SYSTEM, 7]) for group in groups] == [0, 0, 0]


async def test_only_the_prefix_that_they_have_in_common_is_shared(server: RedisProcess) -> None:
    async with groups_at(server.url, 3) as groups:
        for number, (group, user) in enumerate(zip(groups, (ANN, BOB, CID), strict=True)):
            group.driver.serve(user, [*SYSTEM, *range(1000 * number + 1000, 1000 * number + 1080)])
        await settle(groups)
        assert [group.driver.tenants for group in groups] == [[SYSTEM]] * 3
        check(groups)


@pytest.mark.parametrize("before", [7, 71])
async def test_tokenizers_find_prompts_with_images_that_are_shared(server: RedisProcess, before: int) -> None:
    image = RowImage(bytes(32), before, 80, (1, 1), None)
    ids = int32([*SYSTEM[:before], *image_ids(image.digest, image.length), 5, 6, 7])
    key = tagged_by_images(ids, [image]).tolist()
    assert key != ids.tolist()
    async with groups_at(server.url, 3) as groups:
        digest = routing_digest(ids)
        assert digest is not None
        name = groups[0].keys.routing(("tenant",), digest)
        await spread(groups, ANN, BOB, text=key[:80])
        assert await groups[0].state.look_up([name]) == set()
        groups[2].driver.serve(CID, key)
        await settle(groups)
        assert await groups[0].state.look_up([name]) == {name}


async def test_evidence_expires(server: RedisProcess) -> None:
    async with groups_at(server.url, 3) as groups:
        groups[0].driver.serve(ANN, SYSTEM)
        await groups.next_epoch(31)
        await spread(groups, BOB, CID)
        assert groups[0].driver.tenants == groups[1].driver.tenants == []


async def test_a_group_that_joins_later_shares_by_the_evidence_of_the_others(server: RedisProcess) -> None:
    async with groups_at(server.url, 4) as groups:
        await spread(groups, ANN, BOB, CID)
        groups[3].driver.serve(DAN, [*SYSTEM, 900])
        await settle(groups)
        assert groups[3].driver.peek(EVE, [*SYSTEM, 7]) == 80


async def test_a_quarantine_applies_in_all_groups_within_an_epoch(server: RedisProcess) -> None:
    async with groups_at(server.url, 3) as groups:
        await spread(groups, ANN, BOB, CID)
        for _ in range(2):
            for number in range(20):
                groups[0].driver.end(groups[0].driver.admit(DAN, [*SYSTEM, 100 + number, 0]))
            await groups.next_epoch()
        assert groups[0].driver.peek(DAN, [*SYSTEM, 7]) == 0
        await groups.next_epoch()
        assert [group.driver.peek(DAN, [*SYSTEM, 7]) for group in groups] == [0, 0, 0]
        assert [group.driver.peek(EVE, [*SYSTEM, 7]) for group in groups] == [80, 80, 80]
        check(groups)


async def probe(groups: Groups, *suspects: View) -> None:
    """Let suspects probe at the first group until it demotes the prompt."""
    for _ in range(2):
        for suspect in suspects:
            for number in range(20):
                groups[0].driver.end(groups[0].driver.admit(suspect, [*SYSTEM, 100 + number, 0]))
        await groups.next_epoch()


async def test_a_demotion_applies_in_all_groups_and_sharing_again_takes_more_evidence(server: RedisProcess) -> None:
    async with groups_at(server.url, 3) as groups:
        await spread(groups, ANN, BOB, CID)
        await probe(groups, DAN, EVE)
        assert groups[0].driver.tenants == []
        await groups.next_epoch()
        assert [group.driver.tenants for group in groups] == [[], [], []]
        # Its creators keep it.
        assert [group.driver.peek(user, [*SYSTEM, 7]) for group, user in zip(groups, (ANN, BOB, CID), strict=True)] == [
            80,
            80,
            80,
        ]
        more = [View(Subject("tenant", f"more-{number}")) for number in range(3)]
        for group, user in zip(groups, more[:2], strict=False):
            group.driver.serve(user, [*SYSTEM, 900])
        await settle(groups)
        assert [group.driver.tenants for group in groups] == [[], [], []]  # 5 of 6
        groups[2].driver.serve(more[2], [*SYSTEM, 900])
        await settle(groups)
        assert groups[2].driver.peek(DAN, [*SYSTEM, 7]) == 80
        check(groups)


async def test_a_new_group_knows_of_earlier_demotions(server: RedisProcess) -> None:
    async with groups_at(server.url, 3) as groups:
        await spread(groups, ANN, BOB, CID)
        await probe(groups, DAN, EVE)
    async with groups_at(server.url, 1) as later:
        await later.next_epoch()
        for user in (DAN, EVE, View(Subject("tenant", "fay"))):
            later[0].driver.serve(user, [*SYSTEM, 900])
        later[0].driver.next_epoch()
        # Three subjects of its own would have been enough.
        assert later[0].driver.tenants == []


async def test_pins_apply_in_all_groups_also_in_those_that_start_later(server: RedisProcess) -> None:
    async with groups_at(server.url, 2) as groups:
        groups[0].driver.cache.pin(int32(SYSTEM))
        groups[0].desk.announce_pin(int32(SYSTEM), True)
        await groups.next_epoch()
        groups.append(Group(server.url))
        await settle(groups)
        for group in groups:
            group.driver.serve(ANN, [*SYSTEM, 900])
        assert [group.driver.peek(EVE, [*SYSTEM, 7]) for group in groups] == [80, 80, 80]
        groups[1].driver.cache.unpin(int32(SYSTEM))
        groups[1].desk.announce_pin(int32(SYSTEM), False)
        await groups.next_epoch()
        for group in groups:
            group.driver.cache.flush()
            group.driver.serve(ANN, [*SYSTEM, 900])
        assert [group.driver.public for group in groups] == [[], [], []]
        await groups.pop().state.close()


async def test_groups_decide_alone_while_the_server_is_away_and_reconcile(server: RedisProcess) -> None:
    async with groups_at(server.url, 3) as groups:
        await spread(groups, ANN, BOB, CID)
        server.kill()
        await groups.next_epoch()
        assert groups[0].driver.peek(DAN, [*SYSTEM, 7]) == 80
        for _ in range(LEASE_EPOCHS + 1):
            await groups.next_epoch()
        # What is shared by others' evidence only is given up; the group's own evidence counts.
        assert [group.driver.tenants for group in groups] == [[], [], []]
        own = list(range(500, 580))
        for user in (ANN, BOB, CID):
            groups[0].driver.serve(user, [*own, 900])
        await groups.next_epoch()
        assert groups[0].driver.peek(DAN, [*own, 7]) == 80
        check(groups)
        server.start()
        await settle(groups)
        assert [group.driver.peek(DAN, [*SYSTEM, 7]) for group in groups] == [80, 80, 80]
        check(groups)


async def test_facts_found_while_the_server_is_away_reach_the_others(server: RedisProcess) -> None:
    async with groups_at(server.url, 3) as groups:
        await spread(groups, ANN, BOB, CID)
        server.kill()
        await probe(groups, DAN, EVE)
        assert groups[0].driver.tenants == []
        assert groups[1].driver.peek(DAN, [*SYSTEM, 7]) == 80
        server.start()
        await groups.poll()
        await groups.next_epoch()
        assert [group.driver.tenants for group in groups] == [[], [], []]


async def test_a_group_with_other_rules_stays_alone(server: RedisProcess) -> None:
    async with groups_at(server.url, 2) as groups:
        await groups.next_epoch()
        loose = Group(server.url, rules=PromotionRules(subjects=2, factor=2, epochs=30, epoch_s=10.0))
        groups.append(loose)
        await spread(groups, ANN, CID, BOB)
        assert [group.driver.tenants for group in groups] == [[], [], []]
        await groups.pop().state.close()


async def test_the_server_learns_neither_texts_nor_names(server: RedisProcess) -> None:
    secret = View(Subject("tenant-of-secrets", "user-of-secrets"))
    async with groups_at(server.url, 3) as groups:
        await spread(groups, secret, BOB, CID)
        groups[0].driver.cache.pin(int32(SYSTEM))
        groups[0].desk.announce_pin(int32(SYSTEM), True)
        await probe(groups, DAN, EVE)
        with server.client() as client:
            stored = b"".join(key + (client.dump(key) or b"") for key in client.scan_iter())
    assert len(stored) > 1000
    for text in (b"secrets", int32(SYSTEM[:4]).tobytes(), int32(SYSTEM[40:44]).tobytes()):
        assert text not in stored


@pytest.mark.parametrize("seed", one_in(2, range(4)))
async def test_random_operations_of_small_groups_violate_no_invariant(server: RedisProcess, seed: int) -> None:
    chance = random.Random(seed)
    users = [View(Subject(f"tenant-{number % 2}", f"user-{number}")) for number in range(16)]
    groups = Groups(Group(server.url, capacity=90) for _ in range(3))
    shared = 0
    for turn in range(60):
        for _ in range(chance.randrange(12)):
            group, user = chance.choice(groups), chance.choice(users)
            text = [*SYSTEM[: 8 * chance.randrange(1, 6)], *(chance.randrange(900, 903) for _ in range(6))]
            group.driver.serve(user, text, may_promote=chance.random() < 0.9)
        if chance.random() < 0.3:
            group, suspect = chance.choice(groups), chance.choice(users)
            for number in range(40):
                group.driver.end(group.driver.admit(suspect, [*SYSTEM[:8], 100 + number, 0]))
        # Rows that run while other groups' facts arrive.
        rows = [(group, group.driver.admit(chance.choice(users), [*SYSTEM[:16], 5, 5])) for group in groups]
        if turn == 30:
            server.kill()
        if turn == 45:
            server.start()
        await groups.next_epoch()
        for group, row in rows:
            group.driver.check(row)
            group.driver.end(row)
        check(groups)
        shared += sum(len(group.driver.tenants) for group in groups)
    assert shared > 10
    for group in groups:
        await group.state.close()


def test_evidence_is_counted_at_eight_depths_for_each_doubling() -> None:
    assert list(rungs(0, 40)) == [*range(1, 17), *range(18, 33, 2), 36, 40]
    assert list(rungs(13, 21)) == [14, 15, 16, 18, 20]
    assert len(list(rungs(0, 1024))) == 64


def test_without_a_fleet_nothing_is_reported() -> None:
    driver = Driver("user_aware", config=PLAIN)
    for user in (ANN, BOB, CID):
        driver.serve(user, SYSTEM)
    driver.next_epoch()
    report = driver.cache.take_report()
    assert len(report.claims) == len(report.interests) == len(report.uses) == 0
