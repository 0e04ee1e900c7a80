"""`pando audit`: shows the records of the audit log, and verifies that none is missing or changed."""

from __future__ import annotations

import argparse
import os
import re
import sys
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from common.audit.chain import SUFFIX, files_of
from common.audit.records import AuditRecord, read_records
from common.audit.verification import ChainHead, verify_chain
from common.errors import ConfigurationError
from common.settings import CONFIG_VARIABLE, parse_settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BROKEN = 1
UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
DURATION = re.compile(r"(\d+)([smhd])")
HEAD = re.compile(r"(\d+):([0-9a-f]{12,64})")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `pando audit`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    shown = actions.add_parser("show", help="print records, ordered by time")
    shown.add_argument("--since", type=_parse_since, metavar="TIME", help="from an ISO time on, or 30m, 12h or 7d ago")
    shown.add_argument("--action", dest="wanted", metavar="PATTERN", help="actions to show, for example cache.*")
    shown.add_argument("--json", action="store_true", help="print the records as JSON lines")
    verified = actions.add_parser("verify", help="check that no record is missing or changed; exit status 1 if one is")
    verified.add_argument(
        "--head",
        action="append",
        default=[],
        type=_parse_head,
        metavar="NUMBER:HASH",
        help="a record that the chain must have, with the beginning of its hash, as services log it (audit.head); it "
        "shows whether records were removed from the end; for a single chain, may be repeated",
    )
    for action in (shown, verified):
        action.add_argument(
            "paths",
            nargs="*",
            type=Path,
            metavar="PATH",
            help="files of one chain, directories of chains, or audit.directory itself; default: the setting's value",
        )
        action.add_argument(
            "--config", metavar="FILE", type=Path, help=f"the services' settings (or {CONFIG_VARIABLE})"
        )


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen action; return the exit status."""
    try:
        chains = _chains(arguments.paths or [_configured(arguments)])
        if arguments.action == "show":
            return _show(arguments, chains)
        return _verify(arguments.head, chains)
    except OSError as error:
        raise ConfigurationError(str(error)) from error


def _show(arguments: argparse.Namespace, chains: Sequence[Sequence[Path]]) -> int:
    records = [record for files in chains for record in _records(files)]
    records.sort(key=lambda record: str(record.fields.get("time", "")))
    for record in records:
        fields = record.fields
        if arguments.since is not None and _time(fields) < arguments.since:
            continue
        if arguments.wanted is None or fnmatchcase(str(fields.get("action", "")), arguments.wanted):
            sys.stdout.write(orjson.dumps(fields).decode() + "\n" if arguments.json else _line(fields))
    return 0


def _verify(heads: Sequence[ChainHead], chains: Sequence[Sequence[Path]]) -> int:
    if heads and len(chains) > 1:
        raise ConfigurationError("--head is about one chain: name its directory or files")
    status = 0
    for files in chains:
        report = verify_chain(files, heads)
        name = files[0].parent if files else "?"
        if report.broken is not None:
            sys.stdout.write(f"{name}: BROKEN: {report.broken}\n")
            status = BROKEN
            continue
        notes = [f"records {report.first} to {report.last} are whole and in order"]
        if report.repairs:
            notes.append(f"{report.repairs} unfinished lines are named by the record after them")
        if report.first != 1:
            notes.append("earlier records are not here")
        sys.stdout.write(f"{name}: {'; '.join(notes)}; head {report.last}:{report.hash}\n")
    return status


def _records(files: Sequence[Path]) -> Iterator[AuditRecord]:
    for path in files:
        for part in read_records(path.read_bytes()):
            if isinstance(part, AuditRecord):
                yield part


def _chains(paths: Sequence[Path]) -> list[list[Path]]:
    """Return the files of each chain: of all directories of chains in `paths`, and the files in them as one."""
    chains: list[list[Path]] = []
    files = sorted(path for path in paths if not path.is_dir())
    if files:
        chains.append(files)
    for path in (path for path in paths if path.is_dir()):
        below = [each for each in sorted(path.iterdir()) if each.is_dir() and files_of(each)]
        chains += [files_of(each) for each in below] or [files_of(path)]
    if not any(chains):
        raise ConfigurationError(f"no files *{SUFFIX} of an audit log in {', '.join(map(str, paths))}")
    return chains


def _configured(arguments: argparse.Namespace) -> Path:
    flags = ["--config", str(arguments.config)] if arguments.config else []
    directory = parse_settings(argparse.ArgumentParser(), flags, os.environ)[0].audit.directory
    if directory is None:
        raise ConfigurationError("name the files of an audit log, or set audit.directory")
    return directory


def _line(fields: Any) -> str:  # Any: JSON
    actor = fields.get("actor", {})
    who = actor.get("credential") or actor.get("subject") or actor.get("system") or actor.get("peer") or "-"
    if "tenant" in actor:
        who = f"{actor['tenant']}/{who}"
    what = " ".join(f"{name}={orjson.dumps(value).decode()}" for name, value in fields.get("what", {}).items())
    began = f" (of {fields['began']})" if "began" in fields else ""
    head = f"{fields.get('time', '-')} {fields.get('service', '-')} {fields['sequence']}"
    return f"{head} {fields.get('action', '-')} {fields.get('outcome', '-')}{began} by {who} {what}".rstrip() + "\n"


def _time(fields: Any) -> datetime:  # Any: JSON
    return datetime.fromisoformat(str(fields.get("time", "1970-01-01T00:00:00+00:00")))


def _parse_since(text: str) -> datetime:
    duration = DURATION.fullmatch(text)
    if duration is not None:
        return datetime.now(UTC) - timedelta(**{UNITS[duration[2]]: int(duration[1])})
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither an ISO time nor a duration such as 12h") from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _parse_head(text: str) -> ChainHead:
    head = HEAD.fullmatch(text)
    if head is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number and at least 12 digits of a hash: 17:0123456789ab")
    return ChainHead(int(head[1]), head[2])
