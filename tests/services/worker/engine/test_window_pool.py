"""A hybrid model with two page pools: the scheduler's plans over the real engine give what `transformers` gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from common.steps import EngineCapacity, EngineSpec, StepPlan, StepResult
from common.types import FinishReason
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.execution.torch_model import torch_engine
from services.worker.engine.loader import load_decoder
from tests.fakes.simulated_worker import SimulatedWorker
from tests.services.scheduler.core.harness import STOP_ID, Harness, make_request
from tests.services.worker.engine.driving import random_ids
from tests.services.worker.engine.families import (
    FAMILIES,
    OTHERS,
    VOCABULARY,
    reference_logits,
    save_family,
    save_model,
)

if TYPE_CHECKING:
    from pathlib import Path

    from services.worker.engine.execution.engine import ModelEngine
    from tests.services.worker.engine.parallel.ranks import Ranks

WINDOW = 20
PAGES, POOL, ROWS = 60, 24, 3


class EngineWorker(SimulatedWorker):
    """Runs plans on a real engine."""

    def __init__(self, engine: ModelEngine) -> None:
        super().__init__(0, 0)
        self._engine = engine
        # Rows and their tokens, in order.
        self.told: list[tuple[int, int]] = []

    def run(self, plan: StepPlan) -> list[StepResult]:
        results: list[StepResult] = []
        self._engine.execute(plan, results.append)
        self._engine.settle(lambda: False)
        for result in results:
            self.told += zip(result.rows.tolist(), result.token_ids.tolist(), strict=True)
        return results


def load(
    directory: Path, backend: str, page_size: int, device: str = "cpu", **changes: object
) -> tuple[ModelEngine, EngineCapacity]:
    fields: dict[str, object] = {
        "page_size": page_size, "max_rows": ROWS, "max_step_tokens": 16, "max_context": 128, "device_pages": PAGES,
        "window_pages": POOL, "window_ratio": 0.5, "dtype": "float32", **changes,
    }  # fmt: skip
    options = RunnerOptions(device=device, threads=1, backend=backend)
    engine = torch_engine(lambda spec, report: load_decoder(spec, report, options))
    spec = EngineSpec(str(directory), **fields)  # type: ignore[arg-type]  # whatever a test wants to change
    return engine, engine.configure(spec, lambda _fraction, _stage: None)


@pytest.mark.parametrize(
    ("model", "backend", "page_size", "share"),
    # Of the last one nothing but the attention is our own.
    [
        (FAMILIES["gemma3"], "torch", 4, 2),
        (FAMILIES["gemma3"], "compiled", 16, 2),
        (FAMILIES["gpt-oss"], "compiled", 16, 2),
        # Two heads of 16 components where the other layer has one of 48.
        (FAMILIES["gemma4"], "compiled", 16, 2 * 32 / 48),
        (OTHERS["cohere2"], "torch", 4, 2),
    ],
    ids=["torch", "compiled", "with sinks", "with other heads", "through transformers"],
)
def test_rows_longer_than_the_window_continue_as_transformers_does(
    model: tuple[str, dict[str, Any]], backend: str, page_size: int, share: float, tmp_path: Path
) -> None:
    save_model(tmp_path, *model)
    engine, capacity = load(tmp_path, backend, page_size)
    pool = capacity.window_pool
    assert pool is not None
    assert (pool.pages, pool.window_tokens, pool.layers) == (POOL, WINDOW, 2)
    # Two of three layers.
    assert pool.kv_bytes_per_token == share * capacity.kv_bytes_per_token
    harness = Harness(
        pages=PAGES, page_size=page_size, max_rows=ROWS, max_context=128, cache="shared", window=WINDOW,
        window_pool=POOL, target_plan_s=0.004,
    )  # fmt: skip
    harness.worker = EngineWorker(engine)
    first, second = random_ids(60, VOCABULARY, seed=1), random_ids(90, VOCABULARY, seed=2)
    prompts = [first, second, second[:33], first[:40] + second[:7], [5], first, second[:50], first[:41]]
    for number, prompt in enumerate(prompts):
        harness.core.submit(make_request(f"r{number}", prompt, max_tokens=30), 0.0)
        harness.plan()
        harness.result()
    harness.run()
    harness.audit()
    assert max(harness.cached.values()) >= 32, "some prefix was found"
    for number, prompt in enumerate(prompts):
        tokens = harness.outputs[f"r{number}", 0]
        expected = reference_logits(tmp_path, prompt + tokens[:-1])[len(prompt) - 1 :].argmax(dim=-1).tolist()
        assert tokens == expected
        stopped = harness.finishes[f"r{number}", 0].reason is FinishReason.STOP
        assert len(tokens) == 30 or (stopped and tokens[-1] == STOP_ID)


def run_rank(
    rank: int, world_size: int, rendezvous: str, model: Path, plans: list[StepPlan]
) -> tuple[int, list[tuple[int, int]]]:
    """Carry out plans that were made for one rank; return the window pool's pages, and the rows' tokens in order."""
    # Each offers another number of pages.
    engine, capacity = load(
        model, "torch", 4, rank=rank, world_size=world_size, rendezvous=rendezvous, window_pages=POOL + rank
    )
    assert capacity.window_pool is not None
    told: list[StepResult] = []
    for plan in plans:
        engine.execute(plan, told.append)
    engine.close()
    pairs = [zip(result.rows.tolist(), result.token_ids.tolist(), strict=True) for result in told]
    return capacity.window_pool.pages, [pair for each in pairs for pair in each]


def test_two_ranks_with_two_pools_give_the_same_as_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    save_family(tmp_path, "gemma3")
    engine, _ = load(tmp_path, "torch", 4)
    harness = Harness(
        pages=PAGES, page_size=4, max_rows=ROWS, max_context=128, cache="shared", window=WINDOW, window_pool=POOL
    )
    harness.worker = worker = EngineWorker(engine)
    for number, length in enumerate((60, 90, 5)):
        harness.core.submit(make_request(f"r{number}", random_ids(length, VOCABULARY, seed=length)), 0.0)
    harness.run()
    (pages, tokens), (other_pages, others) = ranks.run(run_rank, 2, tmp_path, harness.plans)
    assert pages == other_pages == POOL
    assert tokens == worker.told
    assert others == []


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [32, 64])
def test_on_a_gpu_two_pools_give_the_same_as_one(head_dim: int, tmp_path: Path) -> None:
    save_family(tmp_path, "gemma3", head_dim=head_dim)
    prompts = [random_ids(length, VOCABULARY, seed=length) for length in (60, 90, 5, 41, 1)]
    outputs = []
    for window in (0, WINDOW):
        engine, capacity = load(
            tmp_path, "gpu", 16, device="cuda", dtype="bfloat16", window_ratio=0.5 if window else 0.0,
            window_pages=POOL if window else None,
        )  # fmt: skip
        assert (capacity.window_pool is not None) == bool(window)
        # Without reuse the passes are the same, so that all numbers are.
        harness = Harness(
            pages=PAGES, page_size=16, max_rows=ROWS, max_context=128, cache="chunk", window=window, window_pool=POOL
        )
        harness.worker = EngineWorker(engine)
        for number, prompt in enumerate(prompts):
            harness.core.submit(make_request(f"r{number}", prompt, max_tokens=30), 0.0)
        harness.run()
        harness.audit()
        outputs.append(harness.outputs)
        engine.close()
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma3", {"window_ratio": 0.0}),
        ("gemma3", {"host_bytes": 2**20}),
        # All layers have a window, or none.
        ("mistral windowed", {}),
        ("llama", {}),
    ],
)
def test_without_a_separate_window_pool_all_layers_share_one_pool(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    save_family(tmp_path, family)
    _, capacity = load(tmp_path, "torch", 4, **changes)
    assert capacity.window_pool is None
    assert capacity.device_pages == PAGES


def test_an_engine_is_reused_if_the_requested_window_pages_equal_its_own(tmp_path: Path) -> None:
    save_family(tmp_path, "gemma3")
    engine, capacity = load(tmp_path, "torch", 4, device_pages=None, window_pages=None)
    model, pool = engine._model, capacity.window_pool
    assert pool is not None
    spec = engine._spec
    assert spec is not None
    for pages in (pool.pages, pool.pages + 1):
        asked = EngineSpec(**{name: getattr(spec, name) for name in spec.__slots__} | {"window_pages": pages})
        engine.configure(asked, lambda _fraction, _stage: None)
        assert (engine._model is model) == (pages == pool.pages)
