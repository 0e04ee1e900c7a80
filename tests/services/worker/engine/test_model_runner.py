"""Logits against `transformers`, and what must not change them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from common.errors import ConfigurationError
from common.steps import EngineSpec
from services.worker.engine.loader import load_decoder
from tests.services.worker.engine.driving import Driver, load, random_ids
from tests.services.worker.engine.families import FAMILIES, VOCABULARY, reference_logits, save_family

if TYPE_CHECKING:
    from pathlib import Path

    from services.worker.engine.model_runner import ModelRunner

BACKENDS = ("torch", "compiled")
PROMPT = random_ids(70, VOCABULARY)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("smol"), "smol")


@pytest.fixture(scope="module", params=BACKENDS)
def runner(request: pytest.FixtureRequest, model: Path) -> ModelRunner:
    return load(model, backend=request.param)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    expected = reference_logits(save_family(tmp_path, family), PROMPT)
    for backend in BACKENDS:
        driver = Driver(load(tmp_path, backend=backend))
        got = driver.run([(driver.open(len(PROMPT)), PROMPT)], all_tokens=True)
        # Recurrent states add up roundings over the whole prompt.
        atol = 3e-3 if family.startswith(("qwen3 next", "qwen3.5")) else 3e-4
        torch.testing.assert_close(got, expected, atol=atol, rtol=1e-4)


def test_a_chunked_prefill_gives_the_same_logits_as_a_whole_one(runner: ModelRunner) -> None:
    driver = Driver(runner)
    whole = driver.run([(driver.open(70), PROMPT)], all_tokens=True)
    row = driver.open(70)
    parts = [driver.run([(row, PROMPT[a:b])], all_tokens=True) for a, b in ((0, 1), (1, 16), (16, 37), (37, 70))]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-4, rtol=1e-4)


def test_decoding_gives_the_same_logits_as_a_prefill(runner: ModelRunner) -> None:
    driver = Driver(runner)
    whole = driver.run([(driver.open(70), PROMPT)], all_tokens=True)
    row = driver.open(70)
    driver.run([(row, PROMPT[:50])])
    parts = [driver.run([(row, [token])]) for token in PROMPT[50:]]
    torch.testing.assert_close(torch.cat(parts), whole[50:], atol=1e-4, rtol=1e-4)


def test_rows_of_a_mixed_batch_do_not_see_each_other(runner: ModelRunner) -> None:
    driver = Driver(runner)
    prompts = [random_ids(count, VOCABULARY, seed=count) for count in (33, 5, 16, 40)]
    alone = [driver.run([(driver.open(48), prompt)], all_tokens=True)[-1] for prompt in prompts]
    rows = [driver.open(48) for _ in prompts]
    driver.run([(rows[0], prompts[0][:-1]), (rows[1], prompts[1][:-1])])
    driver.run([(rows[3], prompts[3][:20])])
    together = driver.run(
        [
            (rows[0], prompts[0][-1:]),
            (rows[1], prompts[1][-1:]),
            (rows[2], prompts[2]),
            (rows[3], prompts[3][20:]),
        ]
    )
    torch.testing.assert_close(together, torch.stack(alone), atol=1e-4, rtol=1e-4)


def test_compiled_operators_make_a_token_independent_of_its_batch_to_the_last_bit(model: Path) -> None:
    driver = Driver(load(model, backend="compiled", threads=2))
    whole = driver.run([(driver.open(70), PROMPT)], all_tokens=True)
    row, neighbour = driver.open(70), driver.open(100)
    driver.run([(neighbour, PROMPT[:30]), (row, PROMPT[:41])])
    parts = []
    for i, token in enumerate(PROMPT[41:]):
        guests = [(driver.open(16), [token] * (2 + i)) for _ in range(i % 3)] if i < 12 else []
        parts.append(driver.run([(neighbour, [token]), (row, [token]), *guests])[1])
    assert torch.equal(torch.stack(parts), whole[41:])


def test_a_shared_prefix_serves_several_rows(runner: ModelRunner) -> None:
    driver = Driver(runner)
    expected = [driver.run([(driver.open(40), [*PROMPT[:32], extra])]) for extra in (3, 4)]
    first = driver.open(40)
    driver.run([(first, PROMPT[:32])])
    rows = [driver.open(40) for _ in range(2)]
    for row in rows:
        row.pages[:2] = first.pages[:2]
        row.computed = PROMPT[:32]
    got = driver.run([(rows[0], [3]), (rows[1], [4])])
    torch.testing.assert_close(got, torch.cat(expected), atol=1e-4, rtol=1e-4)


def test_a_pass_that_samples_nothing_still_stores_kv(runner: ModelRunner) -> None:
    driver = Driver(runner)
    expected = driver.run([(driver.open(70), PROMPT)])
    row = driver.open(70)
    batch = driver.batch([(row, PROMPT[:60])])
    assert runner.forward(replace(batch, sample_indices=batch.sample_indices[:0])).shape == (0, VOCABULARY)
    row.computed = PROMPT[:60]
    torch.testing.assert_close(driver.run([(row, PROMPT[60:])]), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("float16", 3e-3), ("bfloat16", 3e-2)])
def test_smaller_kv_stays_close(model: Path, backend: str, kv_dtype: str, tolerance: float) -> None:
    expected = reference_logits(model, PROMPT)
    runner = load(model, backend=backend, kv_dtype=kv_dtype)
    driver = Driver(runner)
    got = driver.run([(driver.open(70), PROMPT)], all_tokens=True)
    assert runner.capacity.kv_bytes_per_token == 2 * 3 * 3 * 16 * 2
    assert 0 < (got - expected).norm() / expected.norm() < tolerance


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_weights_give_the_same_as_transformers_with_rounded_weights(model: Path, dtype: str) -> None:
    expected = reference_logits(model, PROMPT, rounded=getattr(torch, dtype))
    driver = Driver(load(model, backend="compiled", dtype=dtype))
    got = driver.run([(driver.open(70), PROMPT)], all_tokens=True)
    # Some processors round the inputs of products to bfloat16, too.
    assert (got - expected).norm() / expected.norm() < (1e-5 if dtype == "float16" else 0.05)


def test_capacity_describes_the_allocated_cache(model: Path) -> None:
    capacity = load(model, device_pages=20, page_size=32, max_context=100).capacity
    assert (capacity.device_pages, capacity.page_size, capacity.max_context) == (20, 32, 100)
    assert (capacity.vocabulary_size, capacity.eos_token_ids, capacity.layers) == (VOCABULARY, (2,), 3)
    assert capacity.kv_bytes_per_token == 2 * 3 * 3 * 16 * 4
    assert capacity.device == "cpu"


def test_no_row_may_be_longer_than_the_pool(model: Path) -> None:
    assert load(model, device_pages=5).capacity.max_context == 80


def test_without_a_given_page_count_there_are_pages_for_all_rows(model: Path) -> None:
    # All rows full: 8 rows of 512 tokens.
    assert load(model, device_pages=None, max_rows=8).capacity.device_pages == 8 * 32


def test_fingerprints_are_equal_exactly_if_pages_are_interchangeable(model: Path, tmp_path: Path) -> None:
    first = load(model).capacity.fingerprint
    assert load(model, device_pages=9, max_rows=3).capacity.fingerprint == first
    different = [
        load(model, page_size=32),
        load(model, kv_dtype="float16"),
        load(model, backend="torch"),
        load(save_family(tmp_path, "smol", seed=1)),
        load(model, load_format="dummy"),
    ]
    fingerprints = [runner.capacity.fingerprint for runner in different]
    assert len({first, *fingerprints}) == 1 + len(different)


def test_progress_rises_to_one_and_names_its_stages(model: Path) -> None:
    seen: list[tuple[float, str]] = []
    load_decoder(EngineSpec(str(model), device_pages=4), lambda progress, stage: seen.append((progress, stage)))
    progress = [value for value, _ in seen]
    assert progress == sorted(progress)
    assert progress[-1] == 1.0
    assert {"loading weights", "allocating the KV pool", "ready"} <= {stage for _, stage in seen}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"dtype": "int8"}, "dtype 'int8' is not one of"),
        ({"kv_dtype": "fp8_e5m2"}, "kv_dtype 'fp8_e5m2' is not one of auto, .*, fp8, fp8_e4m3"),
        ({"load_format": "pickle"}, "load_format 'pickle' is not one of"),
        ({"load_format": "gguf"}, "not what load_format=gguf reads"),
        ({"world_size": 2}, "needs the rendezvous address"),
        ({"world_size": 10}, "leaves some without work"),
        ({"backend": "cuda-graphs"}, "backend 'cuda-graphs' is not one of"),
    ],
)
def test_invalid_load_settings_are_refused_with_a_reason(
    model: Path, changes: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        load(model, **changes)  # type: ignore[arg-type]  # as parametrised


def test_a_page_size_that_does_not_fit_registers_runs_in_plain_torch(model: Path) -> None:
    expected = reference_logits(model, PROMPT)
    driver = Driver(load(model, backend="compiled", page_size=5))
    got = driver.run([(driver.open(70), PROMPT)], all_tokens=True)
    torch.testing.assert_close(got, expected, atol=3e-4, rtol=1e-4)
