"""The version of the running Pando. Its source is `pyproject.toml`; a test compares every copy with it."""

from __future__ import annotations

import os
from importlib import metadata

# Set in container images, which copy the sources and do not install the package.
VERSION_VARIABLE = "PANDO_VERSION"


def version() -> str:
    """Return the version of the installed package, otherwise that of the container image, otherwise "unknown"."""
    try:
        return metadata.version("pando")
    except metadata.PackageNotFoundError:
        return os.environ.get(VERSION_VARIABLE, "unknown")
