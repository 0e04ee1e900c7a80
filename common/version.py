"""The version of Pando that runs here. It is written in `pyproject.toml`; a test compares every copy with that."""

from __future__ import annotations

import os
from importlib import metadata

# Set in images, which copy the sources and install no package.
VERSION_VARIABLE = "PANDO_VERSION"


def version() -> str:
    """Return the version of the installed package, else that of the image, else "unknown"."""
    try:
        return metadata.version("pando")
    except metadata.PackageNotFoundError:
        return os.environ.get(VERSION_VARIABLE, "unknown")
