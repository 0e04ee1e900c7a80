"""Drives a state machine's rules by a plain random generator: many times faster than by Hypothesis, shrunk by seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from common.types import Sharing
from services.scheduler.cache.config import CacheConfig
from tests.services.scheduler.cache.driver import with_rules
from tests.services.scheduler.cache.user_aware_machine import SESSIONS, TENANTS, USERS, UserAwareMachine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Rules with how often they are drawn.
WEIGHTS = {
    "admit": 10,
    "serve": 12,
    "share": 4,
    "probe": 4,
    "fork": 3,
    "prefill": 10,
    "decode": 6,
    "finish": 8,
    "preempt": 2,
    "abort": 3,
    "evict": 3,
    "flush": 1,
    "forget": 2,
    "pin": 1,
    "unpin": 1,
    "choose": 1,
    "cross": 4,
    "next_epoch": 6,
    "reach_boundary": 6,
}
# They choose among running rows.
NEED_ROWS = {"fork", "prefill", "decode", "finish", "preempt", "abort"}


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a rule; it depends on nothing before it, so that any steps can be left out."""

    rule: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Life:
    """All that a run is made of."""

    config: CacheConfig
    capacity: int
    steps: tuple[Step, ...]


def draw(seed: int, steps: int) -> Life:
    """Return the life that belongs to a seed."""
    chance = random.Random(seed)
    config = with_rules(
        CacheConfig(),
        share_across_tenants=chance.random() < 0.5,
        promotion_subjects=chance.choice([1, 2, 2, 2, 3]),
        promotion_epochs=chance.randint(0, 3),
        hit_min=chance.randint(1, 3),
        diversity_min=chance.choice([0.4, 1.0]),
        jump_factor=chance.choice([1, 10]),
        demotion_quarantines=chance.randint(1, 2),
        quota_share=chance.choice([0.3, 1.0]),
        floor_share=chance.choice([0.0, 0.1]),
        headroom_share=chance.choice([0.0, 0.2]),
        active_epochs=chance.randint(0, 2),
        strict_numerics=chance.random() < 0.5,
        continuation_limit=1_000_000,
    )
    rules = chance.choices(list(WEIGHTS), list(WEIGHTS.values()), k=steps)
    return Life(
        config, chance.choice([1, 2, 24, 24, 60, 60]), tuple(Step(rule, _arguments(rule, chance)) for rule in rules)
    )


def _arguments(rule: str, chance: random.Random) -> dict[str, Any]:
    makers: dict[str, Callable[[], Any]] = {
        "user": lambda: chance.choice(USERS),
        "probers": lambda: chance.choices([6, 7, 6, 7, 6, 7, 1, 2, 3, 5], k=chance.randint(0, 4)),
        "tenant": lambda: chance.choice(TENANTS),
        "sharing": lambda: chance.choice([Sharing.NONE, Sharing.TENANT, Sharing.GLOBAL, Sharing.GLOBAL]),
        "ids": lambda: _prompt(chance),
        "cache_mode": lambda: chance.choice(["use", "use", "use", "use", "private", "none"]),
        "session": lambda: chance.choice(SESSIONS),
        "generated": lambda: [chance.randint(0, 1) for _ in range(chance.randint(1, 3))],
        "pick": lambda: chance.randint(0, 1000),
        "tokens": lambda: chance.randint(1, 6),
        "times": lambda: chance.randint(2, 4),
        "pages": lambda: chance.randint(1, 4),
        "epochs": lambda: chance.choice([1, 1, 1, 1, 2, 5]),
    }
    names = {
        "admit": ("user", "ids", "cache_mode", "session"),
        "serve": ("user", "ids", "generated"),
        "share": ("ids", "times"),
        "probe": ("user", "ids", "times"),
        "prefill": ("pick", "tokens"),
        "decode": ("pick", "generated"),
        "evict": ("pages",),
        "flush": (),
        "forget": ("user", "session"),
        "pin": ("ids",),
        "unpin": ("ids",),
        "choose": ("tenant", "sharing"),
        "cross": ("ids", "probers", "times"),
        "next_epoch": ("epochs",),
        "reach_boundary": (),
    }.get(rule, ("pick",))
    return {name: makers[name]() for name in names}


def _prompt(chance: random.Random) -> list[int]:
    """Return one of few prompts, so that users meet; the long ones share a stem, as with a system prompt."""
    if chance.random() < 0.5:
        return [chance.randint(0, 1) for _ in range(chance.randint(1, 9))]
    return [0, 0, 0, 0, *(chance.randint(0, 1) for _ in range(chance.randint(0, 5))), 1]


def live(life: Life, machine: type[UserAwareMachine] = UserAwareMachine) -> None:
    """Run a life, with every check after every step.

    Raises:
        AssertionError: a check failed.
    """
    cache = machine()
    cache.start(config=life.config, capacity=life.capacity)
    for step in life.steps:
        if step.rule in NEED_ROWS and not cache.rows:
            continue
        getattr(cache, step.rule)(**step.arguments)
        cache.nothing_is_wrong()
        cache.rows_read_their_own_tokens()
        cache.every_reference_has_a_holder()
    cache.teardown()


def failure(life: Life, machine: type[UserAwareMachine] = UserAwareMachine) -> Exception | None:
    """Return what goes wrong in a life."""
    try:
        live(life, machine)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is what is looked for)
        return error
    return None


def shrink(life: Life, machine: type[UserAwareMachine] = UserAwareMachine) -> Life:
    """Leave out steps as long as something still goes wrong."""
    steps = list(life.steps)
    size = len(steps) // 2
    while size:
        start = 0
        while start < len(steps):
            shorter = steps[:start] + steps[start + size :]
            if failure(_with(life, shorter), machine) is not None:
                steps = shorter
            else:
                start += size
        size //= 2
    return _with(life, steps)


def _with(life: Life, steps: Sequence[Step]) -> Life:
    return Life(life.config, life.capacity, tuple(steps))


def live_through(seeds: Sequence[int], steps: int, machine: type[UserAwareMachine] = UserAwareMachine) -> int:
    """Run the lives of all seeds; return the number of operations.

    Raises:
        AssertionError: a check failed; the message has the seed and the fewest steps that show it.
    """
    for seed in seeds:
        life = draw(seed, steps)
        error = failure(life, machine)
        if error is not None:
            shortest = shrink(life, machine)
            text = "\n".join(f"  {step.rule}({step.arguments})" for step in shortest.steps)
            message = f"seed {seed}, {shortest.config}, capacity {shortest.capacity}:\n{text}"
            raise AssertionError(message) from failure(shortest, machine)
    return len(seeds) * steps
