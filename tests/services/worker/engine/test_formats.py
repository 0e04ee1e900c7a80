"""Every cell of the README's table of families and formats: logits are those of the dequantised weights.

Activations stay wide here, so that results are those of the weights, number for number; how activations are rounded is
shown in `quantization/test_stored_formats.py`. That families compute what `transformers` computes is shown in
`test_families.py`.
"""

from __future__ import annotations

import shutil
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file, save_file

from common.errors import ConfigurationError
from deploy.checks import families as table
from deploy.checks.families import BUT_EXPERTS, COLUMNS, IN_BFLOAT16, NO, cell
from services.worker.engine.backends import select_dtype
from services.worker.engine.checkpoints.safetensors_directory import SafetensorsCheckpoint, read_config
from services.worker.engine.families.registry import families_by_name
from services.worker.engine.quantization import fp8, int8
from tests.services.worker.engine.checkpoints.gguf_writing import write_gguf
from tests.services.worker.engine.driving import Driver, load, random_ids
from tests.services.worker.engine.families import (
    FAMILIES,
    IN_GGUF,
    UNREAD_ARCHITECTURES,
    VOCABULARY,
    config_class,
    save_model,
)
from tests.services.worker.engine.mxfp4_checkpoints import save_published
from tests.services.worker.engine.quantization.fp8_checkpoints import change_config
from tests.services.worker.engine.quantization.stored_formats import (
    SCHEMES,
    Scheme,
    awq,
    compressed,
    fp8_channels,
    fp8_tensor,
    gptq,
    store_quantised,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from deploy.checks.families import Column
    from services.worker.engine.model.family import Family

PROMPT = random_ids(12, VOCABULARY)
# Widths that formats can divide: by 16 in FP8, by 32 in groups, by no 128.
SIZES: dict[str, Any] = {
    "hidden_size": 160, "intermediate_size": 96, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64, "head_dim": 32, "num_hidden_layers": 2, "kv_lora_rank": 32, "q_lora_rank": 32,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "initializer_range": 0.05,
}  # fmt: skip
SCHEMES_OF: dict[Column, Scheme] = {
    table.FP8_TENSOR: Scheme(table.FP8_TENSOR.quantization or {}, fp8_tensor),
    table.FP8_CHANNEL: Scheme(table.FP8_CHANNEL.quantization or {}, fp8_channels),
    table.FP8_BLOCK: SCHEMES["fp8 blocks"],
    table.AWQ: awq(32),
    table.GPTQ: gptq(4, 32, symmetric=False, act_order=True),
    table.PACKED: compressed(4, 32),
    table.INT8: SCHEMES["int8"],
}
# The first model of each family, of those in GGUF files if there are any.
MODELS: dict[str, str] = {}
for _name in (*IN_GGUF, *FAMILIES):
    MODELS.setdefault(config_class(FAMILIES[_name][0]).model_type, _name)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write a tiny model of a family, once, and return its directory."""

    @cache
    def write(family: str) -> Path:
        name, options = FAMILIES[MODELS[family]]
        options = {**options, **IN_GGUF.get(MODELS[family], {})}
        fixed = _OPTIONAL - set(options)
        if "layer_types" in options or "num_hidden_layers" in options:
            fixed |= {"num_hidden_layers"}
        sizes = {key: value for key, value in SIZES.items() if key not in fixed}
        return save_model(tmp_path_factory.mktemp(family), name, {**options, **sizes})

    return write


# Sizes that only some families have.
_OPTIONAL = {
    "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size", "kv_lora_rank",
    "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "linear_key_head_dim", "linear_value_head_dim",
}  # fmt: skip


@pytest.fixture(autouse=True)
def wide_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations are not rounded; nor are weights, which are stored quantised."""

    def unrounded(rows: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
        return rows, torch.ones(rows.shape[0], 1)

    def groups(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        padded = fp8.in_blocks(rows)
        return padded, torch.ones(rows.shape[0], padded.shape[1] // 128)

    monkeypatch.setattr(fp8, "quantise_rows", unrounded)
    monkeypatch.setattr(fp8, "quantise_groups", groups)
    monkeypatch.setattr(int8, "quantise_rows", unrounded)


@cache
def logits_of(model: Path) -> torch.Tensor:
    runner = load(model, backend="torch")
    driver = Driver(runner)
    logits = driver.run([(driver.open(len(PROMPT)), PROMPT)], all_tokens=True)
    runner.close()
    return logits.float()


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def cells() -> Iterator[Any]:
    """Yield all cells; a mixture in every format, and every family in one, are in the unit suite."""
    for i, family in enumerate(families_by_name().values()):
        for j, column in enumerate(COLUMNS):
            is_short = family.name == "qwen3_moe" or j == i % len(COLUMNS)
            marks = () if is_short else (pytest.mark.extended,)
            yield pytest.param(family, column, id=f"{family.name} {column.title}", marks=marks)


@pytest.mark.parametrize(("family", "column"), list(cells()))
def test_a_family_is_served_in_a_format_as_the_readme_says(
    family: Family, column: Column, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    source, stored = plain(family.name), tmp_path / "stored"
    if cell(family, column) == NO:
        check_refusal(family, column, source, stored)
        return
    if column in SCHEMES_OF:
        wide = store_projections(family, column, source, tmp_path)
    elif column is table.MXFP4:
        stored, wide = save_published(tmp_path)
    elif column is table.GGUF:
        stored, wide = store_gguf(source, tmp_path)
    else:
        wide = store_narrow(family, column, source, tmp_path)
    expected = logits_of(wide)
    assert error(logits_of(stored), expected) < 1e-5
    # The format changes what the model computes.
    assert column is table.MXFP4 or error(logits_of(source), expected) > 1e-4


def check_refusal(family: Family, column: Column, source: Path, stored: Path) -> None:
    """The format is refused by its name, before weights are read."""
    if column is table.GGUF:
        architecture = UNREAD_ARCHITECTURES[family.name]
        writer = GGUFWriter(stored.with_suffix(".gguf"), architecture)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(ConfigurationError, match=f"GGUF architecture '{architecture}' is not supported"):
            load(stored.with_suffix(".gguf"))
        return
    stored.mkdir()
    shutil.copy(source / "config.json", stored)
    change_config(stored, quantization_config=column.quantization)
    with pytest.raises(ConfigurationError, match=f"quantization_config: .*{family.name} in {column.title} .*supported"):
        load(stored)


def store_projections(family: Family, column: Column, source: Path, directory: Path) -> Path:
    """Write `stored`, with quantised projections, and return the same model with dequantised ones."""
    stored, wide = (shutil.copytree(source, directory / name) for name in ("stored", "wide"))
    weights = store_quantised(stored, SCHEMES_OF[column])
    tensors = load_file(source / "model.safetensors")
    has_experts = any("experts" in name for name in weights)
    assert has_experts is (read_config(source).moe is not None and cell(family, column) != BUT_EXPERTS)
    assert {"o_proj", "down_proj"} & {name.split(".")[-2] for name in weights}
    save_file(tensors | {name: weight.float() for name, weight in weights.items()}, wide / "model.safetensors")
    return wide


def store_gguf(source: Path, directory: Path) -> tuple[Path, Path]:
    """Return a file in Q8_0, and one of the same numbers in float32."""
    config, tensors = SafetensorsCheckpoint(source).config, load_file(source / "model.safetensors")
    kept = ("bias", "ffn_gate_inp", "attn_sinks")
    stored = write_gguf(directory / "stored.gguf", config, tensors, GGMLQuantizationType.Q8_0, wide=kept)
    wide = write_gguf(
        directory / "wide.gguf", config, tensors, GGMLQuantizationType.Q8_0, wide=kept, is_dequantised=True
    )
    assert stored.stat().st_size < 0.4 * wide.stat().st_size
    return stored, wide


def store_narrow(family: Family, column: Column, source: Path, directory: Path) -> Path:
    """Write `stored` in 16 bits, and return the same model in float32."""
    dtype = torch.bfloat16 if column is table.BFLOAT16 else torch.float16
    stored, wide = (shutil.copytree(source, directory / name) for name in ("stored", "wide"))
    narrow = {name: tensor.to(dtype) for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(narrow, stored / "model.safetensors")
    change_config(stored, dtype=str(dtype).removeprefix("torch."))
    save_file({name: tensor.float() for name, tensor in narrow.items()}, wide / "model.safetensors")
    computed = torch.bfloat16 if cell(family, column) == IN_BFLOAT16 else dtype
    assert select_dtype("auto", read_config(stored), torch.device("cuda"), None) == computed
    return wide


def test_every_family_has_a_model() -> None:
    assert set(MODELS) == set(families_by_name())
    assert {column.title for column in COLUMNS} == {
        *(column.title for column in SCHEMES_OF), "BF16", "FP16", "MXFP4", "GGUF",
    }  # fmt: skip
