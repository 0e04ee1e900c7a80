"""Keys and values in FP8: scales, identity, capacity, and the same tokens from every place that holds pages."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import ConfigurationError
from services.worker.engine.backends import check_float8_kv
from services.worker.engine.kernels.interface import KvLayer, KvLayout
from services.worker.engine.kernels.torch.attention import TorchAttention
from services.worker.engine.model.kv_pool import KvPool
from services.worker.engine.model.kv_scales import measured_scales
from services.worker.storage.objects import Miss, ObjectFormat
from tests.services.worker.engine.driving import Driver, load, random_ids
from tests.services.worker.engine.families import OTHERS, VOCABULARY, save_family, save_model

if TYPE_CHECKING:
    from pathlib import Path

    from services.worker.engine.kernels.interface import QkNorm
    from services.worker.engine.model.batch import ForwardBatch
    from services.worker.engine.model_runner import ModelRunner
    from tests.services.worker.engine.parallel.ranks import Ranks

PROMPT = random_ids(60, VOCABULARY)
BACKENDS = ("torch", "compiled")
WHOLE = "model.safetensors"
# Relative difference of logits where few numbers are rounded to the other side of a border.
CLOSE = 5e-3
KEY = bytes(range(32))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("model"), "qwen3")


def with_scales(model: Path, target: Path, scales: dict[str, torch.Tensor]) -> Path:
    """Copy `model` with scales in each layer, by what follows its name."""
    shutil.copytree(model, target)
    tensors = load_file(model / WHOLE)
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    for layer in range(layers):
        tensors |= {f"model.layers.{layer}.{name}": scale.clone() for name, scale in scales.items()}
    save_file(tensors, target / WHOLE, metadata={"format": "pt"})
    return target


def scales_of(runner: ModelRunner) -> list[tuple[list[float], list[float]]]:
    found = []
    for layer in runner._pool.layers:
        assert layer.scales is not None
        found.append((layer.scales.keys.tolist(), layer.scales.values.tolist()))
    return found


def logits_of(runner: ModelRunner, *borders: int) -> torch.Tensor:
    """Return the logits of the prompt's last token, computed in chunks that end at `borders`."""
    driver = Driver(runner)
    row = driver.open(len(PROMPT))
    for start, end in zip((0, *borders), (*borders, len(PROMPT)), strict=True):
        logits = driver.run([(row, PROMPT[start:end])])
    return logits


