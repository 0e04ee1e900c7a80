"""A real model's pages through the host tier: decoding goes on with the same tokens from other pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.errors import ConfigurationError
from common.steps import EngineSpec, StepPlan, StepResult
from common.transfers import Transfer, TransferDirection, TransferId
from common.types import RowSlot, StepId
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.execution.torch_model import torch_engine
from services.worker.engine.loader import load_decoder
from tests.services.worker.engine.driving import random_ids
from tests.services.worker.engine.scenario import chunk, ids, open_row, tokens_by_row
from tests.services.worker.engine.tiny_llama import VOCABULARY, save_tiny_llama

if TYPE_CHECKING:
    from pathlib import Path

    from common.steps import EngineCapacity

PROMPT = random_ids(64, VOCABULARY)
STEPS = 12


class Engine:
    """An engine with both tiers, its clock, and what it has reported."""

    def __init__(self, model: Path, **changes: object) -> None:
        fields: dict[str, object] = {"device_pages": 24, "host_pages": 16, "dtype": "float32", **changes}
        self.engine = torch_engine(lambda spec, report: load_decoder(spec, report, RunnerOptions(threads=1)))
        spec = EngineSpec(str(model), max_rows=2, max_context=128, max_step_tokens=64, **fields)  # type: ignore[arg-type]
        self.capacity: EngineCapacity = self.engine.configure(spec, lambda _fraction, _stage: None)
        self.results: list[StepResult] = []
        self.step = 0

    def run(self, **plan: object) -> list[StepResult]:
        self.step += 1
        first = len(self.results)
        self.engine.execute(StepPlan(StepId(self.step), **plan), self.results.append)  # type: ignore[arg-type]
        return self.results[first:]

    def move(self, direction: TransferDirection, device: list[int], host: list[int]) -> None:
        """Begin a copy and poll until it is done."""
        transfer = Transfer(TransferId(self.step + 1), direction, ids(device), ids(host))
        results = self.run(transfers=(transfer,))
        while not any(result.acks for result in results):
            results = self.run()

    def generate(self, pages: list[int], computed: int = 0) -> list[int]:
        """Run the prompt from `computed` on in a row of its own; return the tokens."""
        opened = open_row(0, PROMPT, pages, computed=computed, total=len(PROMPT) + STEPS)
        prefill = (chunk(0, computed, len(PROMPT) - computed),)
        results = self.run(opens=(opened,), prefills=prefill, steps=STEPS)
        self.run(closes=(RowSlot(0),))
        return [tokens_by_row(result)[0] for result in results if 0 in tokens_by_row(result)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny_llama(directory)
    return directory


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "fp8"])
def test_a_prompt_that_was_on_the_host_gives_the_same_tokens_from_other_pages(model: Path, kv_dtype: str) -> None:
    engine = Engine(model, kv_dtype=kv_dtype)
    cold = engine.generate([0, 1, 2, 3, 4])
    engine.move(TransferDirection.DEVICE_TO_HOST, [0, 1, 2], [9, 4, 5])
    # Somebody else's prompt takes the pages.
    engine.run(opens=(open_row(1, PROMPT[::-1], [0, 1, 2, 3, 4], total=70),), prefills=(chunk(1, 0, 64),))
    engine.run(closes=(RowSlot(1),))
    engine.move(TransferDirection.HOST_TO_DEVICE, [20, 7, 13], [9, 4, 5])
    assert engine.generate([20, 7, 13, 8, 9], computed=48) == cold
    # Not so from pages that hold something else.
    assert engine.generate([0, 1, 2, 8, 9], computed=48) != cold


def test_pages_in_float8_that_were_stored_give_the_same_tokens_in_another_process(model: Path) -> None:
    first, second = (Engine(model, kv_dtype="fp8") for _ in range(2))
    assert first.capacity.fingerprint == second.capacity.fingerprint
    cold = first.generate([0, 1, 2, 3, 4])
    first.move(TransferDirection.DEVICE_TO_HOST, [0, 1, 2], [9, 4, 5])
    source, target = first.engine.host_pages, second.engine.host_pages
    assert source is not None
    assert target is not None
    assert source.page_bytes == 16 * first.capacity.kv_bytes_per_token
    for page, other in zip((9, 4, 5), (1, 2, 3), strict=True):
        target.write_page(other, memoryview(source.read_page(page)))
    second.move(TransferDirection.HOST_TO_DEVICE, [20, 7, 13], [1, 2, 3])
    assert second.generate([20, 7, 13, 8, 9], computed=48) == cold


def test_prefill_and_load_speed_are_measured_at_start_up(model: Path) -> None:
    capacity = Engine(model).capacity
    assert capacity.host_pages == 16
    assert capacity.prefill_tokens_per_s > 0
    assert capacity.load_bytes_per_s > 0


def test_bytes_are_turned_into_pages(model: Path) -> None:
    per_page = Engine(model, host_pages=1).capacity.kv_bytes_per_token * 16
    assert Engine(model, host_pages=None, host_bytes=5 * per_page + 1).capacity.host_pages == 5
    with pytest.raises(ConfigurationError, match="does not hold a page"):
        Engine(model, host_pages=None, host_bytes=per_page - 1)


def test_nothing_is_measured_without_a_host_tier(model: Path) -> None:
    engine = Engine(model, host_pages=0)
    assert (engine.capacity.host_pages, engine.capacity.prefill_tokens_per_s) == (0, 0.0)
    assert engine.engine.host_pages is None
