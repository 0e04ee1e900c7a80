"""Times between tokens of free streams beside streams with a grammar, and beside as many more free ones.

Run as `python -m deploy.evaluation.experiments.grammar_streams DIRECTORY`, with `--set model.load_format=dummy` where
there are no weights; the directory needs a real tokenizer.json, as grammars are over its vocabulary.

Requests go to the scheduler as token ids. Streams with a grammar write a long array of objects by a JSON schema. Times
are those of the free streams while all streams run. The loads take turns: each round has every load once. Figures are
printed, and written, after each; none begins that would end after `--time-limit`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.grammars import Grammar, GrammarKind
from common.types import CacheMode
from deploy.evaluation.bench.deployments import LaunchedDeployment, LaunchError, add_setting_arguments
from deploy.evaluation.bench.partial_results import Deadline, PartialResults, report, within_time
from deploy.evaluation.bench.pipeline_client import PipelineClient, PipelineError, schedule_requests
from deploy.evaluation.bench.prompts import PromptMaker
from deploy.evaluation.bench.workloads.random_text import random_sessions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.types import ScheduleRequest
    from deploy.evaluation.bench.pipeline_client import PipelineRecord

# For stopping.
RESERVE_S = 5.0
PROMPT_TOKENS = 128
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "email": {"type": ["string", "null"]},
        "tags": {"type": "array", "items": {"enum": ["new", "regular", "former"]}},
    },
    "required": ["name", "age", "email", "tags"],
    "additionalProperties": False,
}
# More objects than a stream comes to.
SCHEMA = {"type": "array", "items": PERSON, "minItems": 200}


class StreamError(Exception):
    """A stream did not run as long as the others, so that times beside it mean nothing."""


@dataclass(frozen=True, slots=True)
class LoadBeside:
    """The streams that run beside the free ones that are measured."""

    streams: int
    has_grammar: bool

    @property
    def title(self) -> str:
        """The part of a metric's name."""
        return f"beside {self.streams} {'with a grammar' if self.has_grammar else 'free'}" if self.streams else "alone"


def main() -> int:
    """Measure and print; write results where asked; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory or name of the model")
    parser.add_argument("--free", type=int, default=64, help="free streams that are measured (%(default)s)")
    parser.add_argument("--beside", type=int, nargs="+", default=(1, 8, 64), help="streams beside them (1 8 64)")
    parser.add_argument("--tokens", type=int, default=400, help="output tokens of each (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of all loads after one to warm up (%(default)s)")
    parser.add_argument("--time-limit", type=float, default=3600.0, help="seconds for all of it (%(default)s)")
    parser.add_argument("--label", default="", help="of the results")
    parser.add_argument("--json", type=Path)
    add_setting_arguments(parser)
    arguments = parser.parse_args()
    deadline = Deadline.after(arguments.time_limit)
    settings = (f"model.reference={arguments.model}",)
    began_at = time.monotonic()
    # One event loop, as gRPC reports events to a closed one on standard error.
    with asyncio.Runner() as runner:
        deployment = LaunchedDeployment(
            arguments.config, arguments.overrides, settings, start_timeout_s=deadline.left_s
        )
        results = PartialResults("grammar-streams", deployment.model, arguments.json, label=arguments.label or None)
        try:
            with deployment:
                report(f"a deployment serves after {time.monotonic() - began_at:.1f} s")
                try:
                    runner.run(measure(arguments, deployment, deadline, results))
                except PipelineError as error:
                    raise LaunchError(f"{error}\n{deployment.last_lines()}") from error
        except (LaunchError, StreamError) as error:
            report(str(error))
            return 1
    return 0


async def measure(
    arguments: argparse.Namespace, deployment: LaunchedDeployment, deadline: Deadline, results: PartialResults
) -> None:
    """Add medians and 99th percentiles of the times between tokens, by the load beside the streams.

    Raises:
        StreamError: a request failed or ended early.
        PipelineError: a service failed, or there was not enough time.
    """
    loads = [LoadBeside(0, has_grammar=False)]
    loads += [LoadBeside(count, has_grammar) for count in arguments.beside for has_grammar in (False, True)]
    warm = set()
    async with PipelineClient(deployment.address_of("scheduler"), deployment.address_of("detokenizer")) as client:
        for load in within_time(loads * (arguments.repeats + 1), deadline, RESERVE_S):
            began_at = time.monotonic()
            records = await client.start(requests_of(arguments, load))
            await client.finish(deadline.left_s)
            require_success(records)
            if load not in warm:
                # The free streams may have ended before the grammar was compiled.
                warm.add(load)
                report(f"warm-up, {load.title}: {time.monotonic() - began_at:.1f} s")
                continue
            gaps = gaps_of(records, arguments.free)
            for percent in (50, 99):
                milliseconds = float(np.percentile(gaps, percent)) * 1e3
                results.add(f"{arguments.free} free {load.title}, p{percent}", "ms", [milliseconds])


def requests_of(arguments: argparse.Namespace, beside: LoadBeside) -> list[ScheduleRequest]:
    """Return the requests of a round: the free streams, then those beside them."""
    sessions = random_sessions(arguments.free + beside.streams, PROMPT_TOKENS, arguments.tokens, name="grammar streams")
    requests = [each.requests[0] for each in sessions]
    # A grammar is compiled for each subject that uses it; those beside are one's.
    requests[arguments.free :] = [replace(each, user="beside") for each in requests[arguments.free :]]
    made = schedule_requests(requests, PromptMaker(), 1.0, CacheMode.NONE)
    if not beside.has_grammar:
        return made
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), "response_format")
    return made[: arguments.free] + [
        replace(each, options=replace(each.options, sampling=replace(each.options.sampling, grammar=grammar)))
        for each in made[arguments.free :]
    ]


def require_success(records: Sequence[PipelineRecord]) -> None:
    """Raise an error if a request failed.

    Raises:
        StreamError: a request failed, or its tokens did not arrive one after another.
    """
    for record in records:
        if record.failure is not None or len(record.arrivals_s) < 2:
            raise StreamError(f"a request failed: {record.failure or record.finish}")


def gaps_of(records: Sequence[PipelineRecord], free: int) -> list[float]:
    """Return the seconds between arrivals of each of the first `free` records, from when all have two until one ends.

    Raises:
        StreamError: a request ended before the last began.
    """
    start = max(record.arrivals_s[1] for record in records)
    end = min(record.arrivals_s[-1] for record in records)
    if end <= start:
        ended = min(records, key=lambda record: record.arrivals_s[-1])
        raise StreamError(
            f"stream {records.index(ended)} ended after {ended.tokens} tokens ({ended.finish}), before the last began"
        )
    times = [[at for at in record.arrivals_s if start <= at <= end] for record in records[:free]]
    return [later - earlier for each in times for earlier, later in pairwise(each)]


if __name__ == "__main__":
    sys.exit(main())