def rounded_logits(
    model: Path, scales: list[tuple[list[float], list[float]]], monkeypatch: pytest.MonkeyPatch
) -> torch.Tensor:
    """Return the logits with keys and values in float32 that were rounded through FP8, in plain torch."""
    store, runner = TorchAttention.store, load(model, backend="torch")
    layers = [layer.keys.data_ptr() for layer in runner._pool.layers]

    def store_rounded(
        self: TorchAttention, qkv: torch.Tensor, layer: KvLayer, norms: QkNorm | None, batch: ForwardBatch
    ) -> torch.Tensor:
        queries = store(self, qkv, layer, norms, batch)
        for held, factors in zip((layer.keys, layer.values), scales[layers.index(layer.keys.data_ptr())], strict=True):
            slots, by = held.view(-1, *held.shape[2:]), torch.tensor(factors)[:, None]
            numbers = (slots[batch.write_slots] / by).clamp(-448, 448).to(torch.float8_e4m3fn)
            slots[batch.write_slots] = numbers.float() * by
        return queries

    with monkeypatch.context() as patch:
        patch.setattr(TorchAttention, "store", store_rounded)
        return logits_of(runner)


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_are_those_of_rounded_numbers_in_whole_and_in_chunks(
    model: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, runner = load(model, backend=backend), load(model, backend=backend, kv_dtype="fp8")
    expected = rounded_logits(model, scales_of(runner), monkeypatch)
    # Far from the border between two numbers of FP8, no rounding before it matters.
    assert distance(logits_of(runner), expected) < CLOSE
    assert distance(logits_of(runner, 16, 37, 59), expected) < CLOSE
    assert distance(logits_of(exact), expected) > 10 * CLOSE
    assert runner.capacity.kv_bytes_per_token * 4 == exact.capacity.kv_bytes_per_token


def test_both_back_ends_compute_the_same_with_the_same_scales(model: Path) -> None:
    plain, compiled = (load(model, backend=backend, kv_dtype="fp8_e4m3") for backend in BACKENDS)
    assert scales_of(plain) == scales_of(compiled)
    assert distance(logits_of(compiled), logits_of(plain)) < CLOSE


def test_twice_as_many_tokens_fit_as_in_16_bits(model: Path) -> None:
    narrow, wide = load(model, kv_dtype="fp8"), load(model, kv_dtype="bfloat16")
    assert 2 * narrow.capacity.kv_bytes_per_token == wide.capacity.kv_bytes_per_token


def test_scales_are_measured_the_same_every_time_and_are_powers_of_two(model: Path) -> None:
    first, second = (scales_of(load(model, kv_dtype="fp8")) for _ in range(2))
    assert first == second
    numbers = torch.tensor(first)
    assert torch.equal(numbers, torch.exp2(numbers.log2().round()))
    assert len(set(numbers.flatten().tolist())) > 1


def test_measured_scales_leave_room_and_ignore_heads_of_zeros() -> None:
    keys = torch.zeros(2, 4, 3, 8)
    keys[1, 2, 0, 5], keys[0, 0, 1, 0] = -448.0, 100.0
    for layout, axes in ((KvLayout.TOKEN_MAJOR, (1, 2)), (KvLayout.HEAD_MAJOR, (2, 1))):
        placed = keys if axes == (1, 2) else keys.transpose(1, 2)
        (scales,) = measured_scales(KvPool((KvLayer(placed, placed * 2),), 2, 4), layout)
        assert scales.keys.tolist() == [2.0, 0.5, 1.0]
        assert scales.values.tolist() == [4.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "names",
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    ],
    ids=lambda names: names[0],
)
def test_a_checkpoints_scales_are_used(
    model: Path, tmp_path: Path, names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = with_scales(model, tmp_path / "m", {names[0]: torch.tensor(0.03), names[1]: torch.tensor([0.02])})
    runner = load(stored, kv_dtype="fp8")
    expected = [pytest.approx([0.03] * 2), pytest.approx([0.02] * 2)]
    for layer in scales_of(runner):
        assert list(layer) == expected
    assert distance(logits_of(runner), rounded_logits(model, scales_of(runner), monkeypatch)) < CLOSE
    # They are of no use, and no obstacle, where keys and values are not in FP8.
    assert torch.equal(logits_of(load(stored)), logits_of(load(model)))


@pytest.mark.parametrize(
    ("scales", "complaint"),
    [
        (
            {"k_scale": torch.ones(3), "v_scale": torch.ones(3)},
            "one positive number or 2, one for each KV head; it has 3",
        ),
        ({"k_scale": torch.zeros(1), "v_scale": torch.ones(1)}, "not all of them positive"),
        ({"k_scale": torch.tensor(torch.nan), "v_scale": torch.ones(1)}, "not all of them positive"),
    ],
)
def test_scales_that_cannot_be_used_are_refused(
    model: Path, tmp_path: Path, scales: dict[str, torch.Tensor], complaint: str
) -> None:
    stored = with_scales(model, tmp_path / "m", {f"self_attn.{name}": scale for name, scale in scales.items()})
    with pytest.raises(ConfigurationError, match=complaint):
        load(stored, kv_dtype="fp8")


def test_scales_of_some_layers_only_are_refused(model: Path, tmp_path: Path) -> None:
    stored = with_scales(
        model, tmp_path / "m", {"self_attn.k_scale": torch.ones(1), "self_attn.v_scale": torch.ones(1)}
    )
    tensors = load_file(stored / WHOLE)
    del tensors["model.layers.1.self_attn.k_scale"]
    save_file(tensors, stored / WHOLE, metadata={"format": "pt"})
    with pytest.raises(ConfigurationError, match="some layers only, and none in layer 1"):
        load(stored, kv_dtype="fp8")


def test_pages_with_other_scales_have_other_names_and_cannot_be_read(model: Path, tmp_path: Path) -> None:
    def fingerprint(path: Path, kv_dtype: str = "fp8") -> str:
        return load(path, kv_dtype=kv_dtype).capacity.fingerprint

    names = ("self_attn.k_scale", "self_attn.v_scale")
    one, other = (
        with_scales(model, tmp_path / str(i), {names[0]: torch.tensor(0.02), names[1]: torch.tensor(value)})
        for i, value in enumerate((0.02, 0.03))
    )
    measured, again = fingerprint(model), fingerprint(model, "fp8_e4m3")
    assert measured == again
    prints = {
        measured,
        fingerprint(one),
        fingerprint(other),
        fingerprint(model, "auto"),
        fingerprint(model, "bfloat16"),
    }
    assert len(prints) == 5
    ours, theirs = (ObjectFormat(fingerprint(path), 64) for path in (one, other))
    assert ours.name(KEY) != theirs.name(KEY)
    stored = bytes(ours.encode(KEY, KEY, bytes(64)))
    payload = ours.decode(KEY, KEY, stored)
    assert isinstance(payload, memoryview)
    assert bytes(payload) == bytes(64)
    assert theirs.decode(KEY, KEY, stored) is Miss.FOREIGN_LAYOUT


def rank_logits(rank: int, world_size: int, rendezvous: str, model: str) -> tuple[list[float], object]:
    from pathlib import Path

    runner = load(Path(model), kv_dtype="fp8", rank=rank, world_size=world_size, rendezvous=rendezvous)
    try:
        return logits_of(runner).flatten().tolist(), scales_of(runner)
    finally:
        runner.close()


def test_two_ranks_have_the_scales_of_their_heads(ranks: Ranks, model: Path, tmp_path: Path) -> None:
    alone = load(model, kv_dtype="fp8")
    (logits, first), (_, second) = ranks.run(rank_logits, 2, str(model))
    assert [
        (keys + more, values + further) for (keys, values), (more, further) in zip(first, second, strict=True)
    ] == scales_of(alone)
    assert distance(torch.tensor(logits)[None], logits_of(alone)) < CLOSE
    scales = torch.tensor([0.02, 0.03])
    stored = with_scales(
        model, tmp_path / "m", {"self_attn.k_scale": scales, "self_attn.v_scale": scales.view(2, 1, 1)}
    )
    (_, first), (_, second) = ranks.run(rank_logits, 2, str(stored))
    for rank, number in ((first, 0.02), (second, 0.03)):
        for layer in rank:
            assert list(layer) == [[pytest.approx(number)]] * 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["gemma3", "gemma4", "gpt-oss"])
