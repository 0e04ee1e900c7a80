"""References to models on a hub: `organisation/repository[@revision][:quantization]`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

# The hub's rule for names; a name that ends in .gguf is the path of a file.
_PART: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_-])?"
_REFERENCE: Final = re.compile(
    rf"(?P<repository>{_PART}/{_PART})(?:@(?P<revision>[^@:\s]+))?(?::(?P<quantization>[A-Za-z0-9_.-]+))?"
)
DEFAULT_REVISION: Final = "main"


@dataclass(frozen=True, slots=True)
class HubReference:
    """A model on a hub: a revision of a repository, and the quantization of one of its GGUF files."""

    repository: str
    revision: str = DEFAULT_REVISION
    quantization: str | None = None

    def __str__(self) -> str:
        revision = "" if self.revision == DEFAULT_REVISION else f"@{self.revision}"
        return f"{self.repository}{revision}{f':{self.quantization}' if self.quantization else ''}"

    def at(self, commit: str) -> HubReference:
        """Return the same model at a commit."""
        return replace(self, revision=commit)


def parse_hub_reference(reference: str) -> HubReference | None:
    """Return the parts of a reference to a model on a hub; None if it is written as a path or a bundled name.

    Whether a file or directory of that name exists is not considered.
    """
    match = _REFERENCE.fullmatch(reference)
    if match is None or match["repository"].lower().endswith(".gguf"):
        return None
    return HubReference(match["repository"], match["revision"] or DEFAULT_REVISION, match["quantization"])


def default_name(reference: str) -> str:
    """Return the name under which a model is served by default: of a repository its name, of a path its last part."""
    hub = parse_hub_reference(reference)
    return Path(reference).name if hub is None or Path(reference).exists() else hub.repository
