"""Checks chains of records: whether all are there, in order and unchanged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.audit.records import NO_HASH, REPAIRED, AuditRecord, Torn, read_records

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class ChainHead:
    """A record that a chain had as its last one, as logs and metrics show it; `digest` is the beginning of its hash."""

    sequence: int
    digest: str


@dataclass(slots=True)
class ChainReport:
    """The result of checking one chain; `broken` is the first thing that is wrong, None if nothing is."""

    first: int | None = None
    last: int | None = None
    hash: str = NO_HASH
    records: int = 0
    repairs: int = 0
    broken: str | None = None
    # By number, the hashes of the records that recorded heads name.
    seen: dict[int, str] = field(default_factory=dict)


def verify_chain(files: Sequence[Path], heads: Iterable[ChainHead] = ()) -> ChainReport:
    """Check the records of a chain's files, oldest first, and that it has the records that `heads` name.

    The first files may be missing, for example because they have been moved to an archive; heads of records in them are
    not compared. Torn bytes are accepted where the next record names them.

    Raises:
        OSError: a file cannot be read.
    """
    report = ChainReport()
    heads = list(heads)
    wanted = {head.sequence for head in heads}
    torn: tuple[Path, Torn] | None = None
    for path in files:
        for part in read_records(path.read_bytes()):
            if isinstance(part, Torn):
                report.broken = _about(path, torn[1], report) if torn is not None else None
                torn = path, part
            else:
                report.broken = _wrong_with(path, part, torn[1] if torn else None, report)
                torn = None
            if report.broken is not None:
                return report
            if isinstance(part, AuditRecord):
                _accept(part, report, wanted)
    if torn is not None:
        report.broken = _about(*torn, report)
    elif not report.records:
        report.broken = "there are no records"
    else:
        report.broken = _missing(heads, report)
    return report


def _accept(record: AuditRecord, report: ChainReport, wanted: set[int]) -> None:
    if report.first is None:
        report.first = record.sequence
    report.last, report.hash = record.sequence, record.hash
    report.records += 1
    report.repairs += record.fields.get("action") == REPAIRED
    if record.sequence in wanted:
        report.seen[record.sequence] = record.hash


def _wrong_with(path: Path, record: AuditRecord, torn: Torn | None, report: ChainReport) -> str | None:
    if report.last is None:
        if torn is None and (record.sequence == 1) != (record.previous == NO_HASH):
            return f"{path}: record {record.sequence} is not the first one, but names no earlier one"
        # A file is named after the number of its first record.
        expected = int(path.stem) if path.stem.isdigit() else record.sequence
        previous = record.previous
    else:
        expected, previous = report.last + 1, report.hash
    is_repair = record.fields.get("action") == REPAIRED
    if torn is not None and not (is_repair and record.fields.get("what") == torn.described()):
        return _about(path, torn, report)
    if record.sequence > expected:
        return f"{path}: record {expected} is missing; record {record.sequence} follows"
    if record.sequence < expected:
        return f"{path}: record {record.sequence} is out of order; {expected} should follow"
    if record.previous != previous:
        return f"{path}: record {record.sequence} follows another record {expected - 1} than the one that is here"
    return None


def _about(path: Path, torn: Torn, report: ChainReport) -> str:
    number = "the first record here" if report.last is None else f"record {report.last + 1}"
    return f"{path}: {number} has been changed, or was not completed ({len(torn.content)} bytes that are no record)"


def _missing(heads: Iterable[ChainHead], report: ChainReport) -> str | None:
    for head in heads:
        if report.last is not None and head.sequence > report.last:
            return f"record {report.last + 1} is missing: the chain once reached {head.sequence}, and ends here"
        found = report.seen.get(head.sequence)
        if found is not None and not found.startswith(head.digest):
            return f"record {head.sequence} is another one than once recorded: its hash is {found}"
    return None