def test_windows_sinks_and_norms_work_with_float8(
    tmp_path: Path, family: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_family(tmp_path, family)
    runner = load(path, backend=backend, kv_dtype="fp8")
    expected = rounded_logits(path, scales_of(runner), monkeypatch)
    assert distance(logits_of(runner), expected) < CLOSE
    # With pages of their own for layers with a window, the memory of both kinds is half.
    pools = [
        load(path, backend=backend, kv_dtype=kind, window_pages=8, window_ratio=0.5) for kind in ("fp8", "bfloat16")
    ]
    narrow, wide = (pool.capacity.window_pool for pool in pools)
    assert narrow is not None
    assert wide is not None
    assert 2 * narrow.kv_bytes_per_token == wide.kv_bytes_per_token
    assert scales_of(pools[0]) == scales_of(runner)


def test_models_through_transformers_measure_scales_too(tmp_path: Path) -> None:
    save_model(tmp_path, *OTHERS["cohere2"])
    exact, runner = load(tmp_path), load(tmp_path, kv_dtype="fp8")
    assert len(scales_of(runner)) == len(runner._pool.layers)
    assert 1e-4 < distance(logits_of(runner), logits_of(exact)) < 0.15


def test_gpus_that_cannot_convert_to_float8_are_refused() -> None:
    check_float8_kv((8, 9))
    with pytest.raises(ConfigurationError, match=r"needs a GPU of compute capability 8\.9 .* has 8\.6"):
        check_float8_kv((8, 6))


def test_latent_attention_is_refused(tmp_path: Path) -> None:
    path = save_family(tmp_path, "deepseek v3")
    with pytest.raises(ConfigurationError, match=r"kv_dtype=fp8: latent attention .* use kv_dtype=auto"):
        load(path, kv_dtype="fp8")
