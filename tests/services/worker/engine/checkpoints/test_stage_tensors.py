"""Which files of a checkpoint a stage of a pipeline needs."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import ConfigurationError
from common.steps import EngineSpec
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.checkpoints.replacing import check_replacement, weights_of
from services.worker.engine.checkpoints.safetensors_directory import SafetensorsTensors
from services.worker.engine.loader import DecoderLoader
from tests.services.worker.engine.families import FAMILIES, save_model
from tests.services.worker.engine.quantization.stored_formats import SCHEMES, store_quantised

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from services.worker.engine.checkpoints.tensor_names import StoredTensor

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
STAGES = 2
# With so many layers, each stage has some of each kind.
LAYERS = 4
# Of formats with groups of 128.
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
# Beside the text model, and after its layers, for drafts.
BESIDE, DRAFTS = "model.visual.blocks.0.attn.qkv.weight", f"model.layers.{LAYERS}.self_attn.q_proj.weight"


def save(directory: Path, family: str, **changes: object) -> Path:
    name, options = FAMILIES[family]
    return save_model(directory, name, {**options, "num_hidden_layers": LAYERS, **changes})


def divide(directory: Path, files: dict[str, str]) -> Path:
    """Write the tensors to the files that `files` names for them, and an index; return the directory."""
    tensors = load_file(directory / WHOLE)
    for file in set(files.values()):
        save_file({name: tensors[name] for name in files if files[name] == file}, directory / file)
    (directory / WHOLE).unlink()
    (directory / INDEX).write_text(json.dumps({"weight_map": files}))
    return directory


def one_by_one(directory: Path) -> Path:
    """Give each tensor a file of its own."""
    return divide(directory, {name: f"{name}.safetensors" for name in load_file(directory / WHOLE)})


def of_stage(model: Path, stage: int, **changes: object) -> EngineSpec:
    return EngineSpec(str(model), rank=stage, world_size=STAGES, stages=STAGES, dtype="float32", **changes)  # type: ignore[arg-type]


def shards(spec: EngineSpec) -> set[str]:
    found = weights_of(spec).shards
    assert found is not None
    return set(found)


def tensors(files: Iterable[str]) -> set[str]:
    return {file.removesuffix(".safetensors") for file in files}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the tensors that are read."""
    names: set[str] = set()
    original: Callable[..., torch.Tensor] = SafetensorsTensors.read_stored

    def noted(self: SafetensorsTensors, stored: StoredTensor, *block: slice | None) -> torch.Tensor:
        names.add(stored.name)
        return original(self, stored, *block)

    monkeypatch.setattr(SafetensorsTensors, "read_stored", noted)
    return names


def check_stages(model: Path, tmp_path: Path, read: set[str]) -> None:
    """Load each stage where only its own files are."""
    everything = {path.name for path in model.glob("*.safetensors")}
    found = []
    for stage in range(STAGES):
        own = tmp_path / f"stage {stage}"
        shutil.copytree(model, own)
        needed = shards(of_stage(own, stage))
        for file in everything - needed:
            (own / file).unlink()
        read.clear()
        DecoderLoader(of_stage(own, stage), RunnerOptions(backend="torch", threads=1), lambda *_: None).prepare()
        # The shapes are in config.json, too.
        assert read == {name for name in tensors(needed) if not name.endswith(".weight_shape")}
        found.append(needed)
    assert set.union(*found) == everything
    assert all(len(needed) < len(everything) for needed in found)


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "llama tied",
        "phi3",
        "gemma2",
        "gpt-oss",
        "qwen3 moe partly dense",
        "glm4 moe",
        "deepseek v3",
        "qwen3.5",
    ],
)
def test_a_stage_reads_its_own_files_and_no_others(family: str, tmp_path: Path, read: set[str]) -> None:
    deeper = {"num_hidden_layers": 8} if family == "qwen3.5" else {}
    check_stages(one_by_one(save(tmp_path / "model", family, **deeper)), tmp_path, read)


