"""Passes in pieces, against a runner that looks at what it is given, and on a GPU against passes kernel by kernel."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.steps import EngineCapacity, WindowPool
from services.worker.engine.encoder.config import EncoderActivation
from services.worker.engine.execution.piecewise_graphs import (
    PiecewiseGraph,
    largest_worthwhile_size,
    piecewise_capture_sizes,
)
from services.worker.engine.model.batch import ForwardBatch, PlacedImages
from services.worker.engine.vision.config import VisionConfig
from tests.services.worker.engine.driving import Driver, load, random_ids
from tests.services.worker.engine.families import FAMILIES, OTHERS, VOCABULARY, save_model

if TYPE_CHECKING:
    from pathlib import Path

PAGES, WINDOW_PAGES, PAGE_SIZE, SIZE = 30, 20, 4, 16
WINDOWED = WindowPool(WINDOW_PAGES, 8, 1, 64)


class StandIn:
    """What a pass needs of resident rows and of a model: hidden states are token ids, doubled by attention."""

    device = torch.device("cpu")
    vision_config: VisionConfig | None = None

    def __init__(self, window: WindowPool | None = None) -> None:
        self.capacity = EngineCapacity(PAGES, PAGE_SIZE, 64, 100, (), 1, "", "cpu", 2, window_pool=window)
        self.cells = self.page_table = torch.zeros(2, 4, dtype=torch.int32)
        self.window_table = self.page_table if window else None
        self.attended: list[ForwardBatch] = []
        self.stored: list[torch.Tensor] = []

    def hidden_states(self, batch: ForwardBatch) -> torch.Tensor:
        hidden = torch.stack([batch.token_ids.float(), batch.positions.float()], dim=1)
        for view in (batch, batch.in_window()):
            self.stored.append(view.write_slots.clone())
            outputs = torch.full_like(hidden, torch.nan)
            assert view.defer is not None
            view.defer(self._attend, hidden, outputs, in_window=view.is_in_window)
            hidden = outputs
        return hidden[batch.sample_indices]

    def _attend(self, queries: torch.Tensor, outputs: torch.Tensor, batch: ForwardBatch) -> None:
        self.attended.append(batch)
        outputs.copy_(2 * queries)


class SeeingStandIn(StandIn):
    """The part of a model that sees images which a pass needs: hidden states are a token's id and its coordinates."""

    def __init__(self, *, axes: tuple[int, ...] = (0, 1, 2), deep_layers: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.vision_config = VisionConfig(
            "", 0, width=1, hidden_size=1, intermediate_size=1, layers=3, heads=1, patch_size=1,
            activation=EncoderActivation.GELU, axes=axes, deep_layers=deep_layers,
        )  # fmt: skip

    def hidden_states(self, batch: ForwardBatch) -> torch.Tensor:
        hidden = batch.token_ids[:, None].float().expand(-1, 4).clone()
        assert batch.images is not None, "passes of a model that sees images may have some"
        batch.images.place(hidden)
        if batch.coordinates is not None:
            hidden[:, 1:] += batch.coordinates.t()
        for layer in range(batch.images.deep_layers):
            batch.images.deepen(hidden, layer)
        return hidden[batch.sample_indices]


class RecordedGraph:
    """Stands in for a `torch.cuda.CUDAGraph`: calls the recorded operations again, on the same memory."""

    def __init__(self) -> None:
        self._recording = _Recording()

    def capture_begin(self, **_options: object) -> None:
        self._recording.__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def capture_end(self) -> None:
        self._recording.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def replay(self) -> None:
        for function, args, kwargs, recorded in self._recording.calls:
            made = function(*args, **kwargs)
            # Views and changed arguments are where they were.
            if isinstance(made, torch.Tensor) and made.data_ptr() != recorded.data_ptr():
                recorded.copy_(made)


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, made))
        return made


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let passes be captured on a CPU."""
    stream = SimpleNamespace(wait_stream=lambda _other: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    # Memory of a graph on a CPU stays its own.
    monkeypatch.setattr("services.worker.engine.execution.piecewise_graphs._unowned", lambda tensor: tensor)


def live_batch(tokens: int, samples: list[int]) -> ForwardBatch:
    ids = torch.arange(tokens) + 50
    return ForwardBatch(
        token_ids=ids, positions=ids % 7, query_starts=torch.tensor([0, tokens]), key_lengths=torch.tensor([tokens]),
        page_table=torch.zeros(1, 4), write_slots=torch.arange(tokens) + 3, sample_indices=torch.tensor(samples).long(),
        decode_rows=0, max_query_length=tokens, max_key_length=tokens, window_table=torch.ones(1, 4),
        window_slots=torch.arange(tokens) + 8,
    )  # fmt: skip


@pytest.mark.parametrize("samples", [[4], [0, 2, 4], []])
def test_attention_gets_the_live_batch_and_padding_writes_to_an_unread_page(samples: list[int]) -> None:
    runner: Any = StandIn(WINDOWED)
    one = PiecewiseGraph(SIZE, runner, runner)
    # More tokens before fewer: padding must not write where those went.
    for tokens in (SIZE, 5):
        batch = live_batch(tokens, samples)
        hidden = one.hidden_states(batch)
        assert hidden[:, 0].tolist() == [4 * (50 + sample) for sample in samples]
        whole, windowed = runner.attended[-2:]
        assert whole is batch
        assert windowed.is_in_window
        assert windowed.page_table is batch.window_table
        for stored, first, pages in zip(runner.stored[-2:], (3, 8), (PAGES, WINDOW_PAGES), strict=True):
            assert stored[:tokens].tolist() == list(range(first, first + tokens))
            assert stored[tokens:].tolist() == [pages * PAGE_SIZE] * (SIZE - tokens)


@pytest.mark.usefixtures("recorded")
def test_something_is_called_after_each_graph_but_the_last() -> None:
    runner: Any = StandIn()
    one, counts = PiecewiseGraph(SIZE, runner, runner), []
    one.capture(None)
    one.hidden_states(live_batch(5, [4]), lambda: counts.append(len(runner.attended)))
    assert counts == list(range(1, len(runner.attended) + 1))
    assert len(counts) == len(one._graphs) - 1 > 1


def test_a_warm_up_attends_to_nothing() -> None:
    runner: Any = StandIn()
    one = PiecewiseGraph(SIZE, runner, runner)
    runner.hidden_states(one._batch)
    assert runner.attended == []


AXES = torch.tensor([[0, 1, 2, 2, 4], [0, 1, 2, 3, 4], [0, 1, 3, 3, 4]])


def test_coordinates_are_those_of_the_pass_and_of_texts_their_positions_on_each_axis() -> None:
    runner: Any = SeeingStandIn()
    one, batch = PiecewiseGraph(SIZE, runner, runner), live_batch(5, list(range(5)))
    seeing = one.hidden_states(replace(batch, coordinates=AXES))
    assert (seeing[:, 1:] - seeing[:, :1]).t().tolist() == AXES.tolist()
    # A longer pass, and one like the first: what is left of others is padding.
    for text in (live_batch(SIZE, list(range(SIZE))), batch):
        hidden = one.hidden_states(text)
        assert (hidden[:, 1:] - hidden[:, :1]).t().tolist() == text.positions.expand(3, -1).tolist()


def test_a_model_without_axes_has_no_coordinates() -> None:
    runner: Any = SeeingStandIn(axes=())
    batch = live_batch(5, [0, 4])
    assert PiecewiseGraph(SIZE, runner, runner).hidden_states(batch).tolist() == [[50.0] * 4, [54.0] * 4]
    runner = StandIn()
    one = PiecewiseGraph(SIZE, runner, runner)
    assert one._batch.coordinates is None
    assert one._batch.images is None


@pytest.mark.parametrize("deep_layers", [(), (0, 2)])
def test_images_of_a_pass_take_their_places_and_those_of_others_do_not_stay(deep_layers: tuple[int, ...]) -> None:
    runner: Any = SeeingStandIn(axes=(), deep_layers=deep_layers)
    one, batch = PiecewiseGraph(SIZE, runner, runner), live_batch(5, list(range(5)))
    deep = tuple(torch.full((2, 4), 10.0 ** (i + 1)) for i in range(len(deep_layers)))
    seeing = replace(batch, images=PlacedImages(torch.tensor([1, 3]), torch.tensor([[1.0] * 4, [2.0] * 4]), deep))
    added = 110.0 if deep_layers else 0.0
    for _ in range(2):
        hidden = one.hidden_states(seeing)
        assert hidden[:, 0].tolist() == [50.0, 1.0 + added, 52.0, 2.0 + added, 54.0]
        assert one.hidden_states(batch)[:, 0].tolist() == [50.0, 51.0, 52.0, 53.0, 54.0]


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("deep_layers", [(), (0, 2)])
def test_graphs_are_replayed_around_what_is_done_with_images(deep_layers: tuple[int, ...]) -> None:
    runner: Any = SeeingStandIn(deep_layers=deep_layers)
    captured, alone = (PiecewiseGraph(SIZE, runner, runner) for _ in range(2))
    captured.capture(None)
    assert len(captured._graphs) == 2 + len(deep_layers)
    text = live_batch(5, [0, 1, 3, 4])
    deep = tuple(torch.full((2, 4), 10.0 ** (i + 1)) for i in range(len(deep_layers)))
    images = PlacedImages(torch.tensor([1, 3]), torch.tensor([[1.0] * 4, [2.0] * 4]), deep)
    seeing = replace(text, images=images, coordinates=AXES)
    made = []
    for batch in (seeing, text, replace(live_batch(9, [1, 8]), coordinates=torch.ones(3, 9).long()), seeing):
        hidden = captured.hidden_states(batch)
        assert torch.equal(hidden, alone.hidden_states(batch))
        made.append(hidden.tolist())
    assert made[0] == made[3]
    assert made[0] != made[1]


def test_capture_sizes_are_bounded_by_the_step_size() -> None:
    assert piecewise_capture_sizes(8) == ()
    assert piecewise_capture_sizes(100)[-1] == 96
    sizes = piecewise_capture_sizes(1 << 20)
    assert sizes[-1] == 4096
    assert all(0 < larger - smaller <= max(32, larger / 5) for smaller, larger in itertools.pairwise(sizes))


@pytest.mark.parametrize(
    ("max_step_tokens", "fits", "saves", "most"),
    [(100, 4096, 4096, 100), (3000, 4096, 4096, 2048), (9000, 4096, 4096, 4096), (9000, 4096, 600, 512),
     (9000, 1500, 4096, 1024), (9000, 100, 100, 256)],
)  # fmt: skip
def test_the_largest_captured_size_depends_on_memory_and_saved_time(
    max_step_tokens: int, fits: int, saves: int, most: int
) -> None:
    def make(size: int) -> Any:
        def capture(_pool: object) -> None:
            if size > fits:
                raise torch.OutOfMemoryError("made up")

        return SimpleNamespace(
            size=size, has_memory=lambda: size <= fits, capture=capture, saves_time=lambda: size <= saves,
            release=lambda: None,
        )  # fmt: skip

    assert largest_worthwhile_size(max_step_tokens, make, None, None) == most
    # Ranks ask each other beforehand.
    assert largest_worthwhile_size(max_step_tokens, make, None, bool) == most
    # Another rank that has less, or saves less.
    assert largest_worthwhile_size(9000, make, None, lambda holds: False) == 256


OWN = {
    "llama": {"head_dim": 64, "hidden_size": 128},
    "qwen3 moe": {"head_dim": 64, "hidden_size": 64, "num_experts": 16, "num_experts_per_tok": 4},
    "gemma3": {"head_dim": 256, "hidden_size": 64},
    # Through `transformers`.
    "starcoder2": {"hidden_size": 256},
    "cohere2": {"hidden_size": 256},
}


@pytest.mark.gpu
@pytest.mark.parametrize("family", OWN)
def test_piecewise_graphs_compute_the_same_as_uncaptured_passes(family: str, tmp_path: Path) -> None:
    name, options = {**FAMILIES, **OTHERS}[family]
    save_model(tmp_path, name, {**options, **OWN[family], "initializer_range": 0.1})
    runner = load(tmp_path, backend="gpu", dtype="bfloat16")
    from services.worker.engine.execution.device_batch import DeviceBatch

    rows = DeviceBatch(8, 16, runner.capacity.device_pages, VOCABULARY, runner.device)
    pool = torch.cuda.graph_pool_handle()
    passes = [PiecewiseGraph(size, rows, runner) for size in (64, 32)]
    with torch.inference_mode():
        for one in passes:
            assert one.has_memory()
            one.capture(pool)
        driver = Driver(runner)
        ids = random_ids(200, VOCABULARY)
        grown, fresh = driver.open(80), driver.open(80)
        driver.run([(grown, ids[:40])])
        for count, one in ((30, passes[1]), (60, passes[0]), (31, passes[1]), (7, passes[1])):
            work = [(grown, ids[100:101]), (fresh, ids[:count])]
            batch = driver.batch(work)
            alone = runner.hidden_states(batch).float()
            # The same once more: what is stored is stored again.
            in_pieces = one.hidden_states(replace(batch)).float()
            assert (in_pieces - alone).norm() / alone.norm() < 1e-2
    runner.close()
