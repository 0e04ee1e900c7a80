from __future__ import annotations

import zlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from common.errors import ConfigurationError
from common.gguf_header import read_header
from services.worker.engine.checkpoints.gguf_file import GgufCheckpoint, gguf_name
from services.worker.engine.checkpoints.safetensors_directory import SafetensorsCheckpoint
from services.worker.engine.families.registry import families_by_architecture
from services.worker.engine.model.config import RotaryConfig
from services.worker.engine.model.config_gguf import config_from_gguf
from services.worker.engine.model.embedding import PackedEmbedding
from tests.services.worker.engine.checkpoints.gguf_writing import write_gguf
from tests.services.worker.engine.driving import Driver, load, random_ids
from tests.services.worker.engine.families import (
    FAMILIES,
    IN_GGUF,
    VOCABULARY,
    reference_logits,
    save_family,
    save_model,
)
from tests.services.worker.engine.quantization.random_blocks import random_blocks

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from tests.services.worker.engine.parallel.ranks import Ranks

QUERY = "model.layers.1.self_attn.q_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
PACKED_FROM = "services.worker.engine.model.assembly.PACKED_FROM_BYTES"


@pytest.mark.parametrize("family", ["llama", "llama tied", "llama3", "smol", "qwen2", "qwen3", "qwen3 moe", "gemma3"])
def test_a_gguf_file_holds_the_model_it_was_made_of(family: str, tmp_path: Path) -> None:
    source = SafetensorsCheckpoint(save_family(tmp_path, family))
    tensors = load_file(tmp_path / "model.safetensors")
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "model.gguf", source.config, tensors))
    assert checkpoint.config.tied_embeddings == source.config.tied_embeddings
    assert checkpoint.config.rotary.theta == source.config.rotary.theta
    assert checkpoint.config.rotary.frequency_divisors == pytest.approx(source.config.rotary.frequency_divisors)
    for field in ("query_heads", "kv_heads", "head_dim", "hidden_size", "intermediate_size", "layers", "max_context"):
        assert getattr(checkpoint.config, field) == getattr(source.config, field), field
    for field in ("vocabulary_size", "qkv_bias", "qk_norm", "eos_token_ids", "moe", "windows", "activation"):
        assert getattr(checkpoint.config, field) == getattr(source.config, field), field
    for field in ("embedding_scale", "post_norms", "logits_softcap", "local_rotary"):
        assert getattr(checkpoint.config, field) == getattr(source.config, field), field
    for name in tensors:
        # Converters add to Gemma's norms what `norm_offset` says that files of transformers lack.
        offset = source.config.norm_offset if name.endswith("norm.weight") else 0.0
        assert torch.equal(checkpoint.read(name), source.read(name) + offset), name
    assert checkpoint.config.norm_offset == 0.0


@pytest.mark.parametrize("family", IN_GGUF)
def test_a_gguf_file_gives_the_same_logits_as_its_source(family: str, tmp_path: Path) -> None:
    name, given = FAMILIES[family]
    source = SafetensorsCheckpoint(save_model(tmp_path, name, {**given, **IN_GGUF[family]}))
    write_gguf(tmp_path / "model.gguf", source.config, load_file(tmp_path / "model.safetensors"))
    prompt = random_ids(50, VOCABULARY)
    driver = Driver(load(tmp_path / "model.gguf"))
    got = driver.run([(driver.open(50), prompt)], all_tokens=True)
    torch.testing.assert_close(got, reference_logits(tmp_path, prompt), atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize("has_rows", [True, False])
def test_latent_attention_is_read_from_new_and_old_files(has_rows: bool, tmp_path: Path, ranks: Ranks) -> None:
    name, given = FAMILIES["deepseek v3"]
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
    latent = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 16}
    source = SafetensorsCheckpoint(save_model(tmp_path, name, {**given, **sizes, **latent}))
    tensors = load_file(tmp_path / "model.safetensors")
    path = write_gguf(
        tmp_path / "model.gguf", source.config, tensors, GGMLQuantizationType.Q8_0, has_latent_rows=has_rows
    )
    checkpoint = GgufCheckpoint(path)
    assert checkpoint.config.latent == source.config.latent
    assert ("blk.0.attn_kv_b.weight" in read_header(path).tensors) is not has_rows
    save_file({each: checkpoint.read(engine_name(each)) for each in tensors}, tmp_path / "model.safetensors")
    expected = reference_logits(tmp_path, random_ids(30, VOCABULARY))
    torch.testing.assert_close(logits_of(path), expected, atol=3e-4, rtol=1e-4)
    together = ranks.run(compute_as_rank, 2, str(path))[0]
    torch.testing.assert_close(together, expected, atol=3e-4, rtol=1e-4)


