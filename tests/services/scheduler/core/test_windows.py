"""Models of which some layers attend to a window only: two pools, and every layer reads what it should."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from common.errors import ConfigurationError
from common.steps import WindowPool
from services.scheduler.cache.factory import make_allocator
from services.scheduler.core.session import SessionRules
from tests.examples import examples
from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.core.harness import STOP_ID, Harness, make_request
from tests.services.scheduler.core.test_core_properties import CoreMachine

PROMPT = [(17 * position) % 900 + 10 for position in range(80)]


def serve(harness: Harness, name: str, prompt: list[int], max_tokens: int = 8, user: str = "alice") -> None:
    harness.core.submit(make_request(name, prompt, max_tokens=max_tokens, user=user), 0.0)
    harness.run()
    harness.audit()
    assert harness.outputs[name, 0] == expected_output(prompt, len(prompt) + max_tokens, (STOP_ID,))


@pytest.mark.parametrize("cache", ["chunk", "shared", "user_aware"])
def test_a_row_needs_no_more_of_the_window_pool_than_its_window(cache: str) -> None:
    # 88 tokens in pages of 4, of which a query sees 10.
    harness = Harness(pages=30, window=10, window_pool=9, cache=cache, max_step_tokens=16, max_context=100)  # type: ignore[arg-type]
    most = 0
    harness.core.submit(make_request("long", PROMPT, max_tokens=8), 0.0)
    for _ in range(1000):
        harness.plan()
        harness.check_accounts()
        windows = harness.core.memory.account_windows(harness.core.rows)
        assert windows is not None
        most = max(most, windows.protected)
        if not harness.result():
            break
    assert harness.outputs["long", 0] == expected_output(PROMPT, 88, (STOP_ID,))
    assert 3 <= most <= 9
    harness.core.memory.cache.flush()
    windows = harness.core.memory.account_windows(harness.core.rows)
    assert windows is not None
    assert windows.free == windows.capacity


def test_a_prefix_is_found_where_its_last_window_is_still_there() -> None:
    harness = Harness(pages=60, window=10, window_pool=40, cache="shared", max_context=100)
    serve(harness, "first", PROMPT[:40])
    serve(harness, "second", [*PROMPT[:40], 5, 6, 7])
    assert harness.cached["second", 0] == 40
    # The whole of the first one's path is there, so every prefix is.
    serve(harness, "shorter", PROMPT[:21])
    assert harness.cached["shorter", 0] == 20


def test_a_prefix_whose_window_has_gone_is_computed_again_from_where_one_is_left_and_then_found() -> None:
    # Room for one row's window and little more: of a long row only the end stays.
    harness = Harness(pages=60, window=10, window_pool=10, cache="shared", max_context=100, max_step_tokens=8)
    serve(harness, "long", PROMPT[:60])
    serve(harness, "short", PROMPT[:21])
    assert harness.cached["short", 0] == 0, "its window went when the long row moved on"
    serve(harness, "again", PROMPT[:21])
    assert harness.cached["again", 0] == 20, "the pages that were there have got their window pages back"
    # No page is there twice.
    assert harness.core.memory.cache.usage.nodes >= 1
    serve(harness, "longer", PROMPT[:64])


def test_rows_of_other_users_do_not_lose_their_windows_to_new_requests() -> None:
    harness = Harness(pages=60, window=10, window_pool=24, max_rows=4, max_context=100, max_step_tokens=16)
    for number, user in enumerate(("alice", "bob", "carol", "dora")):
        prompt = PROMPT[number : number + 40]
        harness.core.submit(make_request(user, prompt, user=user, max_tokens=20), 0.0)
    harness.run()
    harness.audit()
    for number, user in enumerate(("alice", "bob", "carol", "dora")):
        prompt = PROMPT[number : number + 40]
        assert harness.outputs[user, 0] == expected_output(prompt, 60, (STOP_ID,))


def test_windows_held_without_running_rows_are_detected_and_repaired() -> None:
    harness = Harness(pages=60, window=10, window_pool=40, cache="shared", max_context=100)
    serve(harness, "first", PROMPT[:40])
    memory = harness.core.memory
    assert memory.windows is not None
    (node,) = memory.cache.dump()
    memory.windows.pool.need(node.pages[-3:])
    accounts = memory.account_windows(harness.core.rows)
    assert accounts is not None
    assert not accounts.is_exact
    assert memory.window_faults(harness.core.rows)
    memory.repair_windows()
    harness.audit()
    serve(harness, "second", PROMPT[:50])
    assert harness.cached["second", 0] == 40


def test_a_window_pool_too_small_for_any_row_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"5 pages .* scheduler\.memory_fraction"):
        make_allocator("shared", 100, 16, WindowPool(pages=5, window_tokens=1024, layers=1, kv_bytes_per_token=1))
    windows = make_allocator("chunk", 3, 16, WindowPool(3, 1024, 1, 1)).windows
    assert windows is not None
    assert windows.capacity == 3


def test_a_uniform_model_has_no_second_pool() -> None:
    harness = Harness()
    serve(harness, "any", PROMPT[:20])
    assert harness.core.memory.account_windows(harness.core.rows) is None
    assert any(len(plan.grants.pages) for plan in harness.plans)
    assert all(not len(plan.grants.window_pages) for plan in harness.plans)


class WindowMachine(CoreMachine):
    @initialize(
        pages=st.integers(14, 40),
        depth=st.integers(1, 3),
        lock=st.sampled_from([0.0, 0.004]),
        cache=st.sampled_from(["isolated", "shared", "user_aware", "chunk"]),
        window=st.integers(1, 30),
        spare=st.integers(2, 20),
    )
    def start(self, pages: int, depth: int, lock: float, cache: str, window: int, spare: int) -> None:
        self.harness = Harness(
            pages=pages,
            depth=depth,
            target_plan_s=lock,
            max_rows=4,
            max_step_tokens=12,
            max_context=56,
            cache=cache,  # type: ignore[arg-type]  # drawn from its names
            window=window,
            window_pool=(window + 4) // 4 + 2 + spare,
            sessions=SessionRules(
                per_subject=2, total=3, subject_tokens=32, tenant_tokens=40, total_tokens=40, timeout_s=10.0
            ),
        )

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "harness"):
            windows = self.harness.core.memory.account_windows(self.harness.core.rows)
            assert windows is not None
            assert windows.free == windows.capacity


WindowMachine.TestCase.settings = examples(30, stateful_step_count=30)
TestWindows = WindowMachine.TestCase
