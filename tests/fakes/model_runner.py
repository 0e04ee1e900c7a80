"""A model runner without a model: its KV memory remembers tokens, its next token is a hash of all before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from common.steps import EngineCapacity, EngineSpec, SleepLevel
from tests.fakes.simulated_worker import VOCABULARY, next_token

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.worker.engine.execution.interface import ProgressReport, Transfers
    from services.worker.engine.execution.pooler import PoolerHead
    from services.worker.engine.host_tier.pool import HostPool
    from services.worker.engine.model.batch import ForwardBatch
    from services.worker.engine.vision.config import VisionConfig

PAGE_SIZE = 4
CONTEXT = 64


def spec(**changes: object) -> EngineSpec:
    fields: dict[str, object] = {"page_size": PAGE_SIZE, "max_rows": 8, "max_step_tokens": 64, **changes}
    return EngineSpec("no-model", **fields)  # type: ignore[arg-type]  # whatever a test wants to change


@dataclass
class CheckingRunner:
    """Verifies that a batch describes what it should before it answers."""

    capacity: EngineCapacity = field(
        default_factory=lambda: EngineCapacity(4000, PAGE_SIZE, CONTEXT, VOCABULARY, (2,), 8, "checking", "cpu", 1)
    )
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    # slot -> (token, position)
    kv: dict[int, tuple[int, int]] = field(default_factory=dict)
    # The same of the layers that attend to a window only, where these have pages of their own.
    window_kv: dict[int, tuple[int, int]] = field(default_factory=dict)
    # With recurrent layers: what the states of each row's slot, and of each snapshot, have taken in.
    states: dict[int, list[int]] = field(default_factory=dict)
    snapshots: dict[int, list[int]] = field(default_factory=dict)
    batches: list[ForwardBatch] = field(default_factory=list)
    closed: bool = False
    changes: list[str] = field(default_factory=list)
    host_pool: HostPool | None = None
    transfers: Transfers | None = None
    head: PoolerHead | None = None
    vision_config: VisionConfig | None = None
    # Called before every pass; a test may raise from it.
    before_forward: Callable[[], None] = lambda: None

    def sleep(self, level: SleepLevel, *, keeps_host_pages: bool) -> None:
        self.changes.append(f"asleep at level {int(level)}")

    def wake_weights(self, report: ProgressReport) -> None:
        self.changes.append("weights")

    def wake_cache(self) -> None:
        self.changes.append("cache")
        self.kv.clear()

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        return self.logits(self.hidden_states(batch))

    def logits(self, hidden: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        return hidden

    def hidden_states(self, batch: ForwardBatch) -> torch.Tensor:
        self.before_forward()
        self.batches.append(batch)
        self._check_shapes(batch)
        starts = batch.query_starts.tolist()
        histories: dict[int, list[int]] = {}
        for row in range(batch.rows):
            self._write(batch, range(starts[row], starts[row + 1]))
        for row in range(batch.rows):
            first = int(batch.key_lengths[row]) - (starts[row + 1] - starts[row])
            for i, token in enumerate(range(starts[row], starts[row + 1])):
                assert int(batch.positions[token]) == first + i, "positions continue where the row stood"
                histories[token] = self._read(batch.page_table[row].tolist(), first + i + 1)
                self._check_window(batch, row, histories[token])
        if self.capacity.recurrent_states is not None:
            self._advance_states(batch, starts, histories)
        logits = torch.zeros(len(batch.sample_indices), VOCABULARY)
        for sample, token in enumerate(batch.sample_indices.tolist()):
            logits[sample, next_token(histories[token])] = 1.0
        return logits.to(self.device)

    def load(self, row: int, snapshot: int) -> None:
        self.states[row] = self.snapshots[snapshot].copy()

    def save(self, row: int, snapshot: int) -> None:
        self.snapshots[snapshot] = self.states[row].copy()

    def _advance_states(self, batch: ForwardBatch, starts: list[int], histories: dict[int, list[int]]) -> None:
        assert batch.states is not None, "there are recurrent layers"
        chunks = batch.states.chunks
        assert [(chunk.start, chunk.stop) for chunk in chunks] == [
            (starts[row], starts[row + 1]) for row in range(batch.decode_rows, batch.rows)
        ]
        slots = [*batch.states.decoding.tolist(), *(chunk.slot for chunk in chunks)]
        begins = [False] * batch.decode_rows + [chunk.begins for chunk in chunks]
        for row, (slot, is_new) in enumerate(zip(slots, begins, strict=True)):
            before = [] if is_new else self.states[slot]
            assert before == histories[starts[row]][:-1], "the state of other tokens"
            self.states[slot] = histories[starts[row + 1] - 1]

    def broadcast_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        return token_ids

    def return_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        return token_ids

    def close(self) -> None:
        self.closed = True

    @staticmethod
    def _check_shapes(batch: ForwardBatch) -> None:
        queries = batch.query_starts.diff()
        assert batch.token_ids.dtype == batch.positions.dtype == batch.write_slots.dtype == torch.int64
        assert batch.query_starts.dtype == batch.key_lengths.dtype == batch.page_table.dtype == torch.int32
        assert len(batch.token_ids) == len(batch.positions) == len(batch.write_slots) == int(batch.query_starts[-1])
        assert int(queries.max()) == batch.max_query_length
        assert int(batch.key_lengths.max()) == batch.max_key_length
        assert all(int(length) == 1 for length in queries[: batch.decode_rows])

    def _write(self, batch: ForwardBatch, tokens: range) -> None:
        assert (batch.window_table is None) == (batch.window_slots is None) == (self.capacity.window_pool is None)
        for token in tokens:
            self.kv[int(batch.write_slots[token])] = (int(batch.token_ids[token]), int(batch.positions[token]))
            if batch.window_slots is not None:
                self.window_kv[int(batch.window_slots[token])] = self.kv[int(batch.write_slots[token])]

    def _check_window(self, batch: ForwardBatch, row: int, history: list[int]) -> None:
        """Look at what the last token of `history` sees in layers with a window."""
        if batch.window_table is None or self.capacity.window_pool is None:
            return
        pages = batch.window_table[row].tolist()
        for position in range(max(len(history) - self.capacity.window_pool.window_tokens, 0), len(history)):
            slot = pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
            assert self.window_kv[slot] == (history[position], position), "a page of the window holds something else"

    def _read(self, pages: list[int], length: int) -> list[int]:
        history = []
        for position in range(length):
            slot = pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
            token, written_for = self.kv[slot]
            assert written_for == position, "the page holds another part of a sequence"
            history.append(token)
        return history
