"""`pando bench trace`: writes workload M1 as a hash-id trace in the Mooncake format, for tools that replay those."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from deploy.evaluation.bench.arrivals import by_time
from deploy.evaluation.bench.report import output_console, print_failure
from deploy.evaluation.bench.serve_arguments import positive_float, positive_int
from deploy.evaluation.bench.workloads.ideal import IdealCache
from deploy.evaluation.bench.workloads.m1 import M1Shape, m1_stream
from deploy.evaluation.bench.workloads.trace import BLOCK_TOKENS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from deploy.evaluation.bench.arrivals import Arrival
    from deploy.evaluation.bench.records import Segment

# Seconds per output token in the trace, which determine the gaps between the turns of a conversation.
TOKEN_S = 0.02


class BlockNames:
    """Assigns ids to blocks: equal blocks after equal prefixes have equal ids, numbered by their first occurrence."""

    def __init__(self, block_tokens: int = BLOCK_TOKENS) -> None:
        self._block_tokens = block_tokens
        self._ids: dict[int, int] = {}

    def ids(self, segments: Iterable[Segment]) -> list[int]:
        """Return one id per block of a prompt, the last and shorter one included."""
        found: list[int] = []
        chain, pieces, room = 0, [], self._block_tokens
        for segment in segments:
            start = 0
            while start < segment.tokens:
                taken = min(segment.tokens - start, room)
                pieces.append((segment.key, start, taken))
                start += taken
                room -= taken
                if not room:
                    chain = hash((chain, tuple(pieces)))
                    found.append(self._id(chain))
                    pieces, room = [], self._block_tokens
        if pieces:
            found.append(self._id(hash((chain, tuple(pieces)))))
        return found

    def _id(self, chain: int) -> int:
        return self._ids.setdefault(chain, len(self._ids))


def trace_row(arrival: Arrival, names: BlockNames) -> dict[str, Any]:
    """Return one request as a line of a trace; `user` is our addition to the format."""
    request = arrival.request
    return {
        "timestamp": round(arrival.time_s * 1000),
        "input_length": request.input_tokens,
        "output_length": request.output_tokens,
        "hash_ids": names.ids(request.segments),
        "user": request.user,
    }


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `pando bench trace`."""
    shape = M1Shape()
    parser.add_argument("file", type=Path, help="output file for the JSON lines")
    parser.add_argument("--requests", type=positive_int, default=10_000, metavar="N", help="(%(default)s)")
    parser.add_argument("--users", type=positive_int, default=shape.users, help="(%(default)s)")
    parser.add_argument("--apps", type=positive_int, default=shape.apps, help="(%(default)s)")
    parser.add_argument("--rate", type=positive_float, default=10.0, metavar="R", help="requests/s (%(default)s)")
    parser.add_argument("--burstiness", type=positive_float, default=1.0, metavar="CV", help="(%(default)s)")
    parser.add_argument("--scale", type=positive_float, default=1.0, help="factor on lengths (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")


def run_trace(arguments: argparse.Namespace) -> int:
    """Write the trace and print the hit rates of an unlimited cache; return the exit code."""
    shape = M1Shape(users=arguments.users, apps=arguments.apps, scale=arguments.scale)
    sessions = m1_stream(shape, arguments.rate, arguments.burstiness, arguments.seed)
    names, ideal = BlockNames(), IdealCache(keeps_answers=False)
    total = own = shared_by_all = 0
    try:
        with arguments.file.open("wb") as file:
            for arrival in islice(by_time(sessions, TOKEN_S), arguments.requests):
                file.write(orjson.dumps(trace_row(arrival, names), option=orjson.OPT_APPEND_NEWLINE))
                hit = ideal.ask(arrival.request)
                total, own, shared_by_all = (
                    total + arrival.request.input_tokens,
                    own + hit.own,
                    shared_by_all + hit.shared_by_all,
                )
    except OSError as error:
        print_failure("pando bench trace", error)
        return 2
    within, across = own / total, (shared_by_all - own) / total
    line = f"{arguments.requests:,} requests, {total:,} prompt tokens; ideal hit rate {within:.1%} within users"
    output_console().print(f"{line}, {across:.1%} more across them", highlight=False)
    return 0
