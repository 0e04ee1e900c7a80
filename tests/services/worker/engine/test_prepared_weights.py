"""Weights that are read while others serve, and then take their place without being read again."""

from __future__ import annotations

import os
import re
import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from common.errors import ConfigurationError
from common.steps import EngineSpec, StepPlan, StepResult
from common.types import RowSlot, StepId
from services.worker.engine import prepared_weights
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.checkpoints.safetensors_directory import SafetensorsCheckpoint
from services.worker.engine.execution.torch_model import torch_engine
from services.worker.engine.loader import DecoderLoader, load_decoder
from tests.services.worker.engine.checkpoints.gguf_writing import write_gguf
from tests.services.worker.engine.driving import Driver, load, random_ids
from tests.services.worker.engine.families import VOCABULARY, save_family
from tests.services.worker.engine.scenario import chunk, open_row, tokens_by_row

if TYPE_CHECKING:
    from pathlib import Path

    from tests.services.worker.engine.parallel.ranks import Ranks

PROMPT = random_ids(40, VOCABULARY)
STEPS = 12
OPTIONS = RunnerOptions(threads=1)


def nothing(_fraction: float, _stage: str) -> None:
    """Report nowhere."""


def in_gguf(model: Path) -> Path:
    """Write the same model as a GGUF file."""
    tensors = load_file(model / "model.safetensors")
    return write_gguf(model.with_suffix(".gguf"), SafetensorsCheckpoint(model).config, tensors)


class Served:
    """An engine, and what it generates."""

    def __init__(self, model: Path | str, **changes: Any) -> None:
        self.engine = torch_engine(lambda spec, report: load_decoder(spec, report, OPTIONS), options=OPTIONS)
        self._fields = {"max_rows": 2, "max_context": 128, "device_pages": 24, "dtype": "float32", **changes}
        self._step = 0
        self.use(model)

    def spec(self, model: Path | str) -> EngineSpec:
        return EngineSpec(str(model), **self._fields)

    def use(self, model: Path | str) -> None:
        self.engine.configure(self.spec(model), nothing)

    def generate(self) -> list[int]:
        results: list[StepResult] = []
        self._step += 1
        opened = open_row(0, PROMPT, [0, 1, 2, 3, 4], total=len(PROMPT) + STEPS)
        plan = StepPlan(StepId(self._step), opens=(opened,), prefills=(chunk(0, 0, len(PROMPT)),), steps=STEPS)
        self.engine.execute(plan, results.append)
        self.engine.execute(StepPlan(StepId(self._step), closes=(RowSlot(0),)), results.append)
        return [tokens_by_row(result)[0] for result in results if 0 in tokens_by_row(result)]


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    return save_family(tmp_path / "old", "llama"), save_family(tmp_path / "new", "llama", seed=1)


@pytest.mark.parametrize("family", ["llama", "qwen3 moe", "deepseek v3"])
def test_the_new_weights_serve_without_being_read_again(family: str, tmp_path: Path) -> None:
    old, new = save_family(tmp_path / "old", family), save_family(tmp_path / "new", family, seed=1)
    wanted = Served(new).generate()
    served = Served(old)
    before = served.generate()
    assert before != wanted
    assert served.engine.prepare(served.spec(new))
    assert served.generate() == before, "the old ones serve meanwhile"
    for path in new.glob("*.safetensors"):
        with path.open("r+b") as file:
            file.truncate(100)
    served.use(new)
    assert served.generate() == wanted


def test_what_was_prepared_is_not_used_for_others(models: tuple[Path, Path], tmp_path: Path) -> None:
    old, new = models
    served = Served(old)
    before = served.generate()
    other = shutil.copytree(old, tmp_path / "other")
    assert served.engine.prepare(served.spec(new))
    served.use(other)
    assert served.generate() == before
    assert served.engine.prepare(served.spec(new))
    served.engine.drop_prepared()
    for path in new.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ConfigurationError):
        served.use(new)


