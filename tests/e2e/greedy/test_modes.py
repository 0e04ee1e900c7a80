"""Greedy answers are those of `transformers` in fp32 in every mode of the cache, also from merged and public pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import pytest

from common.settings import CacheSettings
from tests.e2e.greedy.checks import PAGE, TIMEOUT_S, cacheable, check_answers, pick, serve_rows
from tests.e2e.greedy.reference import OUTPUT_TOKENS
from tests.e2e.pipeline import ask
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.served import Served

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.extended]

MODES = get_args(CacheSettings.model_fields["mode"].annotation)
QUICK = ("user_aware",)
# Short, but what a busy machine does in minutes still counts together.
EPOCHS = {"epoch_seconds": 0.5, "promotion_epochs": 1000}
REFERENCES = pick("length-300", "chat-colors", "chinese-capitals", "code-json")
NOTHING = [0] * len(REFERENCES)
EVERYTHING = [cacheable(len(reference.prompt_ids)) for reference in REFERENCES]
USERS = ("ann", "bob", "ann", "cid", "dan")
# What each of them finds; three users are evidence enough.
FOUND = {
    "shared": (NOTHING, EVERYTHING, EVERYTHING, EVERYTHING, EVERYTHING),
    "isolated": (NOTHING, NOTHING, EVERYTHING, NOTHING, NOTHING),
    "isolated_pinned": (NOTHING, NOTHING, EVERYTHING, NOTHING, NOTHING),
    "user_aware": (NOTHING, NOTHING, EVERYTHING, NOTHING, EVERYTHING),
    "chunk": (NOTHING, NOTHING, NOTHING, NOTHING, NOTHING),
}


@pytest.fixture(
    scope="module", params=[mode if mode in QUICK else pytest.param(mode, marks=pytest.mark.soak) for mode in MODES]
)
def moded(request: pytest.FixtureRequest, run_root: Path) -> Iterator[tuple[str, Served]]:
    """The name of a mode, and a deployment in it with short epochs."""
    for served in serve_rows(run_root, cache={"mode": request.param, **EPOCHS}):
        yield request.param, served


def end_epoch(served: Served) -> None:
    epoch = served.state().cache_accounting.epoch
    wait_until(lambda: served.state().cache_accounting.epoch > epoch)


def test_answers_do_not_depend_on_the_user_that_computed_the_pages(moded: tuple[str, Served]) -> None:
    mode, served = moded
    found = []
    for user in USERS:
        with served.leaving_nothing_behind():
            asked = ask(served, [reference.prompt_ids for reference in REFERENCES], OUTPUT_TOKENS, user)
        check_answers(REFERENCES, asked.answers)
        found.append([answer.cached_tokens for answer in asked.answers])
        if (mode, user) == ("user_aware", "bob"):
            # Ann's second answer comes from pages that both have: one copy of each.
            wait_until(lambda: served.state().cache_accounting.merged_pages >= sum(EVERYTHING) // PAGE)
        end_epoch(served)
    assert tuple(found) == FOUND[mode]
