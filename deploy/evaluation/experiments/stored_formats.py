"""The shape of a model with weights in a quantised format, for measurements with random weights."""

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
    "int8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {
            "group_0": {
                "weights": {**_INT8, "strategy": "channel"},
                "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
            }
        },
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "gptq-32": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False},
}


@contextmanager
def shape_in(shape: Path, name: str) -> Iterator[Path]:
    """Give a directory with the config.json of `shape`, whose weights are in the format `name`."""
    config = json.loads((shape / "config.json").read_text(encoding="utf-8"))
    with TemporaryDirectory(prefix="pando-shape-") as folder:
        directory = Path(folder) / f"{shape.name}-{name}"
        directory.mkdir()
        described = {**config, "quantization_config": FORMATS[name]}
        (directory / "config.json").write_text(json.dumps(described), encoding="utf-8")
        yield directory
