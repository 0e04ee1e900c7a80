"""Compiles the CPU operators with the system's compiler, once per source, compiler and processor.

Run `python -m services.worker.engine.kernels.cpu.build` to do it at installation; otherwise the first worker does.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_SOURCES = Path(__file__).parent / "operators"
_COMPILERS = ("c++", "g++", "clang++")
# Contraction to fused multiply-add is what the sums are built on; without errno, sqrt is one instruction.
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-ffp-contract=fast", "-w")
_THIS_PROCESSOR = ("-march=native",)
_TIMEOUT_SECONDS = 300
CACHE_VARIABLE = "PANDO_CACHE_DIR"


class BuildError(Exception):
    """The operators cannot be compiled here; the message says what would help."""


def build_library(
    openmp: Path | None, compiler: str | None = None, cache: Path | None = None,
    options: tuple[str, ...] = _THIS_PROCESSOR,
) -> Path:  # fmt: skip
    """Return the compiled library, from the cache if it was built before.

    Args:
        openmp: the OpenMP runtime to link with; None: the compiler's own. A process with two runtimes has two pools of
            threads that fight for the cores, so this should be the one that torch has loaded.
        compiler: C++ compiler; None: `$CXX`, or the first of c++, g++ and clang++ on the path.
        cache: directory for the result; None: `$PANDO_CACHE_DIR`, or `pando` in the user's cache directory.
        options: of the compiler, that name a processor.

    Raises:
        BuildError: there is no compiler, or it fails.
    """
    chosen = find_compiler() if compiler is None else compiler
    library = (cache or cache_directory()) / f"operators-{_digest([chosen, *_FLAGS, *options], openmp)}.so"
    if not library.is_file():
        library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        compile_library(chosen, options, openmp, library)
    return library


def compile_library(compiler: str, options: tuple[str, ...], openmp: Path | None, library: Path) -> None:
    """Compile for the processor that `options` name, and put the result at `library`.

    Raises:
        BuildError: the compiler fails.
    """
    _compile([compiler, *_FLAGS, *options], openmp, library)


def find_compiler() -> str:
    """Return the C++ compiler to use.

    Raises:
        BuildError: there is none.
    """
    chosen = os.environ.get("CXX")
    found = shutil.which(chosen) if chosen else next(filter(None, map(shutil.which, _COMPILERS)), None)
    if not found:
        raise BuildError(
            f"no C++ compiler ({chosen or ', '.join(_COMPILERS)}) is on the path; install one "
            "(Debian and Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++) and restart the worker"
        )
    return found


def cache_directory() -> Path:
    """Return where compiled libraries are kept: a place that only this user can write to."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if os.access(base if base.exists() else base.parent, os.W_OK):
        return base / "pando"
    return Path(tempfile.gettempdir()) / f"pando-{os.getuid()}"


def find_openmp() -> Path | None:
    """Return the path of the OpenMP runtime that this process has loaded, None if it cannot be found."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"\S*/lib(gomp|iomp5|omp)[-.][^/\s]*", maps)
    return Path(match.group()) if match else None


def _compile(command: list[str], openmp: Path | None, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        compiled, result = Path(folder) / "operators.o", Path(folder) / "operators.so"
        _run([*command, "-fopenmp", "-c", str(_SOURCES / "exports.cpp"), "-o", str(compiled)])
        # Linked by file name, the runtime that is already loaded is used, which wheels rename.
        runtime = "-fopenmp" if openmp is None else str(openmp)
        _run([command[0], "-shared", str(compiled), runtime, "-o", str(result)])
        # Ranks that start together may build at the same time: each puts a complete library in place.
        result.replace(library)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise BuildError(f"{command[0]} failed: {' | '.join(lines[:5])}; is it GCC 9 or Clang 14, or newer?")


def _digest(command: list[str], openmp: Path | None) -> str:
    parts = [*command, _compiler_version(command[0]), str(openmp), processor_identity()]
    digest = hashlib.sha256("\n".join(parts).encode())
    for source in sorted(_SOURCES.glob("*.[ch]pp")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:24]


def _compiler_version(compiler: str) -> str:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler}: {error}") from error
    return done.stdout


def processor_identity() -> str:
    """Return the processor's name and flags, which decide the instructions of `-march=native`."""
    try:
        information = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    lines = re.findall(r"^(?:model name|flags|Features|CPU part)\s*:.*$", information, re.MULTILINE)
    return "\n".join([platform.machine(), *sorted(set(lines))])


def main() -> int:
    """Build for this machine, as part of an installation; return the exit code."""
    # Importing torch loads the OpenMP runtime that the library has to share with it.
    import torch  # noqa: F401  # nothing else here needs torch

    try:
        library = build_library(find_openmp())
    except BuildError as error:
        sys.stderr.write(f"The CPU operators were not compiled, the worker will use plain torch: {error}\n")
        return 1
    sys.stdout.write(f"{library}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