def engine_name(name: str) -> str:
    """Return the engine's name for a tensor of DeepSeek."""
    return name.replace("shared_experts", "shared_expert")


def test_files_of_experts_with_other_scores_are_refused(tmp_path: Path) -> None:
    config = SafetensorsCheckpoint(save_family(tmp_path, "glm4 moe")).config
    path = write_gguf(tmp_path / "model.gguf", config, {})
    fields = {**read_header(path).metadata, "glm4moe.expert_gating_func": 3}
    with pytest.raises(ConfigurationError, match="expert_gating_func: 3 is not supported; supported: 1"):
        config_from_gguf(fields, tensors=(), divisors=())


def test_rows_of_an_expert_are_found(tmp_path: Path) -> None:
    source = SafetensorsCheckpoint(save_family(tmp_path, "qwen3 moe"))
    tensors = load_file(tmp_path / "model.safetensors")
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "model.gguf", source.config, tensors))
    up, down = (f"model.layers.1.mlp.experts.4.{part}_proj.weight" for part in ("up", "down"))
    assert torch.equal(checkpoint.read(up, slice(16, 32)), tensors[up][16:32])
    assert torch.equal(checkpoint.read(down, columns=slice(16, 32)), tensors[down][:, 16:32])


def test_an_architecture_that_is_not_served_is_named(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigurationError, match=r"GGUF architecture 'mamba' is not supported; supported: .*llama"):
        GgufCheckpoint(tmp_path / "model.gguf")


def test_parts_are_parts_of_the_whole(tmp_path: Path) -> None:
    source = SafetensorsCheckpoint(save_family(tmp_path, "smol"))
    tensors = load_file(tmp_path / "model.safetensors")
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "model.gguf", source.config, tensors))
    # Rows 32 to 96 are query heads 2 to 5.
    assert torch.equal(checkpoint.read(QUERY, slice(32, 96)), tensors[QUERY][32:96])
    assert torch.equal(checkpoint.read(DOWN, columns=slice(16, 48)), tensors[DOWN][:, 16:48])
    assert torch.equal(checkpoint.read(DOWN, slice(3, 9), slice(0, 16)), tensors[DOWN][3:9, :16])


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_weights_are_dequantised(kind: str, tmp_path: Path) -> None:
    quantization = GGMLQuantizationType[kind]
    config = SafetensorsCheckpoint(save_family(tmp_path, "mistral")).config
    # Blocks are 32 wide.
    weight = torch.randn(config.hidden_size, 128)
    written = {DOWN: weight, "lm_head.weight": weight}
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "model.gguf", config, written, quantization))
    expected = dequantize(quantize(weight.numpy(), quantization), quantization)
    assert np.array_equal(checkpoint.read(DOWN).numpy(), expected)
    assert np.array_equal(checkpoint.read(DOWN, slice(5, 7)).numpy(), expected[5:7])
    assert checkpoint.read(DOWN).dtype == torch.float32


def logits_of(path: Path, **changes: object) -> torch.Tensor:
    runner = load(path, **changes)  # type: ignore[arg-type]  # whatever a test wants to change
    driver = Driver(runner)
    logits = driver.run([(driver.open(30), random_ids(30, VOCABULARY))], all_tokens=True).cpu()
    runner.close()
    return logits


def compute_as_rank(rank: int, world_size: int, rendezvous: str, path: str) -> torch.Tensor:
    return logits_of(path, rank=rank, world_size=world_size, rendezvous=rendezvous)  # type: ignore[arg-type]  # a path as a string, which processes take


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("family", ["llama tied", "qwen3 moe", "phi4"])
def test_packed_weights_give_the_logits_of_dequantised_ones(
    family: str, kind: str, tmp_path: Path, ranks: Ranks
) -> None:
    quantization = GGMLQuantizationType[kind]
    name, options = FAMILIES[family]
    shape = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "initializer_range": 0.05}
    source = SafetensorsCheckpoint(save_model(tmp_path, name, {**options, **shape}))
    tensors = load_file(tmp_path / "model.safetensors")
    path = write_gguf(tmp_path / "model.gguf", source.config, tensors, quantization)
    checkpoint = GgufCheckpoint(path)
    projection = f"model.layers.0.self_attn.{'qkv' if family == 'phi4' else 'q'}_proj.weight"
    packed = checkpoint.packed(projection)
    assert packed is not None
    assert torch.equal(packed.widened(torch.float32), checkpoint.read(projection))
    save_file({each: checkpoint.read(each) for each in tensors}, tmp_path / "model.safetensors")
    expected = reference_logits(tmp_path, random_ids(30, VOCABULARY))
    for backend in ("torch", "compiled"):
        torch.testing.assert_close(logits_of(path, backend=backend), expected, atol=3e-4, rtol=1e-4)
    if kind in ("Q4_1", "Q8_0"):
        together = ranks.run(compute_as_rank, 2, str(path))[0]
        torch.testing.assert_close(together, expected, atol=3e-4, rtol=1e-4)


