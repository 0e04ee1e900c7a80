"""Operators that were compiled ahead: the best one that the processor can run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from services.worker.engine.kernels.cpu.prebuilt import (
    DIRECTORY_VARIABLE,
    VARIANTS,
    choose,
    find_prebuilt,
    processor_flags,
)

if TYPE_CHECKING:
    from pathlib import Path

AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "sse4_2"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
BF16 = AVX512 | {"avx512_bf16"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for variant in VARIANTS:
        (tmp_path / f"operators-{variant.name}.so").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "name"),
    [(AVX2, "avx2"), (AVX512, "avx512"), (BF16, "avx512-bf16"), (BF16 | {"amx_tile", "amx_bf16"}, "amx")],
)
def test_the_best_prebuilt_library_that_the_processor_can_run_is_chosen(
    directory: Path, flags: frozenset[str], name: str
) -> None:
    chosen = choose(directory, flags)
    assert chosen is not None
    assert chosen.name == f"operators-{name}.so"


def test_an_old_processor_gets_no_prebuilt_library(directory: Path) -> None:
    assert choose(directory, AVX2 - {"fma"}) is None


def test_a_missing_prebuilt_library_is_not_chosen(directory: Path) -> None:
    (directory / "operators-avx512.so").unlink()
    chosen = choose(directory, AVX512)
    assert chosen is not None
    assert chosen.name == "operators-avx2.so"


def test_without_a_named_directory_no_prebuilt_library_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    assert find_prebuilt() is None


def test_a_named_directory_is_searched_for_prebuilt_libraries(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(directory))
    found = find_prebuilt()
    assert (found is not None) == (choose(directory, processor_flags()) is not None)
