"""Compiles GPU kernels ahead of time, on a machine without a GPU: `python -m …kernels.gpu.prebuild DIRECTORY`.

FlashInfer compiles its kernels with nvcc when they are first used, which takes minutes; Triton compiles one C file with
the host's compiler. With both done ahead, an image needs neither compiler. FLASHINFER_CUDA_ARCH_LIST says for which
GPUs, and nvcc is found by CUDA_HOME.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from flashinfer.jit import JitSpec

HOPPER = "9.0a"
# Components of rows for which FlashInfer has kernels of latent attention: values, and those that are rotated.
LATENT_DIMS = (512, 64)
NO_POSITIONS = 0  # what FlashInfer calls PosEncodingMode.NONE: positions are in queries and keys already


def main() -> None:
    """Compile into FlashInfer's own package, and Triton's file into the directory that is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="for Triton's host code, by the digest of its source")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"])
    parser.add_argument("--windows", choices=("without", "with", "both"), default="both", help="sliding windows")
    parser.add_argument("--float8-kv", action="store_true", help="also for keys and values in FP8 (kv_dtype=fp8)")
    arguments = parser.parse_args()
    windows = {"without": [False], "with": [True], "both": [False, True]}[arguments.windows]
    dtypes = [getattr(torch, name) for name in arguments.dtypes]
    architectures, kinds = os.environ["FLASHINFER_CUDA_ARCH_LIST"], (False, True) if arguments.float8_kv else (False,)
    compile_attention(
        [
            spec
            for is_float8 in kinds
            for spec in attention_specs(architectures, arguments.head_dims, dtypes, windows, has_float8_kv=is_float8)
        ]
    )
    compile_launcher(arguments.directory)


def attention_specs(
    architectures: str, head_dims: Sequence[int], dtypes: Sequence[torch.dtype], windows: Sequence[bool],
    *, has_cap: bool = False, has_float8_kv: bool = False,
) -> Iterable[JitSpec]:  # fmt: skip
    """Yield the kernels that `FlashInferPrefill` uses: FlashAttention-3 on Hopper, 2 elsewhere and for keys in FP8.

    Those that cap scores are compiled when they are first used.
    """
    from flashinfer.jit.attention import gen_batch_prefill_module

    backends = {
        "fa3" if architecture == HOPPER and not has_float8_kv else "fa2" for architecture in architectures.split()
    }
    for backend, dtype, size, window in itertools.product(sorted(backends), dtypes, head_dims, windows):
        # The arguments that `BatchPrefillWithPagedKVCacheWrapper.plan` derives; no fp16 products.
        yield gen_batch_prefill_module(
            backend,
            dtype,
            torch.float8_e4m3fn if has_float8_kv else dtype,
            dtype,
            torch.int32,
            size,
            size,
            NO_POSITIONS,
            window,
            has_cap,
            False,
        )


def is_missing(
    head_dim: int,
    dtype: torch.dtype,
    *,
    has_window: bool,
    has_cap: bool = False,
    has_float8_kv: bool = False,
    capability: tuple[int, int],
) -> bool:
    """Whether this installation has no kernels for such attention on such a GPU, and cannot compile them."""
    is_fixed = bool(os.environ.get("FLASHINFER_DISABLE_JIT"))
    if not is_fixed and has_compiler():
        return False
    architecture = HOPPER if capability == (9, 0) else "{}.{}".format(*capability)
    specs = attention_specs(
        architecture, [head_dim], [dtype], [has_window], has_cap=has_cap, has_float8_kv=has_float8_kv
    )
    return not all(spec.is_aot if is_fixed else spec.is_compiled for spec in specs)


def is_latent_missing(dtype: torch.dtype, *, capability: tuple[int, int]) -> bool:
    """Whether this installation has no kernels for latent attention on such a GPU, and cannot compile them."""
    is_fixed = bool(os.environ.get("FLASHINFER_DISABLE_JIT"))
    if not is_fixed and has_compiler():
        return False
    spec = latent_spec("fa3" if capability == (9, 0) else "fa2", dtype)
    return not (spec.is_aot if is_fixed else spec.is_compiled)


def latent_spec(backend: str, dtype: torch.dtype) -> JitSpec:
    """Return the kernels that `FlashInferLatent` uses, which are compiled when they are first used."""
    from flashinfer.jit.attention import gen_batch_mla_module

    return gen_batch_mla_module(backend, dtype, dtype, dtype, torch.int32, *LATENT_DIMS, False)


def has_compiler() -> bool:
    """Whether nvcc is where FlashInfer looks for it."""
    return find_compiler() is not None


def find_compiler() -> Path | None:
    """Return the path of nvcc, where FlashInfer looks for it; None: it is not there."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = shutil.which("nvcc") if home is None else None
    compiler = Path(found) if found else Path(home or "/usr/local/cuda") / "bin" / "nvcc"
    return compiler if compiler.exists() else None


def compile_attention(specs: Sequence[JitSpec]) -> None:
    """Compile kernels and put them where FlashInfer looks before it compiles."""
    from flashinfer.jit.core import build_jit_specs

    build_jit_specs(list(specs), verbose=True)
    for spec in specs:
        spec.aot_path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(spec.jit_library_path, spec.aot_path)


def compile_launcher(directory: Path) -> None:
    """Compile the one C file by which Triton talks to the driver, as `triton.runtime.build` would.

    The driver's library is not here: what it has is found when the module is loaded.
    """
    import triton.backends.nvidia

    package = Path(triton.backends.nvidia.__file__).parent
    source = package / "driver.c"
    target = directory / f"{hashlib.sha256(source.read_bytes()).hexdigest()}.so"
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        driver = ["gcc", "-shared", "-x", "c", "/dev/null", "-Wl,-soname,libcuda.so.1", "-o", f"{folder}/libcuda.so.1"]
        subprocess.run(driver, check=True)
        includes = [f"-I{package / 'include'}", f"-I{sysconfig.get_paths()['include']}"]
        options = ["-O3", "-shared", "-fPIC", "-Wno-psabi", f"-L{folder}", "-l:libcuda.so.1", *includes]
        subprocess.run(["gcc", str(source), "-o", str(target), *options], check=True)


if __name__ == "__main__":
    main()