# Parts of the names of matrices that are stored as another kind, as in llama.cpp's Q2_K and Q4_K_M, and this kind.
OTHERS_OF = {
    "Q2_K": (("attn_v", "ffn_down"), "Q3_K"),
    "Q3_K": ((), ""),
    "Q4_K": ((), ""),
    "Q4_K_M": (("attn_v", "ffn_down", "output", "token_embd"), "Q6_K"),
    "Q6_K": ((), ""),
}
# Of the scales of random blocks, with which weights are about as large as those of a model.
DEVIATIONS = {"Q2_K": 3e-3, "Q3_K": 1.5e-3, "Q4_K": 2e-4, "Q6_K": 4e-5}


def k_quants(kinds: str, name: str, values: NDArray[np.float32]) -> tuple[GGMLQuantizationType, NDArray[np.uint8]]:
    """Return random blocks for a matrix."""
    parts, other = OTHERS_OF[kinds]
    kind = other if any(part in name for part in parts) else kinds.removesuffix("_M")
    shape = values.shape
    rows, deviation = int(np.prod(shape[:-1])), DEVIATIONS[kind]
    blocks = random_blocks(kind, rows, shape[-1] // 256, seed=zlib.crc32(name.encode()), deviation=deviation)
    return GGMLQuantizationType[kind], blocks.numpy().reshape(*shape[:-1], -1)


@pytest.mark.parametrize("backend", ["torch", "compiled", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kinds", OTHERS_OF)
@pytest.mark.parametrize("family", ["llama tied", "qwen3 moe"])
def test_k_quants_give_the_logits_of_dequantised_weights(
    family: str, kinds: str, backend: str, tmp_path: Path, ranks: Ranks
) -> None:
    name, options = FAMILIES[family]
    # Blocks are 256 wide. All experts are chosen: roundings change no choice.
    shape = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "moe_intermediate_size": 256}
    source = SafetensorsCheckpoint(save_model(tmp_path, name, {**options, **shape, "num_experts_per_tok": 6}))
    tensors = load_file(tmp_path / "model.safetensors")
    for file, is_dequantised in (("model.gguf", False), ("wide.gguf", True)):
        write_gguf(
            tmp_path / file, source.config, tensors, wide=("ffn_gate_inp",), is_dequantised=is_dequantised,
            blocks_for=partial(k_quants, kinds),
        )  # fmt: skip
    path, wide = tmp_path / "model.gguf", GgufCheckpoint(tmp_path / "wide.gguf")
    packed = GgufCheckpoint(path).packed(QUERY)
    assert packed is not None
    assert packed.bits == (6 if kinds == "Q6_K" else 4)
    save_file({each: wide.read(each) for each in tensors}, tmp_path / "model.safetensors")
    expected = reference_logits(tmp_path, random_ids(30, VOCABULARY))
    if backend == "gpu":
        lost = error(logits_of(path, backend="torch", dtype="bfloat16"), expected)
        assert error(logits_of(path, backend="gpu", dtype="bfloat16"), expected) < max(0.05, 1.5 * lost)
        return
    # Scales are rounded to float16, by at most one part in 2,048, and shifts, from which little may be left.
    assert error(logits_of(path, backend=backend), expected) < 5e-3
    if kinds in ("Q2_K", "Q3_K", "Q4_K_M"):
        assert error(ranks.run(compute_as_rank, 2, str(path))[0], expected) < 5e-3


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def compute_with_packed_embedding(rank: int, world_size: int, rendezvous: str, path: str) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PACKED_FROM, 0)
        return compute_as_rank(rank, world_size, rendezvous, path)


def test_large_embeddings_stay_packed_and_change_nothing(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, options = FAMILIES["llama tied"]
    shape = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.05}
    source = SafetensorsCheckpoint(save_model(tmp_path, name, {**options, **shape}))
    path = write_gguf(
        tmp_path / "model.gguf", source.config, load_file(tmp_path / "model.safetensors"), GGMLQuantizationType.Q4_1
    )
    wide, looked_up = logits_of(path), []
    look_up = PackedEmbedding.look_up

    def counted(self: PackedEmbedding, rows: torch.Tensor) -> torch.Tensor:
        looked_up.append(len(rows))
        return look_up(self, rows)

    monkeypatch.setattr(PACKED_FROM, 0)
    monkeypatch.setattr(PackedEmbedding, "look_up", counted)
    assert torch.equal(logits_of(path), wide)
    assert sum(looked_up) >= 30
    together = ranks.run(compute_with_packed_embedding, 2, str(path))[0]
    torch.testing.assert_close(together, wide, atol=3e-4, rtol=1e-4)


def test_an_embedding_of_another_shape_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, options = FAMILIES["llama"]
    source = SafetensorsCheckpoint(save_model(tmp_path, name, {**options, "hidden_size": 64, "intermediate_size": 128}))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:, :32].contiguous()
    path = write_gguf(tmp_path / "model.gguf", source.config, tensors, GGMLQuantizationType.Q8_0)
    monkeypatch.setattr(PACKED_FROM, 0)
    with pytest.raises(ConfigurationError, match=r"embed_tokens.weight' has the shape \(\d+, 32\)"):
        load(path)


