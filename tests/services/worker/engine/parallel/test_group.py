"""Ranks in processes of their own."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import torch

from common.errors import ConfigurationError
from services.worker.engine.parallel.group import SingleRank, join_group
from services.worker.engine.parallel.shards import Span, split_evenly
from tests.services.worker.engine.driving import Driver, load, random_ids
from tests.services.worker.engine.families import VOCABULARY, reference_logits, save_family

if TYPE_CHECKING:
    from pathlib import Path

    from tests.services.worker.engine.parallel.ranks import Ranks

CPU = torch.device("cpu")
PROMPT = random_ids(40, VOCABULARY)


def exchange(rank: int, world_size: int, rendezvous: str) -> dict[str, list[int] | list[list[int]] | int]:
    torch.set_num_threads(1)
    group = join_group(rank, world_size, rendezvous, CPU)
    spans = split_evenly(5, world_size)
    mine = torch.arange(spans[rank].start, spans[rank].stop).repeat(2, 1)
    result: dict[str, list[int] | list[list[int]] | int] = {
        "sum": group.sum(torch.tensor([rank, 10])).tolist(),
        "gathered": group.gather_columns(mine, spans).tolist(),
        "broadcast": group.broadcast(torch.tensor([rank + 7])).tolist(),
        "minimum": group.minimum(20 - rank),
        "digests": [[int(digest, 16)] for digest in group.gather_digests(f"0{rank + 1}")],
    }
    group.close()
    return result


def join_again(rank: int, world_size: int, rendezvous: str, late: int) -> list[int]:
    """Join, and join again while `late` is still in the first group; return both sums."""
    sums = []
    for _ in range(2):
        group = join_group(rank, world_size, rendezvous, CPU)
        sums.append(int(group.sum(torch.tensor([rank + 1])).item()))
        time.sleep(0.5 if rank == late else 0)
        group.close()
    return sums


def compute(rank: int, world_size: int, rendezvous: str, model: str, backend: str) -> tuple[torch.Tensor, int, int]:
    """Prefill in two chunks, then decode four given tokens; return all logits."""
    # Nobody says how many pages: each rank counts for itself, and the least counts.
    runner = load(
        model, backend=backend, rank=rank, world_size=world_size, rendezvous=rendezvous, device_pages=40 + 5 * rank
    )
    driver = Driver(runner)
    row = driver.open(44)
    parts = [PROMPT[:23], PROMPT[23:36], *([token] for token in PROMPT[36:])]
    logits = torch.cat([driver.run([(row, part)], all_tokens=True) for part in parts])
    told = runner.broadcast_tokens(torch.tensor([5 if rank == 0 else 0]))
    runner.close()
    return logits, int(told), runner.capacity.device_pages


@pytest.mark.parametrize("late", [0, 2])
def test_ranks_that_join_again_need_not_leave_at_the_same_time(ranks: Ranks, late: int) -> None:
    assert ranks.run(join_again, 3, late) == [[6, 6]] * 3


def test_collectives_of_two_ranks_give_the_right_results(ranks: Ranks) -> None:
    first, second = ranks.run(exchange, 2)
    assert first["sum"] == second["sum"] == [1, 20]
    assert first["gathered"] == [[0, 1, 2, 3, 4]] * 2
    assert second["gathered"] == []
    assert first["broadcast"] == second["broadcast"] == [7]
    assert first["minimum"] == second["minimum"] == 19
    assert first["digests"] == second["digests"] == [[1], [2]]


@pytest.mark.parametrize(
    ("family", "world_size", "backend"),
    [("smol", 2, "compiled"), ("qwen3", 3, "torch"), ("llama biased", 2, "compiled")],
)
def test_several_ranks_compute_the_same_as_one(
    ranks: Ranks, family: str, world_size: int, backend: str, tmp_path: Path
) -> None:
    expected = reference_logits(save_family(tmp_path, family), PROMPT)
    results = ranks.run(compute, world_size, str(tmp_path), backend)
    torch.testing.assert_close(results[0][0], expected, atol=3e-4, rtol=1e-4)
    assert [tuple(logits.shape) for logits, _, _ in results[1:]] == [(0, VOCABULARY)] * (world_size - 1)
    assert [told for _, told, _ in results] == [5] * world_size
    assert [pages for _, _, pages in results] == [40] * world_size


def test_a_single_rank_needs_no_peers() -> None:
    group = join_group(0, 1, "", CPU)
    assert isinstance(group, SingleRank)
    tensor = torch.ones(2, 3)
    assert group.sum(tensor) is tensor
    assert group.broadcast(tensor) is tensor
    assert group.gather_columns(tensor, (Span(0, 3),)) is tensor
    assert group.minimum(4) == 4
    group.close()


def test_several_ranks_need_an_address() -> None:
    with pytest.raises(ConfigurationError, match="rendezvous"):
        join_group(0, 2, "", CPU)
