"""The one place that imports `transformers`, and only when a model needs it."""

from __future__ import annotations

import importlib.util
from typing import Any

from common.errors import ConfigurationError


def import_transformers(family: str) -> Any:  # the library is not typed
    """Return the library, which runs decoders that this engine has no implementation of.

    Raises:
        ConfigurationError: it is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ConfigurationError(
            f"model family {family!r} is not one of Pando's own; it runs through transformers, which is not installed: "
            "pip install '.[transformers]' in Pando's repository"
        )
    import transformers

    # A worker's output is a log.
    transformers.utils.logging.disable_progress_bar()
    return transformers
