"""References to models: `organisation/repository[@revision][:quantization]` on a hub, `s3://` and `gs://` addresses.

The hub's oldest models have no organisation (`gpt2`); it redirects their names. The address of a model's page on the
hub is a reference, too: `https://huggingface.co/organisation/repository[/tree/revision]`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

# The hub's rule for names; one with the ending of a file is the path of a file.
_PART: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_-])?"
_REFERENCE: Final = re.compile(
    rf"(?P<repository>{_PART}(?:/{_PART})?)(?:@(?P<revision>[^@:\s]+))?(?::(?P<quantization>[A-Za-z0-9_.-]+))?"
)
_OBJECTS: Final = re.compile(
    r"(?P<uri>(?:s3|gs)://[^/\s:]+(?:/[^/\s:]+)+)/?(?::(?P<quantization>[A-Za-z0-9_.-]+))?", re.IGNORECASE
)
_FILES: Final = (".gguf", ".safetensors", ".bin", ".pth", ".pt", ".json")
# A page of all files at a revision; those of other branches than pull requests' have no slash in addresses.
_PAGE: Final = re.compile(
    rf"(?P<repository>{_PART}(?:/{_PART})?)(?:/tree/(?P<revision>refs/[^/:]+/[^/:]+|[^/:]+))?"
    r"(?::(?P<quantization>[A-Za-z0-9_.-]+))?"
)
HUB: Final = "https://huggingface.co"
_HUBS: Final = (HUB, "https://www.huggingface.co", "https://hf.co")
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


def is_web_address(reference: str) -> bool:
    """Whether a reference is written as an address of a page, of a hub or not."""
    return reference.lower().startswith(("http://", "https://"))


def parse_hub_reference(reference: str) -> HubReference | None:
    """Return the parts of a reference to a model on a hub; None if it is written as a path or another address.

    Whether a file, a directory or a bundled model of that name exists is not considered.
    """
    match = _page_of(reference) if is_web_address(reference) else _REFERENCE.fullmatch(reference)
    if match is None or match["repository"].lower().endswith(_FILES):
        return None
    return HubReference(match["repository"], match["revision"] or DEFAULT_REVISION, match["quantization"])


def _page_of(address: str) -> re.Match[str] | None:
    """Return the parts of the address of a model's page on the hub or at HF_ENDPOINT, its mirror."""
    page = urlsplit(address)._replace(query="", fragment="").geturl()
    for hub in (os.environ.get("HF_ENDPOINT", HUB).rstrip("/"), *_HUBS):
        if page.lower().startswith(f"{hub.lower()}/"):
            return _PAGE.fullmatch(unquote(page[len(hub) + 1 :].rstrip("/")))
    return None


def default_name(reference: str) -> str:
    """Return the name under which a model is served by default: of a repository its name, of a path its last part."""
    if (stored := parse_object_reference(reference)) is not None:
        return stored.name
    hub = parse_hub_reference(reference)
    return Path(reference).name if hub is None or Path(reference).exists() else hub.repository
