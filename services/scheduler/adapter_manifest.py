"""The file that lists the loaded adapters, for a scheduler whose workers were restarted together with it."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING

import orjson

from common.adapters import AdapterInfo, check_adapter_name
from common.errors import InvalidRequestError
from common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_FIELDS = {"name": str, "source": str, "digest": str, "pinned": bool, "rank": int, "bytes": int}


class AdapterManifest:
    """Reads and replaces the file; without a path, it lists nothing."""

    def __init__(self, path: Path | None) -> None:
        """Keep the list at `path`, whose directory exists."""
        self._path = path
        self._log = get_logger("adapters")

    def read(self) -> list[AdapterInfo]:
        """Return the adapters that were listed last; none if the file is not there, or is damaged."""
        if self._path is None or not self._path.exists():
            return []
        try:
            return [_adapter_of(entry) for entry in orjson.loads(self._path.read_bytes())["adapters"]]
        except (OSError, ValueError, TypeError, KeyError, InvalidRequestError) as error:
            self._log.error("adapters.manifest_unreadable", path=str(self._path), reason=str(error))
            return []

    def write(self, adapters: Iterable[AdapterInfo]) -> None:
        """Replace the list, as a whole or not at all; a failure is logged, as the adapters serve nevertheless."""
        if self._path is None:
            return
        content = orjson.dumps({"adapters": [asdict(each) for each in adapters]}, option=orjson.OPT_INDENT_2)
        partial = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            partial.write_bytes(content)
            partial.replace(self._path)
        except OSError as error:
            self._log.error("adapters.manifest_not_written", path=str(self._path), reason=str(error))


def _adapter_of(entry: object) -> AdapterInfo:
    if not isinstance(entry, dict) or entry.keys() != _FIELDS.keys():
        raise ValueError(f"an adapter has the fields {', '.join(_FIELDS)}")
    for name, kind in _FIELDS.items():
        if not isinstance(entry[name], kind):
            raise ValueError(f"{name} must be of type {kind.__name__}")
    check_adapter_name(entry["name"])
    return AdapterInfo(**entry)
