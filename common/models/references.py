"""References to models: `organisation/repository[@revision][:quantization]` on a hub, `s3://` and `gs://` addresses."""

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
_OBJECTS: Final = re.compile(
    r"(?P<uri>(?:s3|gs)://[^/\s:]+(?:/[^/\s:]+)+)/?(?::(?P<quantization>[A-Za-z0-9_.-]+))?", re.IGNORECASE
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


@dataclass(frozen=True, slots=True)
class ObjectReference:
    """A model in an object store: the prefix of its objects or a GGUF file, and a quantization of its GGUF files."""

    uri: str
    quantization: str | None = None

    def __str__(self) -> str:
        return f"{self.uri}{f':{self.quantization}' if self.quantization else ''}"

    @property
    def name(self) -> str:
        """The last part of its address."""
        return self.uri.rpartition("/")[2]


def is_object_address(reference: str) -> bool:
    """Whether a reference is written as an address in an object store, correct or not."""
    return reference.lower().startswith(("s3://", "gs://"))


def parse_object_reference(reference: str) -> ObjectReference | None:
    """Return the parts of a reference to a model in an object store; None if it is not written as one."""
    match = _OBJECTS.fullmatch(reference)
    return None if match is None else ObjectReference(match["uri"], match["quantization"])


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
    if (stored := parse_object_reference(reference)) is not None:
        return stored.name
    hub = parse_hub_reference(reference)
    return Path(reference).name if hub is None or Path(reference).exists() else hub.repository
