"""CPU operators compiled ahead, for images that carry no compiler.

`python -m services.worker.engine.kernels.cpu.prebuilt DIRECTORY` compiles one library for each kind of processor; a
worker whose $PANDO_OPERATORS names the directory takes the best one for its processor.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from services.worker.engine.kernels.cpu.build import BuildError, compile_library, find_compiler, find_openmp

DIRECTORY_VARIABLE = "PANDO_OPERATORS"
_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@dataclass(frozen=True, slots=True)
class ProcessorVariant:
    """One kind of x86-64 processor: the compiler's options, and the flags of /proc/cpuinfo that they require."""

    name: str
    options: tuple[str, ...]
    needs: frozenset[str]


# Best first.
VARIANTS = (
    ProcessorVariant(
        "amx",
        ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        _AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"},
    ),
    ProcessorVariant("avx512-bf16", ("-march=x86-64-v4", "-mavx512bf16"), _AVX512 | {"avx512_bf16"}),
    ProcessorVariant("avx512", ("-march=x86-64-v4",), _AVX512),
    ProcessorVariant("avx2", ("-march=x86-64-v3",), _AVX2),
)


def find_prebuilt() -> Path | None:
    """Return the library that was compiled ahead for this processor, None if there is none."""
    directory = os.environ.get(DIRECTORY_VARIABLE)
    return choose(Path(directory), processor_flags()) if directory else None


def choose(directory: Path, flags: frozenset[str]) -> Path | None:
    """Return the best library in `directory` for a processor with `flags`, None if none fits."""
    for variant in VARIANTS:
        path = _path(directory, variant)
        if variant.needs <= flags and path.is_file():
            return path
    return None


def processor_flags() -> frozenset[str]:
    """Return the processor's flags in /proc/cpuinfo; none if it cannot be read."""
    try:
        found = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return frozenset()
    return frozenset(found.group(1).split()) if found else frozenset()


def build_all(directory: Path, openmp: Path | None) -> list[Path]:
    """Compile every variant into `directory`; on other processors than x86-64, none.

    Raises:
        BuildError: there is no compiler, or it fails.
    """
    if platform.machine() != "x86_64":
        return []
    directory.mkdir(parents=True, exist_ok=True)
    compiler = find_compiler()
    for variant in VARIANTS:
        compile_library(compiler, variant.options, openmp, _path(directory, variant))
    return [_path(directory, variant) for variant in VARIANTS]


def _path(directory: Path, variant: ProcessorVariant) -> Path:
    return directory / f"operators-{variant.name}.so"


def main() -> int:
    """Compile for an image, as part of building it; return the exit code."""
    # Importing torch loads the OpenMP runtime that the libraries have to share with it.
    import torch  # noqa: F401  # nothing else here needs torch

    try:
        paths = build_all(Path(sys.argv[1]), find_openmp())
    except BuildError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write("".join(f"{path}\n" for path in paths))
    return 0


if __name__ == "__main__":
    sys.exit(main())
