"""Receives and sends of a stage around its graphs, against connections that remember both."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from common.steps import EngineCapacity
from services.worker.engine.execution.piecewise_graphs import PiecewiseGraph
from services.worker.engine.execution.stage_ends import NoEnds, StageEnds
from services.worker.engine.model.batch import ForwardBatch

CPU = torch.device("cpu")
HIDDEN, MOST = 3, 16


@dataclass
class Links:
    """Stands in for `StageLinks`."""

    is_first: bool = False
    is_last: bool = False
    arriving: deque[torch.Tensor] = field(default_factory=deque)
    sent: list[torch.Tensor] = field(default_factory=list)

    def receive_into(self, hidden: torch.Tensor) -> None:
        hidden.copy_(self.arriving.popleft())

    def send(self, hidden: torch.Tensor) -> None:
        self.sent.append(hidden)


def ends_with(links: Any) -> StageEnds:
    return StageEnds(links, (MOST, HIDDEN), torch.float32, CPU)


class AddingStage:
    """Stands in for the model of a stage: adds 1 to the residual stream, or token ids to nothing in the first stage."""

    capacity = EngineCapacity(30, 4, 64, 100, (), 1, "", "cpu", 2)
    vision_config = None

    def __init__(self) -> None:
        self.cells = self.page_table = torch.zeros(2, 4, dtype=torch.int32)
        self.window_table = None

    def hidden_states(self, batch: ForwardBatch) -> torch.Tensor:
        assert batch.stage is not None, "captured passes have fixed memory at their ends"
        entering, leaving = batch.stage.entering, batch.stage.leaving
        hidden = batch.token_ids[:, None].float().expand(-1, HIDDEN) if entering is None else entering
        if leaving is None:
            return (hidden + 1)[batch.sample_indices]
        leaving.copy_(hidden + 1)
        return hidden[:0]


def prompt(tokens: int, samples: list[int]) -> ForwardBatch:
    ids = torch.arange(tokens) + 50
    return ForwardBatch(
        token_ids=ids, positions=ids, query_starts=torch.tensor([0, tokens]), key_lengths=torch.tensor([tokens]),
        page_table=torch.zeros(1, 4), write_slots=torch.arange(tokens), sample_indices=torch.tensor(samples).long(),
        decode_rows=0, max_query_length=tokens, max_key_length=tokens,
    )  # fmt: skip


def piecewise(links: Links) -> PiecewiseGraph:
    stage: Any = AddingStage()
    return PiecewiseGraph(MOST, stage, stage, ends_with(links))


def test_what_is_sent_does_not_change_with_the_next_pass() -> None:
    links = Links(is_first=True)
    ends = ends_with(links)
    buffers = ends.buffers(4)
    assert buffers is not None
    assert buffers.entering is None
    assert buffers.leaving is not None
    for value in (1.0, 2.0):
        ends.receive(2)
        buffers.leaving.fill_(value)
        ends.send(2)
    assert [sent.tolist() for sent in links.sent] == [[[1.0] * HIDDEN] * 2, [[2.0] * HIDDEN] * 2]


def test_the_last_stage_sends_nothing_and_passes_of_all_sizes_receive_into_the_same_memory() -> None:
    links = Links(is_last=True, arriving=deque([torch.ones(3, HIDDEN)]))
    ends = ends_with(links)
    small, large = ends.buffers(4), ends.buffers(8)
    assert small is not None
    assert large is not None
    assert small.leaving is None
    assert small.entering is not None
    assert large.entering is not None
    ends.receive(3)
    ends.send(3)
    assert small.entering.tolist() == [[1.0] * HIDDEN] * 3 + [[0.0] * HIDDEN]
    assert large.entering[:4].tolist() == small.entering.tolist()
    assert not links.sent


def test_prompts_pass_through_stages_without_padding() -> None:
    first, middle, last = Links(is_first=True), Links(), Links(is_last=True)
    stages = [piecewise(links) for links in (first, middle, last)]
    for tokens, samples in ((5, [4]), (3, [0, 2]), (2, [])):
        batch = prompt(tokens, samples)
        assert len(stages[0].hidden_states(batch)) == 0
        middle.arriving.append(first.sent[-1])
        assert len(stages[1].hidden_states(batch)) == 0
        last.arriving.append(middle.sent[-1])
        hidden = stages[2].hidden_states(batch)
        assert hidden[:, 0].tolist() == [53.0 + sample for sample in samples]
        assert first.sent[-1].shape == middle.sent[-1].shape == (tokens, HIDDEN)


def test_a_whole_model_has_no_ends() -> None:
    ends = NoEnds()
    assert ends.buffers(4) is None
    ends.receive(4)
    ends.send(4)
