"""GGUF files (llama.cpp's format): matrices in their own blocks, all else dequantised as it is read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from common.errors import ConfigurationError
from common.gguf_header import read_header
from services.worker.engine.checkpoints.tensor_names import split_expert, split_layer
from services.worker.engine.checkpoints.weight_digest import WeightDigest, block_name
from services.worker.engine.checkpoints.weight_file import WeightFile
from services.worker.engine.families.registry import families_by_architecture
from services.worker.engine.model.config_gguf import config_from_gguf
from services.worker.engine.quantization.gguf_blocks import KINDS, RowBlocks, grouped_blocks

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from common.gguf_header import TensorEntry
    from services.worker.engine.model.family import GgufFamily
    from services.worker.engine.quantization.grouped import GroupedMatrix

    FloatArray = NDArray[np.float32]

LAYER_NAMES = {
    "self_attn.qkv_proj": "attn_qkv",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
_LATENT = ".attn_kv_b.weight"
_MODEL_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


class GgufCheckpoint:
    """Reads single tensors out of a GGUF file.

    The file is not mapped: pages that have been read would count as memory of the process until the system takes them
    back, as much again as the weights.

    Converters to GGUF reorder the query and key rows of some architectures so that a rotated pair lies side by side;
    `read` undoes that, so the rest of the engine knows one form of rotary embedding only.
    """

    def __init__(self, path: Path) -> None:
        """Open `path` and read its header.

        Raises:
            ConfigurationError: it is not a GGUF file, or holds no model that this engine knows.
        """
        try:
            header = read_header(path)
            self._file = WeightFile(path)
        except OSError as error:
            raise ConfigurationError(f"{path}: not a readable GGUF file: {error}") from error
        self._path = path
        self._tensors = header.tensors
        self._digest = WeightDigest()
        self.config = config_from_gguf(
            header.metadata,
            tensors=self._tensors,
            divisors=self._divisors("rope_freqs.weight") or self._divisors("rope_factors_short.weight"),
            long_divisors=self._divisors("rope_factors_long.weight"),
        )
        _, self._gguf = families_by_architecture()[str(header.metadata["general.architecture"])]

    def identity(self) -> str:
        """Return the digest of all blocks read, as they are stored; see `Checkpoint.identity`."""
        return self._digest.hexdigest()

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        try:
            return gguf_name(split_expert(name)[0], self._gguf) in self._tensors
        except ConfigurationError:
            return False

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        """Return a tensor or a block of a matrix; see `Checkpoint.read`. Rows of q and k must be whole heads."""
        stored, place = self._place(name, rows)
        if stored not in self._tensors and stored.endswith(_LATENT):
            return self._latent_products(stored.removesuffix(_LATENT), rows)
        values = self._dequantised(stored, place)
        if name.endswith(".bias"):
            values = values.reshape(-1)
        if self._is_reordered(name):
            values = _restore_halves(values, self.config.head_dim)
        if columns is not None:
            values = np.ascontiguousarray(values[:, columns])
        return torch.from_numpy(values)

    def has_beside(self, name: str) -> bool:
        """Return False: files of this format contain decoders only."""
        return False

    def read_beside(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Raise: files of this format contain decoders only."""
        raise ConfigurationError(f"no tensor {name!r}: GGUF files contain decoders only")

    def packed(self, name: str, rows: slice | None = None, columns: slice | None = None) -> GroupedMatrix | None:
        """Return a matrix, or a block of it, in the file's own blocks; see `Checkpoint.packed`."""
        stored, place = self._place(name, rows)
        if stored not in self._tensors and stored.endswith(_LATENT):
            return None
        kind = self._quantization(self._entry(stored).kind)
        if kind.name not in KINDS:
            return None
        data = torch.from_numpy(self._data_of(stored, place))
        if self._is_reordered(name):
            data = data[_restored_order(data.shape[0], self.config.head_dim)]
        matrix = grouped_blocks(kind.name, data.view(data.shape[0], -1, GGML_QUANT_SIZES[kind][1]))
        return matrix if columns is None else matrix.columns(columns)

    def row_blocks(self, name: str, rows: slice) -> RowBlocks | None:
        """Return rows of a matrix as they are stored; see `Checkpoint.row_blocks`."""
        stored, place = self._place(name, rows)
        kind = self._quantization(self._entry(stored).kind)
        if kind.name not in KINDS:
            return None
        return RowBlocks(torch.from_numpy(self._data_of(stored, place)), kind)

    def _latent_products(self, layer: str, rows: slice | None) -> torch.Tensor:
        """Return rows of whole heads of the matrix that makes keys and values of latent vectors.

        Converters since 2025 store its part for keys as [heads, latent, keys], its part for values as [heads, values,
        latent].
        """
        keys, values = (f"{layer}.{part}.weight" for part in ("attn_k_b", "attn_v_b"))
        heads, rank, key_dim = self._entry(keys).shape
        value_dim = self._entry(values).shape[1]
        part = slice(0, heads)
        if rows is not None:
            part = slice(rows.start // (key_dim + value_dim), rows.stop // (key_dim + value_dim))
        by_head = [
            self._dequantised(name, slice(part.start * height, part.stop * height)).reshape(-1, height, width)
            for name, height, width in ((keys, rank, key_dim), (values, value_dim, rank))
        ]
        joined = np.concatenate([by_head[0].swapaxes(1, 2), by_head[1]], axis=1)
        return torch.from_numpy(np.ascontiguousarray(joined)).flatten(0, 1)

    def _divisors(self, name: str) -> tuple[float, ...]:
        return tuple(self._dequantised(name).tolist()) if name in self._tensors else ()

    def _place(self, name: str, rows: slice | None) -> tuple[str, slice | None]:
        """Return the name of the stored tensor, and where rows of `name` lie in it; None: all of them are."""
        whole, expert = split_expert(name)
        stored = gguf_name(whole, self._gguf)
        return stored, rows if expert is None else self._rows_of(stored, expert, rows)

    def _is_reordered(self, name: str) -> bool:
        return self._gguf.interleaves_rotary and (".q_proj." in name or ".k_proj." in name)

    def _rows_of(self, name: str, expert: int, rows: slice | None) -> slice:
        """Return where rows of one expert lie in a tensor [experts, rows, columns]."""
        shape = self._entry(name).shape
        if len(shape) == 2:  # biases [experts, rows]
            return slice(expert, expert + 1)
        height = shape[1]
        within = rows or slice(0, height)
        return slice(expert * height + within.start, expert * height + within.stop)

    def _dequantised(self, name: str, rows: slice | None = None) -> FloatArray:
        """Return a tensor, or some of its rows of all matrices in it, as float32."""
        entry = self._entry(name)
        data = self._data_of(name, rows)
        values: FloatArray = dequantize(data, self._quantization(entry.kind)).astype(np.float32, copy=False)
        shape = (data.shape[0], entry.shape[-1]) if len(entry.shape) > 1 else entry.shape
        return values.reshape(shape)

    def _data_of(self, name: str, rows: slice | None) -> NDArray[np.uint8]:
        """Return the bytes of rows of all matrices in a tensor, [rows, bytes].

        Raises:
            ConfigurationError: the file ends before they do.
        """
        entry = self._entry(name)
        quantization = self._quantization(entry.kind)
        block_elements, block_bytes = GGML_QUANT_SIZES[quantization]
        row_bytes = entry.shape[-1] // block_elements * block_bytes
        rows = rows or slice(0, math.prod(entry.shape[:-1]))
        start = entry.offset + rows.start * row_bytes
        data: NDArray[np.uint8] = np.empty((rows.stop - rows.start, row_bytes), np.uint8)
        part = f"the tensor {name!r}"
        self._file.fill(part, data.data.cast("B"), start)
        self._file.check_unchanged(part)
        self._digest.add(block_name(f"{name} {quantization.name}", rows, None), data)
        return data

    def _entry(self, name: str) -> TensorEntry:
        if name not in self._tensors:
            raise ConfigurationError(f"{self._path}: no tensor {name!r}")
        return self._tensors[name]

    def _quantization(self, kind: int) -> GGMLQuantizationType:
        try:
            return GGMLQuantizationType(kind)
        except ValueError as error:
            raise ConfigurationError(f"{self._path}: unknown tensor type {kind}") from error


def gguf_name(name: str, family: GgufFamily) -> str:
    """Translate a tensor name of `transformers` into that of GGUF files of `family`.

    Raises:
        ConfigurationError: GGUF has no such tensor.
    """
    stem, _, suffix = name.rpartition(".")
    if stem in _MODEL_NAMES:
        return f"{_MODEL_NAMES[stem]}.{suffix}"
    layer, part = split_layer(name)
    names = {**LAYER_NAMES, **family.tensors}
    stored = names.get(part) or f"{names.get(part.rpartition('.')[0], '')}.{suffix}"
    if not layer or stored.startswith("."):
        raise ConfigurationError(f"GGUF files have no tensor for {name!r}")
    return f"blk.{layer.split('.')[2]}.{stored}"


def _restore_halves(values: FloatArray, head_dim: int) -> FloatArray:
    """Put rows (0, 1, 2, …) of each head, pairs side by side, back to (0, 2, …, 1, 3, …), two halves."""
    heads = values.reshape(-1, head_dim // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(values.shape)


def _restored_order(height: int, head_dim: int) -> torch.Tensor:
    """Return where the rows of `_restore_halves` come from."""
    return torch.arange(height).view(-1, head_dim // 2, 2).transpose(1, 2).flatten()