def test_without_room_for_both_they_are_read_in_place(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = models
    wanted = Served(new).generate()
    served = Served(old)
    monkeypatch.setattr(prepared_weights, "_free_for_weights", lambda _spec, _device: 1000)
    assert not served.engine.prepare(served.spec(new))
    served.use(new)
    assert served.generate() == wanted


def test_files_that_change_under_the_reader_are_refused(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = models
    served = Served(old)
    before = served.generate()
    read = DecoderLoader.prepare

    def change(self: Any) -> None:
        read(self)
        for path in new.glob("*.safetensors"):
            path.write_bytes(path.read_bytes())

    monkeypatch.setattr(DecoderLoader, "prepare", change)
    with pytest.raises(ConfigurationError, match="have changed while they were read"):
        served.engine.prepare(served.spec(new))
    assert served.generate() == before


@pytest.mark.parametrize("is_gguf", [False, True])
@pytest.mark.parametrize("reads", [0, 3])
@pytest.mark.parametrize("beside", [False, True])
def test_a_file_that_is_truncated_in_mid_read_is_an_error_and_the_old_weights_serve_on(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, is_gguf: bool, reads: int, beside: bool
) -> None:
    """Those of a file that is not truncated are loaded again where they cannot be read beside."""
    old, new = (in_gguf(model) if is_gguf else model for model in models)
    file = new if is_gguf else new / "model.safetensors"
    served = Served(old)
    before = served.generate()
    read = os.preadv
    calls: list[int] = []

    def truncate(descriptor: int, buffers: Any, offset: int) -> int:
        if len(calls) == reads:
            os.truncate(file, 5000)
        calls.append(offset)
        return read(descriptor, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", truncate)
        update = served.engine.prepare if beside else partial(served.engine.configure, report=nothing)
        with pytest.raises(ConfigurationError, match=re.escape(str(file))):
            update(served.spec(new))
    assert len(calls) > reads
    if not beside:
        served.use(old)
    assert served.generate() == before


def test_the_identity_is_that_of_the_files_that_were_read(models: tuple[Path, Path]) -> None:
    old, new = models
    served = Served(new)
    wanted = served.engine.configure(served.spec(new), nothing).kv_identity
    served.use(old)
    assert served.engine.prepare(served.spec(new))
    for path in new.glob("*.safetensors"):
        path.write_bytes(bytes(1000))
    assert served.engine.configure(served.spec(new), nothing).kv_identity == wanted


@pytest.mark.parametrize("backend", ["torch", "compiled"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_files_that_are_overwritten_while_the_model_serves_change_nothing(
    tmp_path: Path, backend: str, dtype: str
) -> None:
    model = save_family(tmp_path, "llama tied")
    runner = load(model, backend=backend, dtype=dtype)
    driver = Driver(runner)
    before = driver.run([(driver.open(len(PROMPT)), PROMPT)])
    for path in model.glob("*.safetensors"):
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.write(b"\0" * size)
            file.truncate(0)
    assert torch.equal(driver.run([(driver.open(len(PROMPT)), PROMPT)]), before)


def as_rank(rank: int, world_size: int, rendezvous: str, old: str, new: str) -> list[list[int]]:
    """Return what is generated before and after new weights, prepared and in place, have come."""
    place = {"rank": rank, "world_size": world_size, "rendezvous": rendezvous}
    served = Served(old, **place)
    said = [served.generate()]
    assert served.engine.prepare(served.spec(new))
    said.append(served.generate())
    served.use(new)
    said.append(served.generate())
    served.use(old)
    served.use(new)
    said.append(served.generate())
    served.engine.close()
    return said


def test_two_ranks_read_ahead(ranks: Ranks, models: tuple[Path, Path]) -> None:
    first, _ = ranks.run(as_rank, 2, *map(str, models))
    before, meanwhile, after, in_place = first
    assert before == meanwhile != after
    assert after == in_place


@pytest.mark.gpu
def test_a_gpu_captures_its_graphs_with_the_new_weights(models: tuple[Path, Path]) -> None:
    old, new = models
    wanted = Served(new, dtype="bfloat16").generate()
    served = Served(old, dtype="bfloat16")
    used = torch.cuda.memory_allocated()
    assert served.engine.prepare(served.spec(new))
    served.use(new)
    assert served.generate() == wanted
    assert torch.cuda.memory_allocated() < 1.5 * used
