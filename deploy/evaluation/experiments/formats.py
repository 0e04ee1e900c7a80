"""Formats of weights in which shapes without weights are measured, as a published config.json describes them."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_INT8: Final = {"num_bits": 8, "type": "int", "symmetric": True}
# `quantization_config` of a config.json, by the format's name here.
FORMATS: Final[dict[str, dict[str, Any]]] = {
    "fp8-blocks": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "fp8-static": {"quant_method": "fp8", "activation_scheme": "static"},
    "int8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**_INT8, "strategy": "channel"},
                "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
            }
        },
        "ignore": ["lm_head"],
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "gptq-128": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    "gptq-32": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False},
    # As GGUF's Q8_0 is held.
    "packed-8-32": {"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": True, "desc_act": False},
    # As GGUF's Q4_K is held: 4 bits, groups of 32, scales and offsets.
    "packed-32": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False},
}


@contextmanager
def shape_in(shape: Path, name: str, **config: Any) -> Iterator[Path]:
    """Give a directory with the config.json of `shape`, whose weights are in the format `name`; `config` adds fields.

    The directory has the name of `shape`, and is removed at the end. A format that is not in `FORMATS` changes nothing.
    """
    described = {**json.loads((shape / "config.json").read_text(encoding="utf-8")), **config}
    if name in FORMATS:
        described["quantization_config"] = FORMATS[name]
    with TemporaryDirectory(prefix="pando-shape-") as folder:
        directory = Path(folder) / shape.name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(described), encoding="utf-8")
        yield directory
