"""Replay of hash-id traces in the format of the Mooncake traces, one JSON object per line.

`{"timestamp": 3052, "input_length": 6758, "output_length": 500, "hash_ids": [46, 47, …]}`: milliseconds, tokens, and
one id per block of 512 prompt tokens. Equal ids at equal positions mean equal content. An optional field `user` names
the user.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import orjson

from deploy.evaluation.bench.arrivals import scale_times
from deploy.evaluation.bench.records import BenchRequest, Segment, WorkloadSession

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Adaptation of a trace to the server under test."""

    count: int | None = None
    """Number of requests to replay, from the first one; None: all."""
    speed: float = 1.0
    """Replay speed; 2 is twice as fast."""
    scale: float = 1.0
    """Factor on lengths, including blocks, to run long-context traces on small models."""
    block_tokens: int = BLOCK_TOKENS
    user: str | None = "trace"
    """The user of requests for which the trace names none; requests of one user may share prefixes."""


def trace_sessions(path: Path, options: TraceOptions) -> list[WorkloadSession]:
    """Return the requests of the trace in `path` with their arrival times.

    Raises:
        ValueError: a line does not have this format; the message names the line.
    """
    with path.open("rb") as lines:
        return parse_trace(lines, options, str(path))


def trace_stream(path: Path, options: TraceOptions) -> Iterator[WorkloadSession]:
    """Yield the requests of a trace that is ordered by time, without loading all of it.

    Raises:
        ValueError: a line does not have this format, or is earlier than the one before it; the message names the line.
    """
    first = last = None
    with path.open("rb") as lines:
        numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
        for number, line in islice(numbered, options.count):
            row = _parse_line(line, f"{path}:{number}")
            time = row["timestamp"]
            first = time if first is None else first
            if last is not None and time < last:
                raise ValueError(f"{path}:{number}: earlier than the line before it")
            last = time
            yield WorkloadSession((_request(row, options),), arrival_s=(time - first) / 1000 / options.speed)


def parse_trace(lines: Iterable[bytes], options: TraceOptions, name: str = "trace") -> list[WorkloadSession]:
    """Return the sessions of a trace given as lines."""
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if options.count is not None and len(rows) >= options.count:
            break
        if line.strip():
            rows.append(_parse_line(line, f"{name}:{number}"))
    arrivals = scale_times((row["timestamp"] for row in rows), options.speed)
    return [
        WorkloadSession((_request(row, options),), arrival_s=arrival)
        for row, arrival in zip(rows, arrivals, strict=True)
    ]


def _parse_line(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON: {error}") from None
    numbers = ("timestamp", "input_length", "output_length")
    if not isinstance(row, dict) or not all(isinstance(row.get(key), int | float) for key in numbers):
        raise ValueError(f"{place}: timestamp, input_length and output_length must be numbers")
    if not isinstance(row.get("hash_ids"), list):
        raise ValueError(f"{place}: hash_ids must be a list")
    return row


def _request(row: dict[str, Any], options: TraceOptions) -> BenchRequest:
    block = max(1, round(options.block_tokens * options.scale))
    left = max(1, round(row["input_length"] * options.scale))
    segments: list[Segment] = []
    for hash_id in row["hash_ids"]:
        if left <= 0:
            break
        # Contents of one key are prefixes of each other for all lengths, so a shortened block still matches.
        segments.append(Segment(f"block/{hash_id}", min(block, left)))
        left -= block
    if left > 0:
        segments.append(Segment(f"tail/{row['timestamp']}/{row['input_length']}", left))
    user = row.get("user", options.user)
    output = max(1, round(row["output_length"] * options.scale))
    return BenchRequest(tuple(segments), output, user=None if user is None else str(user))
