"""Which version this is: what is installed, or what an image that installs nothing says it was made of."""

from __future__ import annotations

import os
from importlib import metadata

VERSION_VARIABLE = "PANDO_VERSION"


def version() -> str:
    """Return the version, "unknown" where nobody says."""
    try:
        return metadata.version("pando")
    except metadata.PackageNotFoundError:
        return os.environ.get(VERSION_VARIABLE, "unknown")
