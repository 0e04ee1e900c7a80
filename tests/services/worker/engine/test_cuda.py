"""The same engine on a GPU. Plain torch kernels there: right first, fast is another matter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.steps import EngineSpec, StepPlan, StepResult
from common.types import StepId
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.execution.torch_model import torch_engine
from services.worker.engine.loader import load_decoder
from tests.services.worker.engine.scenario import chunk, open_row, tokens_by_row
from tests.services.worker.engine.tiny_llama import save_tiny_llama

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu

PROMPTS = ([5, 17, 60, 3, 44, 8], [9], [(7 * position) % 90 + 3 for position in range(70)])


def generate(reference: str, device: str, dtype: str, steps: int = 24) -> dict[int, list[int]]:
    """Prefill all prompts, the longest in two chunks, then decode greedily."""
    engine = torch_engine(lambda spec, report: load_decoder(spec, report, RunnerOptions(device=device)))
    spec = EngineSpec(reference, dtype=dtype, max_rows=4, max_context=256, page_size=16, device_pages=64)
    engine.configure(spec, lambda _fraction, _stage: None)
    results: list[StepResult] = []
    pages = iter(range(64))
    opens = tuple(
        open_row(row, prompt, pages=[next(pages) for _ in range(8)], total=len(prompt) + steps)
        for row, prompt in enumerate(PROMPTS)
    )
    first = (*(chunk(row, 0, len(prompt)) for row, prompt in enumerate(PROMPTS[:2])), chunk(2, 0, 40))
    engine.execute(StepPlan(StepId(1), opens=opens, prefills=first), results.append)
    engine.execute(StepPlan(StepId(2), prefills=(chunk(2, 40, 30),)), results.append)
    engine.execute(StepPlan(StepId(3), steps=steps), results.append)
    engine.settle(lambda: False)
    engine.close()
    assert not [result.error for result in results if result.error]
    passes = [tokens_by_row(result) for result in results]
    return {row: [tokens[row] for tokens in passes if row in tokens] for row in range(len(PROMPTS))}


def test_greedy_tokens_on_the_gpu_equal_those_on_the_cpu(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    cpu = generate(str(tmp_path), "cpu", "float32")
    gpu = generate(str(tmp_path), "cuda", "float32")
    assert gpu == cpu
    assert [len(tokens) for tokens in gpu.values()] == [24] * len(PROMPTS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_on_the_gpu(tmp_path: Path, dtype: str) -> None:
    save_tiny_llama(tmp_path)
    tokens = generate(str(tmp_path), "cuda", dtype)
    assert [len(row) for row in tokens.values()] == [24] * len(PROMPTS)
