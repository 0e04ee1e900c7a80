from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from deploy.cli.inspection.state import load_cost, storage_cost, traffic
from protos.gen.pando.v1 import scheduler_pb2

if TYPE_CHECKING:
    from rich.console import RenderableType


def printed(shown: RenderableType) -> str:
    console = Console(width=160, no_color=True)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


def test_tier_traffic_is_shown_with_its_rate() -> None:
    host = scheduler_pb2.HostTierState(
        open_transfers=3,
        traffic=[scheduler_pb2.TierTraffic(direction="host_to_device", transfers=7, pages=4_000, seconds=2.5)],
        skipped_load_tokens=320,
        skipped_backup_pages=9,
        skipped_storage_tokens=1_120,
    )
    shown = printed(traffic(scheduler_pb2.GetStateResponse(page_size_tokens=16, host_tier=host)))
    for text in ("3 open", "host to device", "4,000", "1,600", "20", "70", "9"):
        assert text in shown


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        (scheduler_pb2.LoadCost(), "always, as no cost has been measured"),
        (scheduler_pb2.LoadCost(prefill_tokens_per_s=9e3, load_bytes_per_s=2e9), "never (prefill 9,000 tokens/s; 2.00"),
        (
            scheduler_pb2.LoadCost(
                prefill_tokens_per_s=9e3, load_bytes_per_s=2e9, bytes_per_token=46_080, break_even_tokens=57
            ),
            "57 tokens or more",
        ),
    ],
)
def test_the_rule_for_loading_is_a_sentence(cost: scheduler_pb2.LoadCost, expected: str) -> None:
    assert expected in printed(load_cost(cost))


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        (scheduler_pb2.LoadCost(prefill_tokens_per_s=9e3), "always, as no cost has been measured"),
        (scheduler_pb2.LoadCost(prefill_tokens_per_s=9e3, storage_bytes_per_s=1.25e9), "faster (1.25 GB/s)"),
        (
            scheduler_pb2.LoadCost(prefill_tokens_per_s=9e3, storage_bytes_per_s=2e9, storage_break_even_tokens=570),
            "570 tokens or more (2.00 GB/s)",
        ),
    ],
)
def test_the_rule_for_reading_from_storage_is_a_sentence(cost: scheduler_pb2.LoadCost, expected: str) -> None:
    assert expected in printed(storage_cost(cost))
