"""Which weights may take the place of loaded ones."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import ConfigurationError
from common.steps import EngineSpec
from services.worker.engine.checkpoints import replacing
from services.worker.engine.checkpoints.replacing import check_replacement
from services.worker.engine.checkpoints.stored_values import check_values
from tests.services.worker.engine.tiny_llama import save_tiny_llama

if TYPE_CHECKING:
    from pathlib import Path

    from common.models import ModelFiles

WEIGHTS = "model.safetensors"
NORM = "model.norm.weight"


@pytest.fixture
def loaded(tmp_path: Path) -> Path:
    save_tiny_llama(tmp_path / "loaded")
    return tmp_path / "loaded"


@pytest.fixture
def other(loaded: Path, tmp_path: Path) -> Path:
    """Another directory with weights that fit."""
    directory = tmp_path / "other"
    directory.mkdir()
    for path in loaded.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    tensors = {name: 2 * tensor for name, tensor in load_file(directory / WEIGHTS).items()}
    save_file(tensors, directory / WEIGHTS)
    return directory


def check(loaded: Path, other: Path) -> int:
    return check_replacement(EngineSpec(str(loaded)), EngineSpec(str(other)))


def rewrite(directory: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(directory / WEIGHTS) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, directory / WEIGHTS)


def test_other_values_in_the_same_shape_fit(loaded: Path, other: Path) -> None:
    assert check(loaded, other) == (other / WEIGHTS).stat().st_size


def test_another_architecture_is_named(loaded: Path, other: Path) -> None:
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3, "transformers_version": "9"}))
    with pytest.raises(ConfigurationError, match=r"another architecture .* num_hidden_layers is 3, not 2$"):
        check(loaded, other)


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (None, f"lacks tensors of the loaded model: '{NORM}'"),
        (torch.ones(65), f"has tensors of another type or shape: '{NORM}'"),
        (torch.ones(64, dtype=torch.float16), f"has tensors of another type or shape: '{NORM}'"),
    ],
)
def test_missing_and_misshapen_tensors_are_named(
    loaded: Path, other: Path, tensor: torch.Tensor | None, problem: str
) -> None:
    rewrite(other, **{NORM: tensor})
    with pytest.raises(ConfigurationError, match=problem):
        check(loaded, other)


def test_extra_tensors_are_named(loaded: Path, other: Path) -> None:
    rewrite(other, extra=torch.ones(1))
    with pytest.raises(ConfigurationError, match="has tensors that the loaded model has not: 'extra'"):
        check(loaded, other)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_no_numbers_are_refused(loaded: Path, other: Path, value: float) -> None:
    norm = load_file(other / WEIGHTS)[NORM]
    norm[7] = value
    rewrite(other, **{NORM: norm})
    with pytest.raises(ConfigurationError, match=f"the tensor '{NORM}' has values that are no numbers"):
        check(loaded, other)


def test_of_several_ranks_one_finds_it(loaded: Path, other: Path) -> None:
    norm = load_file(other / WEIGHTS)[NORM]
    rewrite(other, **{NORM: torch.full_like(norm, torch.nan)})
    refused = []
    for rank in range(3):
        spec = EngineSpec(str(loaded), world_size=3, rank=rank)
        try:
            check_replacement(spec, replace(spec, model=str(other)))
        except ConfigurationError:
            refused.append(rank)
    assert len(refused) == 1


@pytest.mark.parametrize("kept_bytes", [0, 4, 1000, -1])
def test_a_damaged_file_is_refused(loaded: Path, other: Path, kept_bytes: int) -> None:
    content = (other / WEIGHTS).read_bytes()
    (other / WEIGHTS).write_bytes(content[:kept_bytes])
    with pytest.raises(ConfigurationError, match="is damaged"):
        check(loaded, other)


def test_a_file_that_changes_while_it_is_read_is_refused(
    loaded: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = replacing._shapes

    def change(files: ModelFiles) -> object:
        shapes = read(files)
        with (files.path / WEIGHTS).open("ab") as file:
            file.write(b"more")
        return shapes

    monkeypatch.setattr(replacing, "_shapes", change)
    with pytest.raises(ConfigurationError, match="files change while they are read"):
        check(loaded, other)


@pytest.mark.parametrize("change", ["truncated", "removed", "swapped"])
def test_a_file_that_is_truncated_removed_or_swapped_while_its_values_are_read_is_refused(
    loaded: Path, other: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    path = other / WEIGHTS

    def disturb(checked: Path, share: int, shares: int) -> None:
        if change == "truncated":
            os.truncate(path, 100)
        elif change == "removed":
            path.unlink()
        else:
            # Of the same size and time.
            state = path.stat()
            (other / "swapped").write_bytes(path.read_bytes())
            os.utime(other / "swapped", ns=(state.st_atime_ns, state.st_mtime_ns))
            (other / "swapped").replace(path)
        check_values(checked, share, shares)

    monkeypatch.setattr(replacing, "check_values", disturb)
    with pytest.raises(ConfigurationError, match=r"its files change while they are read|no safetensors files"):
        check(loaded, other)


def test_a_directory_that_does_not_exist_is_refused(loaded: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        check(loaded, tmp_path / "nowhere")
