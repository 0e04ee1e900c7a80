"""GGUF files (llama.cpp's format), dequantised as they are read."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize

from common.errors import ConfigurationError
from services.worker.engine.model_config import config_from_gguf

if TYPE_CHECKING:
    from pathlib import Path

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_MODEL_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


class GgufCheckpoint:
    """Reads single tensors out of a mapped GGUF file.

    Converters to GGUF reorder the query and key rows of the architecture `llama` so that a rotated pair lies side by
    side; `read` undoes that, so the rest of the engine knows one form of rotary embedding only.
    """

    def __init__(self, path: Path) -> None:
        """Map `path` and read its metadata."""
        try:
            reader = GGUFReader(path)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{path}: not a readable GGUF file: {error}") from error
        self._path = path
        self._tensors: dict[str, Any] = {tensor.name: tensor for tensor in reader.tensors}  # gguf is untyped
        fields = {name: field.contents() for name, field in reader.fields.items() if _is_small(name)}
        if "tokenizer.ggml.tokens" in reader.fields:
            fields["tokenizer.ggml.tokens"] = range(len(reader.fields["tokenizer.ggml.tokens"].data))
        divisors = (
            tuple(self._dequantised("rope_freqs.weight").tolist()) if "rope_freqs.weight" in self._tensors else ()
        )
        self.config = config_from_gguf(fields, tied_embeddings="output.weight" not in self._tensors, divisors=divisors)
        with path.open("rb") as file:
            self.identity = hashlib.sha256(f"{path.stat().st_size} ".encode() + file.read(1 << 20)).hexdigest()

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        """Return a tensor or a block of a matrix; see `Checkpoint.read`. Rows of q and k must be whole heads."""
        values = self._dequantised(gguf_name(name), rows)
        if self.config.family == "llama" and (".q_proj." in name or ".k_proj." in name):
            values = _restore_halves(values, self.config.head_dim)
        if columns is not None:
            values = np.ascontiguousarray(values[:, columns])
        return torch.from_numpy(values)

    def _dequantised(self, name: str, rows: slice | None = None) -> np.ndarray[Any, np.dtype[np.float32]]:
        if name not in self._tensors:
            raise ConfigurationError(f"{self._path}: no tensor {name!r}")
        tensor = self._tensors[name]
        data = tensor.data if rows is None else tensor.data[rows]
        values = dequantize(data, tensor.tensor_type)
        # Unquantised tensors come back as views of the read-only map.
        return np.array(values, dtype=np.float32) if values.base is not None else values.astype(np.float32, copy=False)


def gguf_name(name: str) -> str:
    """Translate a tensor name of `transformers` into that of GGUF.

    Raises:
        ConfigurationError: GGUF has no such tensor.
    """
    stem, _, suffix = name.rpartition(".")
    if stem in _MODEL_NAMES:
        return f"{_MODEL_NAMES[stem]}.{suffix}"
    prefix = "model.layers."
    layer, _, part = stem.removeprefix(prefix).partition(".")
    if not stem.startswith(prefix) or part not in _LAYER_NAMES:
        raise ConfigurationError(f"GGUF files have no tensor for {name!r}")
    return f"blk.{layer}.{_LAYER_NAMES[part]}.{suffix}"


def _is_small(name: str) -> bool:
    # Vocabulary and merges have tens of thousands of entries and are the tokenizer's business.
    return not name.startswith("tokenizer.ggml.") or name.endswith("_id")


def _restore_halves(
    values: np.ndarray[Any, np.dtype[np.float32]], head_dim: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Put rows (0, 1, 2, …) of each head, pairs side by side, back to (0, 2, …, 1, 3, …), two halves."""
    heads = values.reshape(-1, head_dim // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(values.shape)
