"""Models with recurrent layers: the engine from plans to tokens, and the delta rule in blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import ConfigurationError
from common.steps import EngineSpec, RowOpen, StateSave, StepPlan, StepResult
from common.types import RowSlot, SnapshotSlot, StepId
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.execution.interface import InvalidPlanError
from services.worker.engine.execution.torch_model import torch_engine
from services.worker.engine.kernels.torch.delta_net import delta_rule
from services.worker.engine.loader import load_decoder
from tests.services.worker.engine.driving import Driver, load, random_ids
from tests.services.worker.engine.families import VOCABULARY, reference_logits, save_family
from tests.services.worker.engine.scenario import chunk, open_row, tokens_by_row

if TYPE_CHECKING:
    from pathlib import Path

    from services.worker.engine.execution.engine import ModelEngine

PAGE = 16
NEW_TOKENS = 6
PROMPTS = [random_ids(count, VOCABULARY, seed=count) for count in (1, 20, 70)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("model"), "qwen3.5")


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[list[int]]:
    """Continuations by `transformers`."""
    answers = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(NEW_TOKENS):
            ids.append(int(reference_logits(directory, ids)[-1].argmax()))
        answers.append(ids[len(prompt) :])
    return answers


def engine_of(directory: Path, **changes: Any) -> ModelEngine:
    engine = torch_engine(lambda spec, report: load_decoder(spec, report, RunnerOptions(threads=1)))
    fields: dict[str, Any] = {"dtype": "float32", "max_rows": 4, "max_context": 256, "device_pages": 64, **changes}
    engine.configure(EngineSpec(str(directory), page_size=PAGE, **fields), lambda _fraction, _stage: None)
    return engine


class Worker:
    """Runs plans one after the other."""

    def __init__(self, engine: ModelEngine) -> None:
        self.engine = engine
        self._step = 0

    def run(self, **plan: Any) -> list[dict[int, int]]:
        """Return the tokens of each pass, by row."""
        results: list[StepResult] = []
        self.engine.execute(StepPlan(StepId(self._step), **plan), results.append)
        self._step += 1
        return [tokens_by_row(result) for result in results]

    def answer(self, row: int, prompt: list[int], pages: list[int], chunks: list[int]) -> list[int]:
        """Prefill a prompt up to each of `chunks`, decode, and close the row."""
        opens: tuple[RowOpen, ...] = (open_row(row, prompt, pages, total=len(prompt) + NEW_TOKENS),)
        start, tokens = 0, []
        for end in [*chunks, len(prompt)]:
            tokens += self.run(opens=opens, prefills=(chunk(row, start, end - start),))
            opens, start = (), end
        tokens += self.run(steps=NEW_TOKENS - 1)
        self.run(closes=(row,))
        return [each[row] for each in tokens if row in each]


def test_a_row_starts_with_empty_states_whatever_its_slot_held(directory: Path, expected: list[list[int]]) -> None:
    worker = Worker(engine_of(directory))
    for _ in range(2):
        for prompt, tokens, chunks in zip(PROMPTS, expected, ([], [1, 19], [64]), strict=True):
            assert worker.answer(2, prompt, [3, 9, 4, 8, 1], chunks) == tokens


def test_rows_decode_beside_prefills_as_alone(directory: Path, expected: list[list[int]]) -> None:
    worker = Worker(engine_of(directory))
    got: dict[int, list[int]] = {row: [] for row in range(3)}
    for row, prompt in enumerate(PROMPTS):
        half = len(prompt) // 2
        pages = range(5 * row, 5 * row + 5)
        opens: tuple[RowOpen, ...] = (open_row(row, prompt, pages, total=len(prompt) + NEW_TOKENS),)
        passes = []
        if half:
            passes += worker.run(opens=opens, prefills=(chunk(row, 0, half),))
            opens = ()
        passes += worker.run(opens=opens, prefills=(chunk(row, half, len(prompt) - half),))
        for tokens in passes:
            for slot, token in tokens.items():
                got[slot].append(token)
    for tokens in worker.run(steps=NEW_TOKENS):
        for slot, token in tokens.items():
            got[slot].append(token)
    assert [got[row] for row in range(3)] == expected


def test_a_row_continues_from_another_rows_snapshot(directory: Path, expected: list[list[int]]) -> None:
    worker, prompt, tokens = Worker(engine_of(directory, snapshots=3)), PROMPTS[2], expected[2]
    pages = [3, 9, 4, 8, 1]
    opens = (open_row(2, prompt, pages, total=len(prompt) + NEW_TOKENS),)
    save = StateSave(RowSlot(2), 48, SnapshotSlot(1))
    worker.run(opens=opens, prefills=(chunk(2, 0, 48),), saves=(save,))
    first = worker.run(prefills=(chunk(2, 48, 22),))
    # Within a plan of several passes, the state after 80 tokens; one that is not reached is not saved.
    saves = (StateSave(RowSlot(2), 72, SnapshotSlot(0)), StateSave(RowSlot(2), 90, SnapshotSlot(1)))
    rest = worker.run(steps=NEW_TOKENS - 1, saves=saves)
    assert [each[2] for each in (*first, *rest)] == tokens
    worker.run(closes=(2,))
    for row, known, snapshot, computed in ((0, [], 1, 48), (1, tokens[:4], 0, 72)):
        opened = open_row(
            row, [*prompt, *known], pages, computed=computed, prompt=len(prompt), total=len(prompt) + NEW_TOKENS
        )
        opens = (replace(opened, snapshot=SnapshotSlot(snapshot)),)
        passes = worker.run(opens=opens, prefills=(chunk(row, computed, len(prompt) + len(known) - computed),))
        passes += worker.run(steps=NEW_TOKENS)
        assert [each[row] for each in passes if row in each] == tokens[len(known) :]


@pytest.mark.parametrize(
    ("opened", "saves", "message"),
    [
        ({"computed": 16}, (), "16 computed tokens without a snapshot"),
        ({"snapshot": 0}, (), "0 computed tokens with a snapshot"),
        ({"computed": 16, "snapshot": 2}, (), r"a snapshot outside \[0, 2\)"),
        ({}, (StateSave(RowSlot(0), 16, SnapshotSlot(2)),), r"a snapshot outside \[0, 2\)"),
        ({}, (StateSave(RowSlot(1), 16, SnapshotSlot(0)),), "row 1, which is not open"),
    ],
    ids=str,
)
def test_wrong_snapshots_are_refused(
    directory: Path, opened: dict[str, int], saves: tuple[StateSave, ...], message: str
) -> None:
    worker = Worker(engine_of(directory, snapshots=2))
    snapshot = opened.get("snapshot")
    row = open_row(0, PROMPTS[1], [3, 4], computed=opened.get("computed", 0))
    row = replace(row, snapshot=None if snapshot is None else SnapshotSlot(snapshot))
    with pytest.raises(InvalidPlanError, match=message):
        worker.run(opens=(row,), saves=saves)


def test_snapshots_take_as_much_memory_as_pages(directory: Path) -> None:
    capacity = load(directory, device_pages=640).capacity
    states = capacity.recurrent_states
    assert states is not None
    assert states.row_bytes == 3 * 4 * (4 * 8 * 12 + 2 * 80)
    page_bytes = capacity.kv_bytes_per_token * capacity.page_size
    assert states.snapshots == 640 * page_bytes // states.row_bytes
    assert capacity.pages_per_snapshot == -(-states.row_bytes // page_bytes)


def test_the_host_tier_has_snapshots_in_as_much_memory_as_pages(directory: Path) -> None:
    size = 1 << 20
    capacity = load(directory, device_pages=64, host_bytes=size).capacity
    states = capacity.recurrent_states
    assert states is not None
    page_bytes = capacity.kv_bytes_per_token * capacity.page_size
    slot_bytes = -(-states.row_bytes // 64) * 64
    assert capacity.host_pages == size // 2 // page_bytes
    assert states.host_snapshots == capacity.host_pages * page_bytes // slot_bytes > 50
    assert capacity.load_bytes_per_s > 0
    given = load(directory, device_pages=64, host_pages=20, host_snapshots=3).capacity
    assert given.recurrent_states is not None
    assert (given.host_pages, given.recurrent_states.host_snapshots) == (20, 3)
    with pytest.raises(ConfigurationError, match=r"pages and \d+ snapshots takes"):
        load(directory, device_pages=64, host_bytes=1 << 60)


@pytest.mark.parametrize("tokens", [1, 63, 64, 200])
def test_blocks_compute_what_single_steps_do(tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    queries, keys = (
        torch.nn.functional.normalize(torch.randn(tokens, 3, 8, generator=generator), dim=-1) for _ in "qk"
    )
    values = torch.randn(tokens, 3, 5, generator=generator)
    decays = -torch.rand(tokens, 3, generator=generator) * 4
    strengths = torch.rand(tokens, 3, generator=generator)
    state = torch.randn(3, 8, 5, generator=generator)
    outputs, last = delta_rule(queries, keys, values, decays, strengths, state)
    for i in range(tokens):
        state = state * decays[i].exp()[:, None, None]
        corrections = (values[i] - torch.einsum("hkv,hk->hv", state, keys[i])) * strengths[i][:, None]
        state = state + keys[i][..., None] * corrections[:, None]
        assert torch.allclose(outputs[i], torch.einsum("hkv,hk->hv", state, queries[i]), atol=1e-4)
    assert torch.allclose(last, state, atol=1e-4)


def test_experts_in_one_tensor_are_found(tmp_path: Path) -> None:
    save_family(tmp_path, "qwen3.5 moe")
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(4):
        experts = f"model.layers.{layer}.mlp.experts"
        parts = {
            name: torch.stack([tensors.pop(f"{experts}.{i}.{name}_proj.weight") for i in range(6)])
            for name in ("gate", "up", "down")
        }
        tensors[f"{experts}.gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), dim=1)
        tensors[f"{experts}.down_proj"] = parts["down"]
    single = Driver(load(tmp_path, backend="torch")).generate(PROMPTS[1], NEW_TOKENS)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert Driver(load(tmp_path, backend="torch")).generate(PROMPTS[1], NEW_TOKENS) == single
