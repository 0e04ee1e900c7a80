"""A model with recurrent layers in groups with roles over one storage: found again after a restart of all services.

As in `test_stored_prefills.py`, the group that decodes may compute a prompt itself on a slow machine; another one is
tried then.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING

import pytest
from pydantic import SecretStr

from common.settings import (
    GatewaySettings,
    HostTierSettings,
    ModelSettings,
    SchedulerSettings,
    Settings,
    StorageSettings,
    WorkerSettings,
    WorkerStorageSettings,
)
from common.types import GroupRole
from deploy.supervisor.layout import PlannedGroup
from tests.e2e.byte_models import continued, save_byte_model
from tests.e2e.conftest import serve
from tests.e2e.test_disaggregation import DECODE, PREFILL, is_quiet, serve_both, state
from tests.e2e.test_hybrid_roles import TOKENS, answer
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.e2e.served import Served

pytestmark = pytest.mark.extended

PAGE = 16
PROMPT_TOKENS = 200
# Of a prompt; its last snapshot is after them.
WHOLE_PAGES = PROMPT_TOKENS // PAGE
DIVIDED = (PlannedGroup(GroupRole.PREFILL), PlannedGroup(GroupRole.DECODE))
# One that does both.
SINGLE = (PlannedGroup(),)
# Of a group that has room for a third of the chats.
DEVICE_PAGES = 96
# Prompts that are tried until the prefill group has computed one.
TRIES = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_model(tmp_path_factory.mktemp("hybrid"), "qwen3.5")


@contextmanager
def served_by(
    groups: tuple[PlannedGroup, ...], model: Path, place: Path, root: Path, device_pages: int | None = None
) -> Iterator[Served]:
    settings = Settings(
        model=ModelSettings(reference=str(model), dtype="float32"),
        gateway=GatewaySettings(port=0, anonymous="vouched"),
        scheduler=SchedulerSettings(
            device_pages=device_pages,
            host_tier=HostTierSettings(pages=256),
            prefill_min_tokens=64,
            storage=StorageSettings(prefetch="wait_complete", keyring=place / "keyring.db"),
        ),
        worker=WorkerSettings(storage=WorkerStorageSettings(location=SecretStr(str(place / "pages")), timeout_s=100.0)),
    )
    if len(groups) > 1:
        with serve_both(settings, root, groups) as served:
            yield served
    else:
        yield from serve(settings, root)


def is_stored(served: Served, groups: tuple[PlannedGroup, ...]) -> bool:
    """Whether nothing is on its way to storage, and all snapshots on the host are there."""
    for name in names(groups):
        now = state(served, name)
        on_host = {tier.tier: tier for tier in now.tiers}["host_snapshots"].evictable_pages
        if not is_quiet(served, name) or now.storage.writing_pages or on_host > now.storage.stored_snapshots:
            return False
    return True


def names(groups: tuple[PlannedGroup, ...]) -> tuple[str, ...]:
    return (PREFILL, DECODE) if len(groups) > 1 else ("scheduler",)


def more(seed: int, before: Sequence[int] = ()) -> list[int]:
    """Return a prompt that continues another one by random tokens."""
    random = Random(seed)
    return [*before, *(random.randrange(256) for _ in range(PROMPT_TOKENS))]


def is_prefilled(served: Served, prompt: list[int], expected: tuple[list[int], int]) -> bool:
    """Have ann's prompt answered; return whether the prefill group has computed it."""
    before = state(served, DECODE).disaggregation
    assert answer(served, prompt, "ann") == expected
    after = state(served, DECODE).disaggregation
    return (after.remote_prefills - before.remote_prefills, after.failed_prefills - before.failed_prefills) == (1, 0)


def answer_some(served: Served, groups: tuple[PlannedGroup, ...], model: Path) -> tuple[list[int], list[int]]:
    """Have prompts of ann answered until the prefill group, if any, has computed one; return it and its end."""
    for seed in range(TRIES):
        prompt = more(seed)
        [tokens] = continued(model, [prompt], TOKENS)
        if len(groups) == 1:
            assert answer(served, prompt, "ann") == (tokens, 0)
            return prompt, tokens
        if is_prefilled(served, prompt, (tokens, 0)):
            return prompt, tokens
    pytest.fail("the prefill group has computed none of the prompts")


