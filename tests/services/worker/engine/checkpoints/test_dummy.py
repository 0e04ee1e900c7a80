from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from services.worker.engine.checkpoints.dummy import DummyCheckpoint
from services.worker.engine.checkpoints.safetensors_directory import read_config
from tests.examples import one_in
from tests.services.worker.engine.driving import Driver, load
from tests.services.worker.engine.families import FAMILIES, VOCABULARY, save_family

if TYPE_CHECKING:
    from pathlib import Path

UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.mark.parametrize("family", ["llama biased", "qwen2", "qwen3", "smol", "qwen3 moe", "gemma3"])
def test_every_tensor_of_a_model_has_its_shape(family: str, tmp_path: Path) -> None:
    checkpoint = DummyCheckpoint(read_config(save_family(tmp_path, family)))
    stored = load_file(tmp_path / "model.safetensors")
    assert len(stored) > 10
    for name, tensor in stored.items():
        assert checkpoint.read(name).shape == tensor.shape, name


@pytest.mark.parametrize("family", one_in(3, FAMILIES))
def test_every_family_runs_without_weights(family: str, tmp_path: Path) -> None:
    save_family(tmp_path, family)
    (tmp_path / "model.safetensors").unlink()
    driver = Driver(load(tmp_path, load_format="dummy"))
    logits = driver.run([(driver.open(3), [1, 2, 3])])
    assert logits.shape == (1, VOCABULARY)
    assert logits.isfinite().all()
    assert logits.std() > 0


def test_weights_depend_on_seed_and_name_only(model: Path) -> None:
    config = read_config(model)
    first = DummyCheckpoint(config, seed=3).read(UP)
    assert torch.equal(DummyCheckpoint(config, seed=3).read(UP), first)
    assert not torch.equal(DummyCheckpoint(config, seed=4).read(UP), first)
    assert not torch.equal(DummyCheckpoint(config, seed=3).read(UP.replace(".0.", ".1.")), first)
    assert DummyCheckpoint(config, seed=3).identity() != DummyCheckpoint(config, seed=4).identity()


def test_ranks_read_parts_of_the_same_weights(model: Path) -> None:
    # More weights than are drawn: the rows from 1023 on begin in the repeated block.
    config = replace(read_config(model), hidden_size=1024, intermediate_size=2048)
    checkpoint = DummyCheckpoint(config)
    whole = checkpoint.read(UP)
    assert torch.equal(checkpoint.read(UP, slice(0, 1040)), whole[:1040])
    assert torch.equal(checkpoint.read(UP, slice(1040, 2048)), whole[1040:])
    assert torch.equal(checkpoint.read(UP, columns=slice(512, 1024)), whole[:, 512:])


def test_no_two_rows_are_equal_although_values_repeat(model: Path) -> None:
    config = replace(read_config(model), hidden_size=1024, intermediate_size=2048)
    whole = DummyCheckpoint(config).read(UP)
    assert len(torch.unique(whole[:, :8], dim=0)) == 2048
    assert whole.std() == pytest.approx(0.02, rel=0.01)


@pytest.mark.parametrize(("dtype", "made"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_weights_have_the_type_of_the_checkpoint(model: Path, dtype: str, made: torch.dtype) -> None:
    config = read_config(model)
    wide, narrow = DummyCheckpoint(config), DummyCheckpoint(replace(config, dtype=dtype))
    assert wide.read(UP).dtype == torch.float32
    assert narrow.read(UP).dtype == made
    assert torch.equal(narrow.read(UP), wide.read(UP).to(made))
    assert narrow.identity() != wide.identity()


def test_the_wide_embedding_is_not_held_while_layers_are_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, alive = DummyCheckpoint.read, []

    def observed(
        self: DummyCheckpoint, name: str, rows: slice | None = None, columns: slice | None = None
    ) -> torch.Tensor:
        tensor = read(self, name, rows, columns)
        if name == "model.embed_tokens.weight":
            alive.append(weakref.ref(tensor))
        elif name == UP:
            assert [each() for each in alive] == [None]
        return tensor

    monkeypatch.setattr(DummyCheckpoint, "read", observed)
    load(model, load_format="dummy", dtype="bfloat16")
    assert len(alive) == 1
