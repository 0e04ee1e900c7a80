from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from common.errors import ConfigurationError
from services.worker.engine.backends import RunnerOptions, find_library
from services.worker.engine.kernels.cpu import build as native_build
from services.worker.engine.kernels.cpu.build import (
    CACHE_VARIABLE,
    BuildError,
    build_library,
    cache_directory,
    find_compiler,
    find_openmp,
)

CPU = torch.device("cpu")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)


@pytest.fixture
def failing_compiler(tmp_path: Path) -> str:
    compiler = tmp_path / "c++"
    compiler.write_text(
        "#!/bin/sh\n[ \"$1\" = --version ] && echo 1.0 && exit 0\necho 'what is -std=c++17?' >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    return str(compiler)


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_plain_torch_runs_and_the_log_names_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        library = find_library(RunnerOptions(), CPU)
    assert library is None
    (record,) = caplog.records
    assert "apt-get install g++" in record.getMessage()
    assert record.levelno == logging.WARNING


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_asking_for_compiled_operators_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="no C\\+\\+ compiler"):
        find_library(RunnerOptions(backend="compiled"), CPU)


def test_a_compiler_that_fails_is_quoted(failing_compiler: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="what is -std"):
        build_library(None, compiler=failing_compiler, cache=tmp_path)
    assert not list(tmp_path.glob("*.so"))


def test_a_library_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def compile_nothing(command: list[str]) -> None:
        commands.append(command)
        Path(command[-1]).write_bytes(b"")

    monkeypatch.setattr(native_build, "_run", compile_nothing)
    first = build_library(None, cache=tmp_path)
    assert build_library(None, cache=tmp_path) == first
    assert len(commands) == 2  # compile, link
    other = build_library(Path("/somewhere/libgomp.so.1"), cache=tmp_path)
    assert other != first
    assert "/somewhere/libgomp.so.1" in commands[-1]
    assert list(tmp_path.iterdir()) == [first, other] or list(tmp_path.iterdir()) == [other, first]


def test_the_chosen_compiler_wins(failing_compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", failing_compiler)
    assert find_compiler() == failing_compiler
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="no-such-compiler"):
        find_compiler()


def test_the_cache_is_where_the_user_wants_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "chosen"))
    assert cache_directory() == tmp_path / "chosen"
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "pando"


def test_operators_use_the_openmp_runtime_that_torch_has_loaded(library: object) -> None:
    assert library is not None
    runtime = find_openmp()
    if runtime is None:
        pytest.skip("the runtime cannot be told on this system")
    maps = Path("/proc/self/maps").read_text()
    loaded = {line.split()[-1] for line in maps.splitlines() if "libgomp" in line or "libomp" in line}
    assert loaded == {str(runtime)}
