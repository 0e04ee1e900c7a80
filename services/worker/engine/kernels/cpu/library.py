"""The compiled CPU operators as Python functions over raw addresses."""

from __future__ import annotations

import ctypes
import hashlib
from ctypes import c_float, c_int, c_void_p
from typing import TYPE_CHECKING

import torch

from services.worker.engine.kernels.cpu.onednn import BlockFunctions
from services.worker.engine.model.config import Activation

if TYPE_CHECKING:
    from pathlib import Path

# Numbers of `ElementType` in operators/exports.cpp.
ELEMENT_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float8_e4m3fn: 3}
# Numbers of `Activation` in operators/matrix.hpp.
ACTIVATIONS = {Activation.SILU: 0, Activation.GELU_TANH: 1, Activation.CLAMPED_SWIGLU: 2}


class StoreArguments(ctypes.Structure):
    """`StoreArguments` of operators/elementwise.hpp."""

    _fields_ = (
        ("qkv", c_void_p),
        ("angles", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
        ("epsilon", c_float),
        ("tokens", c_int),
        ("query_heads", c_int),
        ("kv_heads", c_int),
        ("head_dim", c_int),
        ("page_size", c_int),
        ("threads", c_int),
    )


class AttentionArguments(ctypes.Structure):
    """`AttentionArguments` of operators/attention.hpp."""

    _fields_ = (
        ("queries", c_void_p),
        ("outputs", c_void_p),
        ("query_starts", c_void_p),
        ("key_lengths", c_void_p),
        ("page_table", c_void_p),
        ("sinks", c_void_p),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
        ("blocks", c_void_p),
        ("query_stride", c_int),
        ("rows", c_int),
        ("table_width", c_int),
        ("query_heads", c_int),
        ("kv_heads", c_int),
        ("head_dim", c_int),
        ("page_size", c_int),
        ("threads", c_int),
        ("window_left", c_int),
        ("is_chunked", c_int),
        ("block_count", c_int),
        ("sees_all", c_int),
        ("scale", c_float),
        ("softcap", c_float),
    )


class MatrixArguments(ctypes.Structure):
    """`MatrixArguments` of operators/packed.hpp."""

    _fields_ = (
        ("panels", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int),
        ("outputs", c_int),
        ("bits", c_int),
        ("group", c_int),
        ("has_wide_scales", c_int),
        ("has_shifts", c_int),
        ("is_e2m1", c_int),
        ("blocks", ctypes.POINTER(BlockFunctions)),
    )


class LayerArguments(ctypes.Structure):
    """`LayerArguments` of operators/layers.hpp."""

    _fields_ = (
        ("input_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("feed_forward_norm", c_void_p),
        ("sinks", c_void_p),
        ("angles", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
        ("qkv", MatrixArguments),
        ("output", MatrixArguments),
        ("gate", MatrixArguments),
        ("up", MatrixArguments),
        ("down", MatrixArguments),
        ("window_left", c_int),
        ("is_chunked", c_int),
        ("table", c_int),
    )


class LayersArguments(ctypes.Structure):
    """`LayersArguments` of operators/layers.hpp."""

    _fields_ = (
        ("layers", ctypes.POINTER(LayerArguments)),
        ("hidden", c_void_p),
        ("normed", c_void_p),
        ("next_norm", c_void_p),
        ("scratch", c_void_p),
        ("page_tables", c_void_p * 2),
        ("slots", c_void_p * 2),
        ("table_widths", c_int * 2),
        ("count", c_int),
        ("activation", c_int),
        ("store", StoreArguments),
        ("attention", AttentionArguments),
    )


_SIGNATURES = {
    "linear": (c_void_p, ctypes.POINTER(MatrixArguments), c_int, c_int, c_void_p, c_int, c_int),
    "gated_linear": (
        c_void_p, ctypes.POINTER(MatrixArguments), ctypes.POINTER(MatrixArguments), c_int, c_int, c_void_p, c_int,
        c_int,
    ),
    "pack": (c_void_p, c_int, c_int, c_int, c_void_p, c_int),
    "rms_norm": (c_void_p, c_void_p, c_float, c_int, c_int, c_void_p, c_int),
    "store": (ctypes.POINTER(StoreArguments), c_void_p, c_void_p, c_int),
    "attend": (ctypes.POINTER(AttentionArguments), c_void_p, c_void_p, c_int),
    "layers": (ctypes.POINTER(LayersArguments), c_int, c_int),
}  # fmt: skip


class CpuLibrary:
    """The loaded library. Calls release the interpreter lock; addresses must be those of contiguous CPU memory."""

    def __init__(self, path: Path) -> None:
        """Load `path`, which `build_library` returned.

        Raises:
            OSError: it cannot be loaded.
        """
        library = ctypes.CDLL(str(path))
        self._has_blocks = library.pando_has_blocks
        self._has_blocks.argtypes = (ctypes.POINTER(BlockFunctions), c_int)
        self.digest: str = hashlib.sha256(path.read_bytes()).hexdigest()
        """SHA-256 of the file."""
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, f"pando_{name}")
            function.argtypes = arguments
            function.restype = None
        self.linear = library.pando_linear
        self.gated_linear = library.pando_gated_linear
        self.pack = library.pando_pack
        self.rms_norm = library.pando_rms_norm
        self.store = library.pando_store
        self.attend = library.pando_attend
        self.layers = library.pando_layers
        self.lanes: int = library.pando_lanes()
        """Floats in a vector register: head_dim and page_size must be multiples."""
        self.panel: int = library.pando_panel()
        """Outputs in a panel of a laid-out matrix."""
        self.rounds_inputs: bool = bool(library.pando_rounds_inputs())
        """Whether products with bfloat16 weights round their inputs, too."""
        self.sums_groups: bool = bool(library.pando_sums_groups())
        """Whether packed weights are not rounded by products with bfloat16 inputs, unless these are oneDNN's."""
        self.attends_by_tiles: bool = bool(library.pando_attends_by_tiles())
        """Whether attention over KV in bfloat16 is that of AMX's tiles, which round queries and shares, too."""
        self.max_head_dim: int = library.pando_max_head_dim()

    def has_blocks(self, blocks: BlockFunctions, dtype: torch.dtype) -> bool:
        """Return whether oneDNN's products can replace those with weights of `dtype`, on this processor."""
        return bool(self._has_blocks(ctypes.byref(blocks), ELEMENT_TYPES[dtype]))
