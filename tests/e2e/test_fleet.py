"""Four scheduler groups with a shared state are one cache: an application's prompt is found at the first request."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.e2e.groups import PROMPT, Tier
from tests.fakes.redis_process import temporary_redis
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.e2e

EPOCH_S = 0.5
USERS = 30


@pytest.fixture(name="tier")
def four_groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tier]:
    with temporary_redis() as server:
        directory: Path = tmp_path_factory.mktemp("f")
        settings = {
            "fleet.state": server.url,
            "fleet.secret": "a secret of forty characters, or of more",
            "scheduler.cache.epoch_seconds": EPOCH_S,
            "scheduler.cache.promotion_epochs": 600,
            "scheduler.device_pages": 2048,
            # Users that requests name are subjects.
            "gateway.anonymous": "vouched",
        }
        tier = Tier(directory, settings, step_ms=1, groups=range(4))
        try:
            tier.start()
            yield tier
        finally:
            tier.stop()


def routed(tier: Tier) -> dict[str, float]:
    """Return the number of requests that each group has received."""
    found = re.findall(r'^pando_tokenizer_routed_requests_total\{replica="(.+)"\} (.+)$', tier.metrics(), re.MULTILINE)
    return {name: float(count) for name, count in found}


def pass_epochs(tier: Tier, count: int) -> None:
    """Wait until so many borders of epochs have passed in each group."""
    epochs = {group: state.cache_accounting.epoch for group in tier.groups if (state := tier.state(group))}
    assert len(epochs) == len(tier.groups)

    def have_passed() -> bool:
        states = {group: tier.state(group) for group in epochs}
        return all(state and state.cache_accounting.epoch >= epochs[group] + count for group, state in states.items())

    wait_until(have_passed, what=tier.logs)


def spread_prompt(tier: Tier) -> str:
    """Return a prompt that three users have sent to two groups or three, so that no group has enough evidence."""
    for number in range(20):
        prompt, before = f"Application {number}. {PROMPT}", routed(tier)
        for user in range(3):
            tier.ask(f"early-{number}-{user}", f"{prompt} I am early user {user}.", 2)
        after = routed(tier)
        if max(after[name] - before.get(name, 0) for name in after) < 3:
            return prompt
    raise AssertionError("all users of 20 prompts have the same group")


def test_users_of_other_groups_find_the_prompt_in_at_least_nine_of_ten_requests(tier: Tier) -> None:
    prompt = spread_prompt(tier)
    fresh = iter(range(1000))

    def is_found() -> bool:
        # A user who has not asked before; at most one in an epoch, as others could be evidence at one group.
        pass_epochs(tier, 1)
        usage = tier.ask(f"user-{(user := next(fresh))}", f"{prompt} I am user {user}.", 2)
        return usage["cached"] >= 0.75 * usage["prompt"]

    # A group that gets the prompt for the first time computes it, and shares it from the next boundary on.
    wait_until(lambda: all(is_found() for _ in range(3)))
    # Those that avoid a burst at a busy machine bring it to further groups.
    for number in range(USERS):
        tier.ask(f"burst-{number}", f"{prompt} I am user {number} of a burst.", 2)
    pass_epochs(tier, 3)
    before = routed(tier)
    usages = [tier.ask(f"late-{number}", f"{prompt} I am late user {number}.", 2) for number in range(USERS)]
    found = sum(usage["cached"] >= 0.75 * usage["prompt"] for usage in usages)
    assert found >= 0.9 * USERS, (found, usages)
    after = routed(tier)
    # Without a fleet, the users would be distributed evenly to all groups. With it, some only avoid a busy group,
    # many on a slow machine.
    busiest = max(after[name] - before.get(name, 0) for name in after)
    assert busiest >= 0.4 * USERS, after
