"""Pages are interchangeable only between equal weights: any other byte makes another fingerprint."""

from __future__ import annotations

import json
import shutil
import struct
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from common.gguf_header import read_header
from services.worker.engine.checkpoints.safetensors_directory import SafetensorsCheckpoint
from services.worker.engine.checkpoints.weight_digest import WeightDigest
from tests.services.worker.engine.checkpoints.gguf_writing import write_gguf
from tests.services.worker.engine.driving import load
from tests.services.worker.engine.families import save_family, save_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.services.worker.engine.parallel.ranks import Ranks

WHOLE = "model.safetensors"


def fingerprint(model: Path, **changes: object) -> str:
    runner = load(model, **{"device_pages": 4, "max_context": 64, **changes})  # type: ignore[arg-type]  # as in `load`
    try:
        return runner.capacity.fingerprint
    finally:
        runner.close()


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def last_bytes(path: Path) -> Iterator[tuple[str, int]]:
    """Yield each tensor of a safetensors file, and where the lowest byte of its last float32 is."""
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    for name, entry in json.loads(content[8 : 8 + length]).items():
        if name != "__metadata__":
            yield name, 8 + length + entry["data_offsets"][1] - 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def original(model: Path) -> str:
    return fingerprint(model)


def test_one_flipped_bit_of_any_tensor_makes_another_fingerprint(model: Path, original: str, tmp_path: Path) -> None:
    tensors = list(last_bytes(model / WHOLE))
    assert len(tensors) == 3 + 3 * 11
    changed = shutil.copytree(model, tmp_path / "changed")
    seen = {original}
    for _, offset in tensors:
        flip(changed / WHOLE, offset)
        seen.add(fingerprint(changed))
        flip(changed / WHOLE, offset)
    assert len(seen) == 1 + len(tensors)
    assert fingerprint(changed) == original


def test_a_merged_adapter_changes_the_fingerprint_despite_an_equal_header_and_last_norm(
    model: Path, original: str, tmp_path: Path
) -> None:
    merged = shutil.copytree(model, tmp_path / "merged")
    tensors = load_file(model / WHOLE)
    name = "model.layers.1.self_attn.v_proj.weight"
    rank = torch.randn(tensors[name].shape[0], 2, generator=torch.Generator().manual_seed(0))
    tensors[name] = tensors[name] + 0.01 * rank @ torch.ones(2, tensors[name].shape[1])
    save_file(tensors, merged / WHOLE, metadata={"format": "pt"})
    before, after = (model / WHOLE).read_bytes(), (merged / WHOLE).read_bytes()
    assert len(before) == len(after)
    assert before[:2000] == after[:2000]
    assert before[-100:] == after[-100:]
    assert fingerprint(merged) != original


def test_equal_tensors_in_several_files_have_the_same_fingerprint(model: Path, original: str, tmp_path: Path) -> None:
    split = tmp_path / "split"
    split.mkdir()
    shutil.copy(model / "config.json", split)
    tensors = load_file(model / WHOLE)
    names = sorted(tensors, reverse=True)
    files = {name: f"shard-{number % 2}.safetensors" for number, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, split / file)
    (split / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert fingerprint(split) == original


@pytest.mark.parametrize("kind", ["F32", "F16"])
def test_two_gguf_files_with_one_header_have_two_fingerprints(kind: str, tmp_path: Path) -> None:
    save_family(tmp_path, "llama", seed=0)
    source = SafetensorsCheckpoint(tmp_path)
    tensors = load_file(tmp_path / WHOLE)
    quantization = GGMLQuantizationType[kind]
    path = write_gguf(tmp_path / "model.gguf", source.config, tensors, quantization)
    first = fingerprint(path)
    header = read_header(path)
    starts = sorted(entry.offset for entry in header.tensors.values())
    ends = [*starts[1:], path.stat().st_size]
    seen = {first}
    for start, end in zip(starts, ends, strict=True):
        assert end - start >= 64
        # Not in what pads a tensor to a multiple of 32 bytes.
        flip(path, start + 8)
        seen.add(fingerprint(path))
        flip(path, start + 8)
    assert len(seen) == 1 + len(starts)
    assert fingerprint(path) == first


def test_dummy_weights_of_two_configurations_have_two_fingerprints(model: Path, original: str, tmp_path: Path) -> None:
    changed = tmp_path / "config"
    changed.mkdir()
    config = json.loads((model / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    made_up = fingerprint(model, load_format="dummy")
    assert fingerprint(model, load_format="dummy") == made_up
    assert len({made_up, original, fingerprint(changed, load_format="dummy")}) == 3


def test_the_identity_of_a_transformers_model_covers_weights_and_configuration(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_model(model, "GPTNeoX", {})
    tensors = load_file(model / WHOLE)
    name = next(name for name in tensors if name.endswith("attention.query_key_value.weight"))
    offsets = dict(last_bytes(model / WHOLE))
    first = fingerprint(model)
    assert fingerprint(model) == first
    flip(model / WHOLE, offsets[name])
    flipped = fingerprint(model)
    flip(model / WHOLE, offsets[name])
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "use_parallel_residual": False}))
    assert len({first, flipped, fingerprint(model)}) == 3


def rank_fingerprint(rank: int, world_size: int, rendezvous: str, model: str) -> str:
    from pathlib import Path

    return fingerprint(Path(model), rank=rank, world_size=world_size, rendezvous=rendezvous)


def test_weights_of_any_rank_count_for_all_ranks(ranks: Ranks, model: Path, tmp_path: Path) -> None:
    """A rank's KV depends on what the others hold, as every layer adds up their parts."""
    changed = shutil.copytree(model, tmp_path / "changed")
    offsets = dict(last_bytes(changed / WHOLE))
    first = ranks.run(rank_fingerprint, 2, str(model))
    assert ranks.run(rank_fingerprint, 2, str(changed)) == first
    # The last row of the values' matrix is read by the last rank alone.
    flip(changed / WHOLE, offsets["model.layers.0.self_attn.v_proj.weight"])
    other = ranks.run(rank_fingerprint, 2, str(changed))
    assert len({*first, *other}) == 4


def test_a_digest_is_of_names_types_shapes_and_bytes_in_any_order() -> None:
    tensor = torch.arange(24, dtype=torch.int32).reshape(4, 6)
    blocks = {"a": tensor, "b": tensor.float(), "c": tensor[:, ::2]}

    def digest(blocks: dict[str, torch.Tensor]) -> str:
        made = WeightDigest()
        for name, block in blocks.items():
            made.add(name, block)
        return made.hexdigest()

    first = digest(blocks)
    assert digest(dict(reversed(blocks.items()))) == first
    changed = [
        {**blocks, "a": tensor.reshape(6, 4)},
        {**blocks, "a": tensor.view(torch.float32)},
        {**blocks, "a": tensor + 1},
        {"aa": tensor, "b": blocks["b"], "c": blocks["c"]},
        {"a": blocks["b"], "b": tensor, "c": blocks["c"]},
        {"a": tensor, "b": blocks["b"]},
    ]
    digests = sorted({first, *map(digest, changed)})
    assert len(digests) == 1 + len(changed)
    assert all(lhs != rhs for lhs, rhs in pairwise(digests))
