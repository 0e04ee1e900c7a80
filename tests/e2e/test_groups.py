"""Two scheduler groups behind one tokenizer and gateway: affinity, one drained and one killed under load."""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.groups import GROUPS, TOKENS, Tier
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def tier() -> Iterator[Tier]:
    directory = Path(tempfile.mkdtemp(prefix="pando-groups-"))
    tier = Tier(directory)
    try:
        tier.start()
        yield tier
    finally:
        tier.stop()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.slow
def test_users_find_their_own_cache_again_and_both_groups_work(tier: Tier) -> None:
    # That all of them have one home is as likely as 1 : 2^19.
    users = [f"user-{number}" for number in range(20)]
    before = tier.steps()
    first = [tier.complete(user) for user in users]
    second = [tier.complete(user) for user in users]
    assert all(usage["cached"] == 0 for usage in first)
    assert all(usage["cached"] > 0.8 * usage["prompt"] for usage in second)
    assert all(tier.steps()[group] > before[group] for group in GROUPS)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_request_fails_when_a_group_is_drained_or_killed_under_load(tier: Tier, number: signal.Signals) -> None:
    stop = threading.Event()
    finished: list[int] = []

    def ask(user: str) -> None:
        while not stop.is_set():
            usage = tier.complete(user)
            assert usage["completion"] == TOKENS
            finished.append(usage["completion"])

    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask, f"{number.name}-{index}") for index in range(8)]
        wait_until(lambda: len(finished) >= 8)
        tier.end_group(0, number)
        so_far = len(finished)
        # Everybody is served by the other one.
        wait_until(lambda: len(finished) >= so_far + 16, timeout_s=120)
        tier.start_group(0)
        wait_until(lambda: tier.serving() == {0, 1}, timeout_s=120)
        # Its users come back to it.
        wait_until(lambda: (state := tier.state(0)) is not None and state.finished_steps > 0, timeout_s=120)
        stop.set()
        for each in asking:
            each.result(60)
