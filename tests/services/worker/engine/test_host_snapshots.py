"""Recurrent layers over the host tier: rows continue from copies on the host with the tokens of cold ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.transfers import TransferDirection
from common.types import SamplingParams
from services.scheduler.cache.tiers.config import HostConfig
from services.worker.engine.host_tier import sliced_transfers
from tests.services.scheduler.core.harness import Harness, make_request, with_options
from tests.services.worker.engine.driving import random_ids
from tests.services.worker.engine.families import VOCABULARY, save_family
from tests.services.worker.engine.test_window_pool import EngineWorker, load

if TYPE_CHECKING:
    from pathlib import Path

    from common.steps import StepPlan
    from tests.services.worker.engine.parallel.ranks import Ranks

PAGES, HOST_PAGES, ROWS, SNAPSHOTS, HOST_SNAPSHOTS = 60, 150, 2, 10, 30
NEW_TOKENS = 16
PROMPT = random_ids(57, VOCABULARY, seed=1)
FLOODS = [random_ids(60, VOCABULARY, seed=seed) for seed in (2, 3)]
GREEDY, SEEDED = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, seed=5)


class Served(Harness):
    """A core over a real engine with a host tier, whose copies are real, too."""

    def __init__(self, model: Path, family: str, backend: str, page_size: int, **options: object) -> None:
        save_family(model, family)
        engine, capacity = load(
            model, backend, page_size, device_pages=PAGES, snapshots=SNAPSHOTS, host_pages=HOST_PAGES,
            host_snapshots=HOST_SNAPSHOTS,
        )  # fmt: skip
        states = capacity.recurrent_states
        assert states is not None
        assert (capacity.host_pages, states.host_snapshots) == (HOST_PAGES, HOST_SNAPSHOTS)
        fields = {
            "pages": PAGES, "page_size": page_size, "max_rows": ROWS, "max_context": 128, "cache": "shared",
            "target_plan_s": 0.004, "snapshots": SNAPSHOTS, "interval": capacity.pages_per_snapshot,
            "host": HostConfig(pages=HOST_PAGES, snapshots=HOST_SNAPSHOTS), **options,
        }  # fmt: skip
        super().__init__(**fields)  # type: ignore[arg-type]  # whatever a test wants to change
        self.worker = EngineWorker(engine)
        self._asked_at = 0

    def result(self) -> bool:
        acks = self.results[0].acks if self.results else ()
        is_there = super().result()
        for ack in acks:
            self.core.finish_transfer(ack, self.now)
        return is_there

    def ask(self, name: str, prompt: list[int], sampling: SamplingParams = GREEDY) -> tuple[int, list[int]]:
        """Serve a request; return how many tokens were cached, and its tokens."""
        self._asked_at = len(self.plans)
        request = with_options(make_request(name, prompt, max_tokens=NEW_TOKENS), sampling=sampling)
        self.core.submit(request, 0.0)
        self.run()
        self.audit()
        return self.cached[name, 0], self.outputs[name, 0]

    def leave_device(self) -> None:
        """Let all pages leave the device, and other content take their place."""
        self.cache.evict(PAGES)
        assert self.cache.snapshots is not None
        assert self.cache.snapshots.kept == 0, "snapshots go with their pages"
        for number, prompt in enumerate(FLOODS):
            self.ask(f"flood {number} {len(self.plans)}", prompt)

    def loads(self) -> list[tuple[int, int]]:
        """Return the numbers of pages and snapshots of each load for the last request."""
        return [
            (transfer.pages, len(transfer.device_snapshots))
            for plan in self.plans[self._asked_at :]
            for transfer in plan.transfers
            if transfer.direction is TransferDirection.HOST_TO_DEVICE
        ]

    def lose_snapshots(self, *, on_host: bool) -> None:
        """Evict all snapshots of a tier, and no page."""
        assert self.cache.host is not None
        assert self.cache.host.states is not None
        pool = self.cache.host.states.host if on_host else self.cache.snapshots
        assert pool is not None
        for entry in list(pool.all()):
            pool.leave(np.array([entry.page], np.int32), entry.owner.scope)
        assert pool.kept == 0


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    ("family", "backend", "page_size"), [("qwen3 next", "compiled", 16), ("qwen3.5 moe", "torch", 4)], ids=str
)
def test_a_second_turn_has_the_tokens_of_a_cold_one_wherever_its_prefix_is(
    family: str, backend: str, page_size: int, sampling: SamplingParams, tmp_path: Path
) -> None:
    served = Served(tmp_path, family, backend, page_size)
    cached, answer = served.ask("first", PROMPT, sampling)
    assert cached == 0
    turn = [*PROMPT, *answer, 5, 6, 7]
    cold = Served(tmp_path, family, backend, page_size).ask("cold", turn, sampling)
    assert cold[0] == 0
    on_device, tokens = served.ask("from the device", turn, sampling)
    assert on_device >= 48
    assert tokens == cold[1]
    assert not served.loads()
    # Another chat with the same beginning has left a snapshot for this one, at the end of what both have.
    full, tokens = served.ask("from the device again", turn, sampling)
    assert full >= on_device
    assert tokens == cold[1]
    served.leave_device()
    assert served.ask("from the host", turn, sampling) == (full, cold[1])
    assert served.loads() == [(full // page_size, 1)]
    served.lose_snapshots(on_host=False)
    assert served.ask("a snapshot from the host", turn, sampling) == (full, cold[1])
    assert served.loads() == [(0, 1)]
    served.leave_device()
    served.lose_snapshots(on_host=True)
    assert served.ask("pages without a snapshot", turn, sampling) == (0, cold[1])
    assert not served.loads()
    # What was computed has its snapshots again, on both tiers.
    served.leave_device()
    assert served.ask("from the host again", turn, sampling) == (full, cold[1])


def run_rank(
    rank: int, world_size: int, rendezvous: str, model: Path, plans: list[StepPlan]
) -> tuple[int, list[tuple[int, int]]]:
    """Carry out plans that were made for one rank; return the copies it made, and the rows' tokens in order."""
    # All that a plan begins is done with it, as the plans after it take for granted.
    sliced_transfers.BACKUP_BUDGET_S = sliced_transfers.LOAD_BUDGET_S = sliced_transfers.IDLE_BUDGET_S = 60.0
    engine, _ = load(
        model, "torch", 4, rank=rank, world_size=world_size, rendezvous=rendezvous, device_pages=PAGES,
        snapshots=SNAPSHOTS, host_pages=HOST_PAGES, host_snapshots=HOST_SNAPSHOTS,
    )  # fmt: skip
    worker = EngineWorker(engine)
    acks = sum(len(result.acks) for plan in plans for result in worker.run(plan))
    engine.close()
    return acks, worker.told


def test_two_ranks_copy_their_parts_of_states(ranks: Ranks, tmp_path: Path) -> None:
    served = Served(tmp_path, "qwen3.5 moe", "torch", 4)
    _, answer = served.ask("first", PROMPT)
    served.leave_device()
    cached, _ = served.ask("second", [*PROMPT, *answer, 5, 6, 7])
    assert cached >= 48
    assert any(count for _, count in served.loads())
    begun = sum(len(plan.transfers) for plan in served.plans)
    assert isinstance(served.worker, EngineWorker)
    (first, tokens), (second, others) = ranks.run(run_rank, 2, tmp_path, served.plans)
    assert first == second == begun
    assert tokens == served.worker.told
    assert not others, "only the first rank reports tokens"
