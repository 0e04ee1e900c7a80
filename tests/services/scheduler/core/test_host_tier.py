"""Requests whose prefix is in host memory: when they start, what they are told, and that all KV they read is right."""

from __future__ import annotations

import pytest

from common.transfers import TransferDirection
from common.types import RequestId
from services.scheduler.cache.tiers.config import HostConfig, WritePolicy
from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.core.harness import STOP_ID, Harness, make_request

PROMPT = list(range(100, 124))  # six pages and a token to compute behind five of them
OTHER = list(range(300, 348))


def make_harness(pages: int = 16, host_pages: int = 32, **options: object) -> Harness:
    policy = options.pop("policy", WritePolicy.WRITE_THROUGH)
    assert isinstance(policy, WritePolicy)
    return Harness(pages=pages, host=HostConfig(pages=host_pages, policy=policy), **options)  # type: ignore[arg-type]


def serve(harness: Harness, name: str, prompt: list[int], user: str = "alice", max_tokens: int = 2) -> int:
    """Serve one request to its end and return how many of its tokens were cached."""
    assert harness.core.submit(make_request(name, prompt, user=user, max_tokens=max_tokens), 0.0).rejected is None
    harness.run()
    assert harness.outputs[name, 0] == expected_output(prompt, len(prompt) + max_tokens, (STOP_ID,))
    harness.audit()
    return harness.cached[name, 0]


def directions(harness: Harness) -> list[TransferDirection]:
    return [transfer.direction for plan in harness.plans for transfer in plan.transfers]


def test_a_prefix_that_left_the_device_comes_back_from_the_host() -> None:
    harness = make_harness()
    assert serve(harness, "cold", PROMPT) == 0
    serve(harness, "flood", OTHER)
    assert harness.cache.peek(make_request("x", PROMPT).view, make_request("x", PROMPT).token_ids) < 20
    assert serve(harness, "warm", PROMPT) == 20
    assert TransferDirection.HOST_TO_DEVICE in directions(harness)
    assert harness.cache.host is not None
    assert harness.cache.host.loaded_pages > 0


def test_host_pages_of_one_user_are_not_found_by_another() -> None:
    harness = make_harness()
    serve(harness, "cold", PROMPT)
    serve(harness, "flood", OTHER)
    assert serve(harness, "stranger", PROMPT, user="bob") == 0
    assert TransferDirection.HOST_TO_DEVICE not in directions(harness)


def test_decoding_goes_on_while_a_row_waits_for_its_load() -> None:
    harness = make_harness(pages=24)
    serve(harness, "cold", PROMPT)
    serve(harness, "flood", list(range(300, 380)))
    harness.core.submit(make_request("runs", [7 * i + 8 for i in range(9)], user="bob", max_tokens=20), 0.0)
    harness.plan()
    harness.result()
    harness.core.submit(make_request("waits", PROMPT), 0.0)
    before = len(harness.outputs["runs", 0])
    for _ in range(8):
        harness.plan()
        harness.result()
    assert len(harness.outputs["runs", 0]) > before + 4
    assert ("waits", 0) not in harness.cached
    harness.run()
    assert harness.cached["waits", 0] == 20


def test_loading_is_skipped_where_computing_is_faster() -> None:
    harness = make_harness(prefill_tokens_per_s=1e6, load_bytes_per_s=1e3)
    serve(harness, "cold", PROMPT)
    serve(harness, "flood", OTHER)
    kept = harness.cache.peek(make_request("x", PROMPT).view, make_request("x", PROMPT).token_ids)
    assert serve(harness, "again", PROMPT) == kept
    assert TransferDirection.HOST_TO_DEVICE not in directions(harness)
    assert harness.core.memory.loads is not None
    assert harness.core.memory.loads.skipped_tokens == 20 - kept
    # What was computed instead of loaded is found on the device again.
    assert serve(harness, "third", PROMPT) == 20


