"""Evidence counts per adapter: text that enough subjects send with one adapter is shared with this adapter only."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from itertools import count

import pytest

from common.types import Sharing
from tests.services.scheduler.cache.driver import PLAIN
from tests.services.scheduler.core.harness import Harness, make_request

BASE, SQL, POEMS = "", "sql", "poems"
ADAPTERS = {name: sha256(name.encode()).hexdigest() for name in (SQL, POEMS)}
PAGE = 16
SYSTEM = list(range(100, 100 + 3 * PAGE))
NAMES = (BASE, SQL, POEMS)


class Life:
    """A core with two adapters; each question is the system prompt and two tokens of its own."""

    def __init__(self, *, across: bool = False) -> None:
        rules = replace(PLAIN, share_across_tenants=across)
        sharing = Sharing.GLOBAL if across else Sharing.TENANT
        self.harness = Harness(
            cache="user_aware",
            page_size=PAGE,
            pages=256,
            max_step_tokens=64,
            rules=rules,
            adapters=ADAPTERS,
            sharing_of=lambda _tenant: sharing,
        )
        self._numbers = count()
        self._epochs = count(1)

    def ask(self, user: str, adapter: str, tenant: str = "acme") -> int:
        """Return the tokens that the question finds in the cache."""
        number = next(self._numbers)
        prompt = [*SYSTEM, 500 + number, 7]
        request = make_request(f"{number}", prompt, user=user, tenant=tenant, adapter=adapter, max_tokens=1)
        assert self.harness.core.submit(request, 0.0).rejected is None
        self.harness.run()
        return self.harness.cached[f"{number}", 0]

    def next_epoch(self) -> None:
        self.harness.cache.advance(next(self._epochs))
        self.harness.audit()

    def found(self, tenant: str = "acme") -> dict[str, int]:
        """Return the tokens that a new subject finds cached with each adapter and without; it promotes nothing."""
        return {name: self.ask(f"new-{next(self._numbers)}", name, tenant) for name in NAMES}


@pytest.mark.parametrize("promoted", NAMES)
def test_enough_subjects_share_with_their_adapter_only(promoted: str) -> None:
    life = Life()
    for user in ("ann", "bob", "cid"):
        assert life.ask(user, promoted) == 0
    assert life.found() == dict.fromkeys(NAMES, 0)
    life.next_epoch()
    assert life.found() == {name: len(SYSTEM) if name == promoted else 0 for name in NAMES}


def test_evidence_of_the_base_model_and_of_another_adapter_does_not_count() -> None:
    life = Life()
    for user in ("ann", "bob"):
        life.ask(user, SQL)
    for user in ("cid", "dan"):
        life.ask(user, BASE)
    for user in ("eve", "fay"):
        life.ask(user, POEMS)
    # Six subjects have computed the text, but no three of them in the same way.
    life.next_epoch()
    # Each question counts from here on: the third subject of each comes first.
    assert [life.ask(f"third with {name}", name) for name in NAMES] == [0, 0, 0]
    life.next_epoch()
    assert life.found() == dict.fromkeys(NAMES, len(SYSTEM))


def test_one_subject_counts_once_for_each_adapter() -> None:
    life = Life()
    for _ in range(4):
        for user in ("ann", "bob"):
            for name in NAMES:
                life.ask(user, name)
        life.next_epoch()
    assert [life.ask("cid", name) for name in NAMES] == [0, 0, 0]


def test_subjects_of_another_tenant_are_no_evidence_for_an_adapter() -> None:
    """The gateway refuses those that may not use it; also if it did not, they would not count for the tenant's."""
    life = Life()
    for user in ("ann", "bob"):
        life.ask(user, SQL)
    for user in ("gus", "hal", "ida"):
        life.ask(user, SQL, "globex")
        life.ask(user, BASE, "globex")
    life.next_epoch()
    assert life.ask("cid", SQL) == 0
    assert life.found("globex") == {BASE: len(SYSTEM), SQL: len(SYSTEM), POEMS: 0}


def test_what_tenants_share_with_each_other_is_shared_with_its_adapter_only() -> None:
    life = Life(across=True)
    for tenant in ("acme", "blue"):
        for user in ("ann", "bob", "cid"):
            life.ask(user, SQL, tenant)
    for _ in range(2):
        life.next_epoch()
    # A tenant that may not use the adapter asks the base model.
    assert life.ask("gus", BASE, "globex") == life.ask("gus", POEMS, "globex") == 0
    assert life.ask("hal", SQL, "globex") == len(SYSTEM)


def test_an_adapter_is_in_use_until_the_workers_have_taken_up_the_plan_that_loads_it() -> None:
    harness = Harness(cache="user_aware", page_size=PAGE, pages=256, max_step_tokens=64, adapters=ADAPTERS)
    request = make_request("one", SYSTEM, adapter=SQL, max_tokens=4)
    assert harness.core.submit(request, 0.0).rejected is None
    harness.plan()
    assert harness.core.abort(request.request_id)
    assert harness.core.uses_adapter(ADAPTERS[SQL])
    assert not harness.core.uses_adapter(ADAPTERS[POEMS])
    harness.run()
    assert not harness.core.uses_adapter(ADAPTERS[SQL])