@pytest.mark.parametrize(
    ("first", "second"),
    [(DIVIDED, DIVIDED), (DIVIDED, SINGLE), (SINGLE, DIVIDED)],
    ids=["roles", "roles, then one group", "one group, then roles"],
)
def test_prompts_are_found_after_a_restart_of_all_services(
    first: tuple[PlannedGroup, ...], second: tuple[PlannedGroup, ...], model: Path, tmp_path: Path, run_root: Path
) -> None:
    with served_by(first, model, tmp_path, run_root) as served:
        prompt, tokens = answer_some(served, first, model)
        wait_until(lambda: is_stored(served, first))
    answering = names(second)[-1]
    with served_by(second, model, tmp_path, run_root) as served:
        # A stranger, who computes everything.
        assert answer(served, prompt, "bob") == (tokens, 0)
        assert not any(state(served, name).storage.fetched_snapshots for name in names(second))
        assert answer(served, prompt, "ann") == (tokens, WHOLE_PAGES * PAGE)
        storage = state(served, answering).storage
        assert (storage.fetched_pages, storage.fetched_snapshots) == (WHOLE_PAGES, 1)
        assert not storage.unused_pages
        # The next turn continues after the answer, of which the last token was not computed.
        turn = more(TRIES, [*prompt, *tokens])
        [later] = continued(model, [turn], TOKENS)
        assert answer(served, turn, "ann") == (later, (PROMPT_TOKENS + TOKENS - 1) // PAGE * PAGE)
        wait_until(lambda: all(is_quiet(served, name) for name in names(second)))


def test_the_prefill_group_continues_from_storage(model: Path, tmp_path: Path, run_root: Path) -> None:
    with served_by(DIVIDED, model, tmp_path, run_root) as served:
        prompt, _ = answer_some(served, DIVIDED, model)
        wait_until(lambda: is_stored(served, DIVIDED))
    with served_by(DIVIDED, model, tmp_path, run_root) as served:
        for seed in range(TRIES):
            longer = more(TRIES + seed, prompt)
            [tokens] = continued(model, [longer], TOKENS)
            if is_prefilled(served, longer, (tokens, WHOLE_PAGES * PAGE)):
                break
        else:
            pytest.fail("the prefill group has computed none of the prompts")
        storage = state(served, PREFILL).storage
        assert storage.fetched_pages >= WHOLE_PAGES
        assert storage.fetched_snapshots >= 1
        assert answer(served, longer, "bob") == (tokens, 0)
        wait_until(lambda: all(is_quiet(served, name) for name in (PREFILL, DECODE)))


def test_many_chats_beside_each_other_continue_after_a_restart(model: Path, tmp_path: Path, run_root: Path) -> None:
    users = [f"user{number}" for number in range(12)]
    chats = {user: more(100 + number)[: PROMPT_TOKENS - 7 * number] for number, user in enumerate(users)}
    with served_by(DIVIDED, model, tmp_path, run_root, DEVICE_PAGES) as served:
        first = all_answered(served, chats)
        assert [first[user][0] for user in users] == continued(model, list(chats.values()), TOKENS)
        wait_until(lambda: is_stored(served, DIVIDED))
    turns = {user: more(200 + number, [*chats[user], *first[user][0]]) for number, user in enumerate(users)}
    with served_by(DIVIDED, model, tmp_path, run_root, DEVICE_PAGES) as served:
        second = all_answered(served, turns)
        assert [second[user][0] for user in users] == continued(model, list(turns.values()), TOKENS)
        # Not all of them: the device may drop the last snapshot of one before the host has a slot for it.
        assert max(second[user][1] - len(chats[user]) for user in users) > -PAGE
        assert any(state(served, name).storage.fetched_snapshots for name in (PREFILL, DECODE))
        wait_until(lambda: all(is_quiet(served, name) for name in (PREFILL, DECODE)))


def all_answered(served: Served, prompts: dict[str, list[int]]) -> dict[str, tuple[list[int], int]]:
    """Send the prompts of all users at once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = pool.map(lambda user: answer(served, prompts[user], user), prompts)
        return dict(zip(prompts, answers, strict=True))