def test_two_requests_for_one_prefix_share_one_load() -> None:
    harness = make_harness(pages=20)
    serve(harness, "cold", PROMPT)
    serve(harness, "flood", list(range(300, 370)))
    harness.core.submit(make_request("one", [*PROMPT, 1]), 0.0)
    harness.core.submit(make_request("two", [*PROMPT, 2]), 0.0)
    harness.run()
    assert harness.cached["one", 0] == harness.cached["two", 0] == 24
    assert directions(harness).count(TransferDirection.HOST_TO_DEVICE) == 1


def test_an_abort_during_a_load_leaves_the_pages_to_the_next() -> None:
    harness = make_harness()
    serve(harness, "cold", PROMPT)
    serve(harness, "flood", OTHER)
    harness.core.submit(make_request("gone", PROMPT), 0.0)
    harness.plan()
    assert harness.core.memory.loads is not None
    assert harness.core.memory.loads.loading_tokens > 0
    harness.core.abort(RequestId("gone"))
    harness.run()
    assert harness.core.memory.loads.loading_tokens == 0
    loads = directions(harness).count(TransferDirection.HOST_TO_DEVICE)
    assert serve(harness, "next", PROMPT) == 20
    assert directions(harness).count(TransferDirection.HOST_TO_DEVICE) == loads


def test_dead_workers_lose_the_pages_of_both_tiers() -> None:
    harness = make_harness()
    serve(harness, "cold", PROMPT)
    serve(harness, "flood", OTHER)
    harness.core.submit(make_request("unlucky", PROMPT), 0.0)
    harness.plan()
    harness.lose_workers()
    harness.run()
    assert harness.cached["unlucky", 0] == 0
    assert harness.outputs["unlucky", 0] == expected_output(PROMPT, len(PROMPT) + 8, (STOP_ID,))


def test_a_rank_that_is_late_keeps_the_row_waiting() -> None:
    harness = make_harness(ranks=2)
    serve(harness, "cold", PROMPT)
    serve(harness, "flood", OTHER)
    harness.core.submit(make_request("waits", PROMPT), 0.0)
    harness.plan()
    (load,) = [key for key, open_ in harness.worker.open.items() if open_.transfer.direction.name == "HOST_TO_DEVICE"]
    harness.complete(load, 1)
    for _ in range(3):
        harness.plan()
        harness.result()
    assert ("waits", 0) not in harness.cached
    harness.complete(load, 0)
    harness.run()
    assert harness.cached["waits", 0] == 20


@pytest.mark.parametrize("policy", WritePolicy)
@pytest.mark.parametrize("host_pages", [1, 2, 7])
@pytest.mark.parametrize("pages", [7, 9])
def test_the_smallest_pools_serve(policy: WritePolicy, host_pages: int, pages: int) -> None:
    harness = make_harness(pages=pages, host_pages=host_pages, policy=policy, max_context=28)
    for number in range(6):
        serve(harness, f"r{number}", PROMPT[: 12 + 4 * (number % 3)], user=f"user{number % 2}")


def test_selective_write_through_copies_only_reused_pages() -> None:
    harness = make_harness(pages=64, policy=WritePolicy.WRITE_THROUGH_SELECTIVE)
    assert harness.cache.host is not None
    serve(harness, "first", PROMPT)
    assert harness.cache.host.backed_up_pages == 0
    serve(harness, "second", PROMPT)
    # The sixth page is computed again, for the logits of its last token, and so used twice like the others.
    assert harness.cache.host.backed_up_pages == 6


def test_write_back_copies_only_pages_about_to_be_evicted() -> None:
    harness = make_harness(pages=64, policy=WritePolicy.WRITE_BACK)
    assert harness.cache.host is not None
    serve(harness, "one", PROMPT)
    assert harness.cache.host.backed_up_pages == 0
    for number in range(4):
        serve(harness, f"other{number}", list(range(400 + 100 * number, 460 + 100 * number)))
    assert harness.cache.host.backed_up_pages > 0
    assert serve(harness, "again", PROMPT) == 20