@pytest.mark.parametrize(
    "scheme", ["fp8 blocks", "fp8 static", "int8", "awq 128", "gptq act-order", "compressed 4 bits"]
)
def test_so_it_does_of_quantised_formats(scheme: str, tmp_path: Path, read: set[str]) -> None:
    model = save(tmp_path / "model", "llama", **WIDE)
    store_quantised(model, SCHEMES[scheme])
    check_stages(one_by_one(model), tmp_path, read)


def test_the_first_stage_has_the_embedding_and_the_last_one_head_and_norm(tmp_path: Path) -> None:
    model = one_by_one(save(tmp_path, "llama"))
    first, last = (tensors(shards(of_stage(model, stage))) for stage in range(STAGES))
    ends = {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"}
    assert (first & ends, last & ends) == ({"model.embed_tokens.weight"}, {"lm_head.weight", "model.norm.weight"})


def test_both_have_an_embedding_that_is_the_head_too(tmp_path: Path) -> None:
    model = one_by_one(save(tmp_path, "llama tied"))
    assert all("model.embed_tokens.weight.safetensors" in shards(of_stage(model, stage)) for stage in range(STAGES))


def test_all_stages_have_what_a_classification_head_may_be_made_of(tmp_path: Path) -> None:
    model = one_by_one(save(tmp_path, "llama"))
    first = of_stage(model, 0, classifier_from_token=("no", "yes"))
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= tensors(shards(first))


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_what_no_stage_reads_is_left_out(prefix: str, tmp_path: Path) -> None:
    model = save(tmp_path, "llama")
    named = {name.replace("model.", prefix, 1): tensor for name, tensor in load_file(model / WHOLE).items()}
    unread = {DRAFTS.replace("model.", prefix, 1)} | ({BESIDE} if prefix != "model." else set())
    save_file(named | {name: torch.zeros(2, 2) for name in unread}, model / WHOLE)
    one_by_one(model)
    needed = [tensors(shards(of_stage(model, stage))) for stage in range(STAGES)]
    assert set.union(*needed) == set(named)


def test_a_rank_without_stages_needs_all_files(tmp_path: Path) -> None:
    model = one_by_one(save(tmp_path, "llama"))
    assert weights_of(EngineSpec(str(model))).shards is None
    (model / "lm_head.weight.safetensors").unlink()
    with pytest.raises(ConfigurationError, match=r"names files that are not there: lm_head\.weight\.safetensors"):
        DecoderLoader(EngineSpec(str(model)), RunnerOptions(backend="torch", threads=1), lambda *_: None)


def test_a_single_file_is_needed_as_a_whole(tmp_path: Path) -> None:
    assert weights_of(of_stage(save(tmp_path, "llama"), 0)).shards is None


def test_a_file_of_the_stage_that_is_missing_is_named(tmp_path: Path) -> None:
    model = one_by_one(save(tmp_path, "llama"))
    (model / "lm_head.weight.safetensors").unlink()
    DecoderLoader(of_stage(model, 0), RunnerOptions(backend="torch", threads=1), lambda *_: None)
    with pytest.raises(ConfigurationError, match=r"names files that are not there: lm_head\.weight\.safetensors"):
        DecoderLoader(of_stage(model, 1), RunnerOptions(backend="torch", threads=1), lambda *_: None)


def test_weights_that_are_divided_elsewhere_may_take_their_place(tmp_path: Path) -> None:
    old = one_by_one(save(tmp_path / "old", "llama"))
    names = list(load_file(save(tmp_path / "new", "llama") / WHOLE))
    # In this order, files have tensors of both stages.
    new = divide(tmp_path / "new", {name: f"part-{i % 3}.safetensors" for i, name in enumerate(sorted(names))})
    for stage in range(STAGES):
        size = check_replacement(of_stage(old, stage), of_stage(new, stage))
        assert size == sum((new / file).stat().st_size for file in shards(of_stage(new, stage)))
        whole = save(tmp_path / "whole", "llama")
        check_replacement(of_stage(old, stage), of_stage(whole, stage))
        check_replacement(of_stage(whole, stage), of_stage(new, stage))
    change = load_file(new / "part-0.safetensors")
    save_file({name: each.double() for name, each in change.items()}, new / "part-0.safetensors")
    with pytest.raises(ConfigurationError, match="has tensors of another type or shape"):
        check_replacement(of_stage(old, 0), of_stage(new, 0))
