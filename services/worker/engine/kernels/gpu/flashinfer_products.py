"""Products with FP8 in blocks by DeepGEMM's kernels for Hopper, as FlashInfer has them from TensorRT-LLM.

FlashInfer compiles its library at its first use. For each shape of a matrix and each tiling that the library chooses by
the number of tokens, it then has nvcc compile a kernel, which takes two seconds and would delay a request: so only
those numbers of tokens are served for which all kernels were prepared. Kernels stay in a directory, where the next
start finds them.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from services.worker.engine.kernels.cpu.build import cache_directory
from services.worker.engine.kernels.gpu.prebuild import find_compiler
from services.worker.engine.quantization.formats import FP8_BLOCK
from services.worker.engine.quantization.fp8 import FP8

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

# Numbers of tokens for which these products were measured to be faster: up to MOST_FEW, and from LEAST_MANY on. A bias,
# or sums to add to, take another program here: for up to MOST_FUSED tokens, the engine's own program, which does both
# itself, is as fast.
MOST_FUSED, MOST_FEW, LEAST_MANY = 16, 256, 1024
# More tokens than 64 are divided into tiles of so many; what is chosen beside depends on the number of tiles.
TILE = 128
# The most tokens of each choice for fewer, whose tiles have 16, 24 or 32 tokens, and 64 from 32 tokens on.
FEW_TOKENS = (16, 24, 31, 64, *range(TILE, MOST_FEW + 1, TILE))
# The library pads scales of one group of inputs to a multiple of so many tokens.
SCALES_UNIT = 4
# Where the library looks for nvcc and keeps kernels.
COMPILER_VARIABLE, KERNELS_VARIABLE = "TRTLLM_DG_NVCC_COMPILER", "TRTLLM_DG_CACHE_DIR"


class FlashInferProducts:
    """The products of one device's matrices, for the shapes that were added and then prepared."""

    def __init__(self, device: torch.device) -> None:
        """Serve no tokens yet."""
        self._device = device
        # FlashInfer's object with compiled functions; None: there is none yet, or it cannot be had.
        self._runner: Any = None
        # Of the shapes of matrices that were prepared.
        self._most_tokens: dict[torch.Size, int] = {}
        # Those that have not been prepared, in the order in which they were added.
        self._added: dict[torch.Size, None] = {}

    def add(self, shape: torch.Size) -> None:
        """Have products with matrices of `shape`, (out, in), prepared, both multiples of 128."""
        self._added[shape] = None

    def serves(self, shape: torch.Size, tokens: int, *, is_plain: bool) -> bool:
        """Whether so many tokens can be multiplied with a matrix of `shape`, and are faster so than by other means.

        `is_plain`: without bias or sums to add to.
        """
        return tokens <= self._most_tokens.get(shape, 0) and is_faster(tokens) and (is_plain or tokens > MOST_FUSED)

    def multiply(self, inputs: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, outputs: torch.Tensor) -> None:
        """Write inputs [tokens, in] bfloat16 times a matrix to `outputs` [tokens, out] bfloat16, which is contiguous.

        The matrix is `values` [out, in] FP8 with `scales` [out / 128, in / 128] float32. Inputs are quantised first,
        128 of a token with one scale.
        """
        # `flashinfer.gemm.fp8_blockscale_gemm_sm90` does the same, with a workspace larger than the matrix.
        inputs = inputs.contiguous()
        tokens, width = inputs.shape
        rounded = inputs.new_empty(tokens, width, dtype=FP8)
        of_groups = inputs.new_empty(
            width // FP8_BLOCK, -(-tokens // SCALES_UNIT) * SCALES_UNIT, dtype=torch.float32
        )  # [groups, tokens]
        self._runner.fp8_quantize_1x128(inputs, rounded, of_groups, False)
        self._runner.run_gemm(rounded, values, outputs, of_groups, scales)

    def prepare(self, most_tokens: int) -> None:
        """Have kernels compiled for all shapes and up to `most_tokens` tokens; if that fails, do not serve these."""
        shapes, self._added = self._added, {}
        if not shapes:
            return
        began_at = time.monotonic()
        counts = list(prepared_tokens(most_tokens))
        try:
            self._runner = load_runner()
            # Inputs that are quantised already take no workspace, but without one the library refuses to multiply.
            self._runner.configure_workspace(torch.empty(1, dtype=torch.uint8, device=self._device))
            for shape in shapes:
                self._compile(shape, counts)
        except Exception as error:  # noqa: BLE001  # of compilers and libraries; the engine's own programs remain
            log.warning("FlashInfer's products of FP8 in blocks cannot be used, others take longer: %s", error)
            return
        self._most_tokens.update(dict.fromkeys(shapes, most_tokens))
        log.info(
            "products.prepared shapes=%d most_tokens=%d seconds=%.1f",
            len(shapes), most_tokens, time.monotonic() - began_at,
        )  # fmt: skip

    def _compile(self, shape: torch.Size, counts: list[int]) -> None:
        """Multiply `counts` tokens with a matrix of `shape`, whatever its values are."""
        outputs, width = shape
        values = torch.empty(shape, dtype=FP8, device=self._device)
        scales = torch.empty(outputs // FP8_BLOCK, width // FP8_BLOCK, device=self._device)
        for tokens in counts:
            inputs = torch.zeros(tokens, width, dtype=torch.bfloat16, device=self._device)
            self.multiply(inputs, values, scales, inputs.new_empty(tokens, outputs))


def is_faster(tokens: int) -> bool:
    """Whether so many tokens were measured to be faster than by the engine's own programs and cuBLAS."""
    return tokens <= MOST_FEW or tokens >= LEAST_MANY


def prepared_tokens(most_tokens: int) -> Iterator[int]:
    """Yield numbers of tokens whose kernels serve all numbers up to `most_tokens` that are served, ascending."""
    for tokens in (*FEW_TOKENS, *range(LEAST_MANY, most_tokens + TILE, TILE)):
        if is_faster(min(tokens, most_tokens)):
            yield min(tokens, most_tokens)
        if tokens >= most_tokens:
            return


def load_runner() -> Any:
    """Return FlashInfer's object with the functions of these products, which is compiled first if need be.

    Raises:
        RuntimeError: there is no nvcc.
        ImportError: this version of FlashInfer has no such products.
        OSError: there is no directory to keep kernels in.
    """
    from flashinfer import __version__
    from flashinfer.gemm.gemm_base import get_fp8_blockscale_gemm_runner_sm90

    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("there is no nvcc; put it on the path or into CUDA_HOME")
    # The library would end the process if it could not make these directories, and takes kernels of other versions.
    own = cache_directory() / f"flashinfer-{__version__}"
    kernels = Path(os.environ.setdefault(KERNELS_VARIABLE, str(own)))
    for folder in (kernels / "cache", kernels / "tmp"):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} cannot be written to")
    os.environ.setdefault(COMPILER_VARIABLE, str(compiler))
    return get_fp8_blockscale_gemm_runner_sm90()
