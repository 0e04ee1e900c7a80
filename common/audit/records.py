"""The form of records: one line of JSON that ends with its own hash, and holds the hash of the record before it."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Hash in the first record of a chain, in place of an earlier record's.
NO_HASH = "0" * 64
REPAIRED = "audit.repaired"
# The end of a line: the SHA-256 of all bytes before it.
_END = re.compile(rb',"hash":"([0-9a-f]{64})"\}\Z')


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """A record as it stands in a file; `fields` are all of them, without the hash."""

    sequence: int
    previous: str
    hash: str
    fields: Mapping[str, Any]  # JSON


@dataclass(frozen=True, slots=True)
class Torn:
    """Bytes between two records, or after the last one, that are no record."""

    content: bytes

    def described(self) -> dict[str, object]:
        """Return the facts about these bytes for the record that follows a repair."""
        return {"torn_bytes": len(self.content), "torn_sha256": hashlib.sha256(self.content).hexdigest()}


def encode_record(sequence: int, fields: Mapping[str, object], previous: str) -> tuple[bytes, str]:
    """Return the line of a record, with its newline, and its hash."""
    body = json.dumps({"sequence": sequence, **fields, "previous": previous}, separators=(",", ":")).encode()[:-1]
    digest = hashlib.sha256(body).hexdigest()
    return body + b',"hash":"' + digest.encode() + b'"}\n', digest


def decode_record(line: bytes) -> AuditRecord | None:
    """Return the record of a line without its newline; None if it is none, or not the one that was written."""
    end = _END.search(line)
    if end is None:
        return None
    body, digest = line[: end.start()], end[1].decode()
    if hashlib.sha256(body).hexdigest() != digest:
        return None
    try:
        fields = json.loads(body + b"}")
        return AuditRecord(int(fields["sequence"]), str(fields["previous"]), digest, fields)
    except (ValueError, KeyError, TypeError):
        return None


def read_records(content: bytes) -> Iterator[AuditRecord | Torn]:
    """Yield the records of a file, and the bytes between them that are none.

    The newline that a repair adds to torn bytes is not one of them.
    """
    start = torn_from = 0
    while start < len(content):
        newline = content.find(b"\n", start)
        end = len(content) if newline < 0 else newline
        record = decode_record(content[start:end]) if newline >= 0 else None
        if record is not None:
            if torn_from < start:
                yield Torn(content[torn_from : start - 1])
            yield record
            torn_from = end + 1
        start = end + 1
    if torn_from < len(content):
        yield Torn(content[torn_from:].removesuffix(b"\n"))
