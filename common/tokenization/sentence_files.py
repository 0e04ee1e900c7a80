"""Reader of the sentence-transformers files in a model directory, which define its embeddings."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from common.errors import ConfigurationError
from common.types import Pooling

if TYPE_CHECKING:
    from pathlib import Path

# Supported flags of a pooling module's config.json.
_POOLINGS: Final = {
    "pooling_mode_cls_token": Pooling.FIRST,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_lasttoken": Pooling.LAST,
}
_MODULES: Final = ("Transformer", "Pooling", "Normalize")


def read_pooling(path: Path) -> Pooling | None:
    """Return the pooling of the model in directory `path`; None if the files define none.

    Raises:
        ConfigurationError: the files define modules or poolings that are not supported.
    """
    file = path / "modules.json"
    if not file.is_file():
        return None
    modules = {str(module["type"]).rpartition(".")[2]: str(module["path"]) for module in _read(file)}
    unknown = [name for name in modules if name not in _MODULES]
    if unknown:
        raise ConfigurationError(f"{file}: {', '.join(unknown)} after the model is not supported; {_MODULES} are")
    if "Pooling" not in modules:
        return None
    chosen = _read(path / modules["Pooling"] / "config.json")
    modes = [name for name, value in chosen.items() if name.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ConfigurationError(f"{file}: {', '.join(modes) or 'no pooling'} is not supported; one of these is: "
                                 f"{', '.join(_POOLINGS)}")  # fmt: skip
    return _POOLINGS[modes[0]]


def read_longest_text(path: Path) -> int | None:
    """Return the longest text, in tokens with special ones, that the model supports; None if the files set no limit."""
    file = path / "sentence_bert_config.json"
    longest = _read(file).get("max_seq_length") if file.is_file() else None
    return longest if isinstance(longest, int) else None


def _read(file: Path) -> Any:  # free JSON
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file}: {error}") from error
