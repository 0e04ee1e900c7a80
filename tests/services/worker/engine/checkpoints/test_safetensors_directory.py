from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import ConfigurationError
from services.worker.engine.checkpoints.safetensors_directory import SafetensorsCheckpoint
from tests.services.worker.engine.families import save_family

if TYPE_CHECKING:
    from pathlib import Path

INDEX = "model.safetensors.index.json"
DOWN = "model.layers.0.mlp.down_proj.weight"


def test_shards_give_the_same_tensors_as_one_file(tmp_path: Path) -> None:
    tensors = load_file(save_family(tmp_path / "whole", "llama") / "model.safetensors")
    sharded = save_family(tmp_path / "sharded", "llama", max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    checkpoint = SafetensorsCheckpoint(sharded)
    # Against the order of the files, so that each is opened again and again.
    for name in sorted(tensors, key=lambda name: name[::-1]):
        assert torch.equal(checkpoint.read(name), tensors[name]), name


def test_parts_are_parts_of_the_whole(tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(save_family(tmp_path, "llama"))
    whole = load_file(tmp_path / "model.safetensors")[DOWN]
    assert torch.equal(checkpoint.read(DOWN, slice(3, 9)), whole[3:9])
    assert torch.equal(checkpoint.read(DOWN, columns=slice(16, 48)), whole[:, 16:48])
    assert torch.equal(checkpoint.read(DOWN, slice(3, 9), slice(16, 48)), whole[3:9, 16:48])


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model"])
def test_the_text_model_of_a_checkpoint_with_vision_is_found(prefix: str, tmp_path: Path) -> None:
    plain = save_family(tmp_path / "plain", "gemma3")
    tensors = load_file(plain / "model.safetensors")
    # As transformers 4 and 5 name them.
    named = {
        (prefix + name if prefix.endswith(".") else prefix + name.removeprefix("model")): tensor
        for name, tensor in tensors.items()
    }
    whole = tmp_path / "whole"
    whole.mkdir()
    save_file({**named, "vision_tower.embeddings.weight": torch.zeros(2, 2)}, whole / "model.safetensors")
    text = json.loads((plain / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {}}))
    checkpoint = SafetensorsCheckpoint(whole)
    assert checkpoint.config.windows == SafetensorsCheckpoint(plain).config.windows
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.read(name), tensor), name


def test_end_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    save_family(tmp_path, "llama")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 9]}')
    assert SafetensorsCheckpoint(tmp_path).config.eos_token_ids == (5, 9)


def test_the_identity_covers_the_rows_that_were_read(tmp_path: Path) -> None:
    def identity(name: str, seed: int = 0, rows: slice | None = None) -> str:
        checkpoint = SafetensorsCheckpoint(save_family(tmp_path / f"{seed}", "llama", seed=seed))
        checkpoint.read(name, rows)
        return checkpoint.identity()

    assert identity(DOWN) == identity(DOWN)
    assert len({identity(DOWN), identity(DOWN, seed=1), identity(DOWN, rows=slice(0, 3))}) == 3


def test_a_tensor_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no tensor 'lm_head\.bias'"):
        SafetensorsCheckpoint(save_family(tmp_path, "llama")).read("lm_head.bias")


def test_missing_weights_are_named(tmp_path: Path) -> None:
    save_family(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        SafetensorsCheckpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {DOWN: "shard-2.safetensors"}}))
    with pytest.raises(ConfigurationError, match=r"files that are not there: shard-2\.safetensors"):
        SafetensorsCheckpoint(tmp_path)


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize(
    ("index", "complaint"),
    [
        ({"metadata": {}}, "is damaged: KeyError"),
        ([], "is damaged"),
        ({"weight_map": [DOWN]}, "is damaged"),
        ({"weight_map": {DOWN: 5}}, f"the file of tensor '{DOWN}' is 5"),
        ({"weight_map": {DOWN: "../other/model.safetensors"}}, "'../other/model.safetensors', which is outside"),
        ({"weight_map": {DOWN: "a/../../model.safetensors"}}, "outside the model's directory"),
        ({"weight_map": {DOWN: "/etc/model.safetensors"}}, "'/etc/model.safetensors', which is outside"),
        ({"weight_map": {DOWN: ""}}, "outside the model's directory"),
    ],
)
def test_an_index_that_lies_is_refused(index: object, complaint: str, tmp_path: Path) -> None:
    save_family(tmp_path / "other", "llama")
    own = save_family(tmp_path / "own", "llama")
    (own / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigurationError, match=complaint) as refused:
        SafetensorsCheckpoint(own)
    assert str(own) in str(refused.value)


def test_a_tensor_that_its_file_lacks_is_named_with_the_file(tmp_path: Path) -> None:
    tensors = load_file(save_family(tmp_path, "llama") / "model.safetensors")
    save_file({DOWN: tensors[DOWN]}, tmp_path / "few.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "few.safetensors")}))
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert torch.equal(checkpoint.read(DOWN), tensors[DOWN])
    for rows in (None, slice(0, 2)):
        with pytest.raises(ConfigurationError, match=r"few\.safetensors: tensor 'model\.norm\.weight' cannot be read"):
            checkpoint.read("model.norm.weight", rows)


@pytest.mark.parametrize("is_divided", [True, False])
def test_a_file_that_was_cut_off_is_named(is_divided: bool, tmp_path: Path) -> None:
    whole = save_family(tmp_path, "llama") / "model.safetensors"
    tensors = load_file(whole)
    whole.write_bytes(whole.read_bytes()[:-100])
    if is_divided:
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, whole.name)}))
    with pytest.raises(ConfigurationError, match=r"/model\.safetensors"):
        SafetensorsCheckpoint(tmp_path).read(DOWN)
