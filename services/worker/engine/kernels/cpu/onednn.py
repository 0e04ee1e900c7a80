"""oneDNN's products of blocks, which the compiled operators can call: torch exports them for its own C++ kernels.

oneDNN generates its code for the processor at hand, so these reach AMX tiles and whatever later processors have.
"""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

# at::native::cpublas::brgemm for float and BFloat16, and brgemm_release. The names contain the types of the arguments,
# so that a version of torch with other arguments has other names.
_SYMBOLS = (
    "_ZN2at6native7cpublas6brgemmEllllllbPKfS3_Pfb",
    "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb",
    "_ZN2at6native7cpublas14brgemm_releaseEb",
)


class BlockFunctions(ctypes.Structure):
    """`BlockFunctions` of operators/blocks.hpp."""

    _fields_ = (
        ("multiply_float32", ctypes.c_void_p),
        ("multiply_bfloat16", ctypes.c_void_p),
        ("release", ctypes.c_void_p),
    )


def find_block_functions() -> BlockFunctions | None:
    """Return the functions of the loaded torch; None if it exports none, or on other processors than x86-64."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    try:
        return BlockFunctions(*_addresses(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except (AttributeError, OSError):
        return None


def _addresses(library: Path) -> Iterator[int | None]:
    loaded = ctypes.CDLL(str(library))
    for symbol in _SYMBOLS:
        yield ctypes.cast(getattr(loaded, symbol), ctypes.c_void_p).value