def test_projections_that_are_stored_differently_are_widened(tmp_path: Path) -> None:
    name, options = FAMILIES["llama"]
    shape = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.05}
    source = SafetensorsCheckpoint(save_model(tmp_path, name, {**options, **shape}))
    tensors = load_file(tmp_path / "model.safetensors")
    path = write_gguf(tmp_path / "model.gguf", source.config, tensors, GGMLQuantizationType.Q8_0, wide=("attn_v",))
    checkpoint = GgufCheckpoint(path)
    assert checkpoint.packed("model.layers.0.self_attn.v_proj.weight") is None
    assert checkpoint.packed("model.layers.0.self_attn.k_proj.weight") is not None
    save_file({each: checkpoint.read(each) for each in tensors}, tmp_path / "model.safetensors")
    torch.testing.assert_close(
        logits_of(path), reference_logits(tmp_path, random_ids(30, VOCABULARY)), atol=3e-4, rtol=1e-4
    )


def test_linear_rope_scaling_and_sliding_windows_are_read(tmp_path: Path) -> None:
    config = SafetensorsCheckpoint(save_family(tmp_path, "llama")).config
    fields: dict[str, Any] = {
        "llama__rope__scaling__type": ("linear", GGUFValueType.STRING),
        "llama__rope__scaling__factor": (4.0, GGUFValueType.FLOAT32),
        "llama__attention__sliding_window": (128, GGUFValueType.UINT32),
    }
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "model.gguf", config, {}, **fields))
    assert checkpoint.config.rotary.frequency_divisors == (4.0,) * 8
    assert checkpoint.config.windows == (128, 128, 128)


def test_yarn_is_read_as_from_a_config_json(tmp_path: Path) -> None:
    config = SafetensorsCheckpoint(save_family(tmp_path, "yarn")).config
    plain = replace(config, rotary=RotaryConfig(config.rotary.theta))
    fields: dict[str, Any] = {
        "qwen3__rope__scaling__type": ("yarn", GGUFValueType.STRING),
        "qwen3__rope__scaling__factor": (4.0, GGUFValueType.FLOAT32),
        "qwen3__rope__scaling__original_context_length": (32, GGUFValueType.UINT32),
    }
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "model.gguf", plain, {}, **fields))
    assert checkpoint.config.rotary == config.rotary


def test_other_rope_scaling_is_refused(tmp_path: Path) -> None:
    config = SafetensorsCheckpoint(save_family(tmp_path, "llama")).config
    fields: dict[str, Any] = {"llama__rope__scaling__type": ("longrope", GGUFValueType.STRING)}
    path = write_gguf(tmp_path / "model.gguf", config, {}, **fields)
    with pytest.raises(ConfigurationError, match="rope scaling 'longrope' is not supported"):
        GgufCheckpoint(path)


@pytest.mark.parametrize("content", [b"", b"not a model", b"GGUF\x01\0\0\0", b"GGUF\x03\0\0\0\xff"])
def test_a_file_that_is_not_gguf_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"GGUF|readable"):
        GgufCheckpoint(path)


def test_a_tensor_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = SafetensorsCheckpoint(save_family(tmp_path, "llama")).config
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "model.gguf", config, {}))
    with pytest.raises(ConfigurationError, match=r"blk\.0\.ffn_down\.weight"):
        checkpoint.read(DOWN)
    with pytest.raises(ConfigurationError, match="no tensor for"):
        gguf_name("model.layers.0.mlp.conv.weight", families_by_architecture()["llama"][1])
