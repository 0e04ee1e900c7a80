"""Greedy answers are those of `transformers` in fp32 wherever a prompt's KV comes from: computed, device or host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import pytest

from common.rpc.options import CHANNEL_OPTIONS
from common.types import CacheMode
from protos.gen.pando.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.e2e.greedy.checks import GROWING, TIMEOUT_S, cacheable, check_answers, pick, serve_rows
from tests.e2e.greedy.reference import OUTPUT_TOKENS, Reference
from tests.e2e.pipeline import ask
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.e2e.served import Served

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.extended]

LONG = pick("length-512")
# Their 56 pages push the long one's 34 off the device.
OTHERS = pick("length-300") + GROWING[1:]
# All of the others can start in it, and have not enough to end.
DEVICE_PAGES = 50
HOST_PAGES = 300


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.soak)], ids=["one-rank", "two-ranks"])
def tiered(request: pytest.FixtureRequest, run_root: Path) -> Iterator[Served]:
    """A deployment with few device pages and a host tier."""
    yield from serve_rows(run_root, device_pages=DEVICE_PAGES, host_tier={"pages": HOST_PAGES}, ranks=request.param)


def nodes(served: Served) -> list[scheduler_pb2.TreeNode]:
    with grpc.insecure_channel(served.deployment.address_of("scheduler"), options=CHANNEL_OPTIONS) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        return [answer.node for answer in stub.DumpTree(scheduler_pb2.DumpTreeRequest(), timeout=60)]


def tokens_on_host_alone(served: Served) -> int:
    return sum(node.edge_tokens for node in nodes(served) if node.state == scheduler_pb2.NODE_STATE_ON_HOST)


def serve(served: Served, references: Sequence[Reference], mode: CacheMode = CacheMode.DEFAULT) -> list[int]:
    """Ask, check the answers, and return the number of cached tokens of each prompt."""
    with served.leaving_nothing_behind():
        asked = ask(served, [reference.prompt_ids for reference in references], OUTPUT_TOKENS, "tiers", mode)
    check_answers(references, asked.answers)
    return [answer.cached_tokens for answer in asked.answers]


def test_answers_are_the_same_without_cache_cold_and_warm_from_device_and_host(tiered: Served) -> None:
    everything = cacheable(len(LONG[0].prompt_ids))
    assert serve(tiered, LONG, CacheMode.NONE) == [0]
    assert serve(tiered, LONG) == [0]
    assert serve(tiered, LONG) == [everything]
    wait_until(lambda: sum(len(node.host_pages) for node in nodes(tiered)) >= everything // 16, timeout_s=120)
    assert tokens_on_host_alone(tiered) == 0

    with tiered.leaving_nothing_behind():
        crowd = ask(tiered, [reference.prompt_ids for reference in OTHERS], OUTPUT_TOKENS, "crowd")
    check_answers(OTHERS, crowd.answers)
    assert crowd.retractions > 0

    gone = tokens_on_host_alone(tiered)
    assert gone > 0
    assert serve(tiered, LONG) == [everything]
    # Rows that lost their pages on the way, too, end as if they had not, with what the host has of them.
    with tiered.leaving_nothing_behind():
        again = ask(tiered, [reference.prompt_ids for reference in OTHERS], OUTPUT_TOKENS, "crowd")
    check_answers(OTHERS, again.answers)
    assert sum(answer.cached_tokens for answer in again.answers) > 0


def test_host_pages_of_one_user_are_not_served_to_another(tiered: Served) -> None:
    with tiered.leaving_nothing_behind():
        stranger = ask(tiered, [LONG[0].prompt_ids], OUTPUT_TOKENS, "stranger")
    check_answers(LONG, stranger.answers)
    assert stranger.answers[0].cached_tokens == 0
