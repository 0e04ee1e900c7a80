"""Times between tokens of free streams beside streams with a grammar, and beside as many more free ones.

Run as `python -m deploy.evaluation.experiments.grammar_streams DIRECTORY`, with `--set model.load_format=dummy` where
there are no weights; the directory needs a real tokenizer.json, as grammars are over its vocabulary.

Requests go to the scheduler as token ids. Streams with a grammar write a long array of objects by a JSON schema. Times
are those of the free streams while all streams run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.grammars import Grammar, GrammarKind
from common.types import CacheMode
from deploy.evaluation.bench.deployments import LaunchedDeployment, add_setting_arguments
from deploy.evaluation.bench.figures import Spread
from deploy.evaluation.bench.pipeline_client import PipelineClient, schedule_requests
from deploy.evaluation.bench.prompts import PromptMaker
from deploy.evaluation.bench.results import Provenance, ResultSheet, write_results
from deploy.evaluation.bench.workloads.random_text import random_sessions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.types import ScheduleRequest
    from deploy.evaluation.bench.pipeline_client import PipelineRecord

TIMEOUT_S = 600.0
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


def main() -> None:
    """Measure and print; write results where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory or name of the model")
    parser.add_argument("--free", type=int, default=64, help="free streams that are measured (%(default)s)")
    parser.add_argument("--beside", type=int, nargs="+", default=(1, 8, 64), help="streams beside them (1 8 64)")
    parser.add_argument("--tokens", type=int, default=400, help="output tokens of each (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--label", default="", help="of the results")
    parser.add_argument("--json", type=Path)
    add_setting_arguments(parser)
    arguments = parser.parse_args()
    settings = (f"model.reference={arguments.model}",)
    with LaunchedDeployment(arguments.config, arguments.overrides, settings) as deployment:
        figures = asyncio.run(measure(arguments, deployment))
    if arguments.json is not None:
        sheet = ResultSheet(
            "grammar-streams",
            Path(arguments.model).name,
            1,
            Provenance.collect(sys.argv[1:]),
            label=arguments.label or None,
        )
        for metric, spread in figures.items():
            sheet.add_spread(metric, spread, "ms")
        write_results(arguments.json, sheet.results)


async def measure(arguments: argparse.Namespace, deployment: LaunchedDeployment) -> dict[str, Spread]:
    """Return medians and 99th percentiles of the times between tokens, by what ran beside the streams."""
    loads = [("alone", 0, False)]
    for count in arguments.beside:
        loads += [(f"beside {count} free", count, False), (f"beside {count} with a grammar", count, True)]
    figures: dict[str, Spread] = {}
    async with PipelineClient(deployment.address_of("scheduler"), deployment.address_of("detokenizer")) as client:
        for title, count, has_grammar in loads:
            rounds = []
            # The first round warms up.
            for _ in range(arguments.repeats + 1):
                records = await client.start(requests_of(arguments, count, has_grammar=has_grammar))
                await client.finish(TIMEOUT_S)
                rounds.append(gaps_of(records, arguments.free))
            for percent in (50, 99):
                values = [float(np.percentile(gaps, percent)) * 1e3 for gaps in rounds[1:]]
                metric, spread = f"{arguments.free} free {title}, p{percent}", Spread.of(values)
                sys.stdout.write(f"{metric:45} {spread.median:8.3f} ms  ({spread.low:.3f} to {spread.high:.3f})\n")
                sys.stdout.flush()
                figures[metric] = spread
    return figures


def requests_of(arguments: argparse.Namespace, beside: int, *, has_grammar: bool) -> list[ScheduleRequest]:
    """Return the requests of a round: the free streams, then those beside them."""
    sessions = random_sessions(arguments.free + beside, PROMPT_TOKENS, arguments.tokens, name="grammar streams")
    requests = [each.requests[0] for each in sessions]
    # A grammar is compiled for each subject that uses it; those beside are one's.
    requests[arguments.free :] = [replace(each, user="beside") for each in requests[arguments.free :]]
    made = schedule_requests(requests, PromptMaker(), 1.0, CacheMode.NONE)
    if not has_grammar:
        return made
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), "response_format")
    return made[: arguments.free] + [
        replace(each, options=replace(each.options, sampling=replace(each.options.sampling, grammar=grammar)))
        for each in made[arguments.free :]
    ]


def gaps_of(records: Sequence[PipelineRecord], free: int) -> list[float]:
    """Return the seconds between arrivals of each of the first `free` records, while all run.

    Raises:
        SystemExit: a request failed or ended early.
    """
    for record in records:
        if record.failure is not None or record.tokens < 2 or not record.arrivals_s:
            raise SystemExit(f"a request failed: {record.failure or record.finish}")
    start = max(record.arrivals_s[1] for record in records)
    end = min(record.arrivals_s[-1] for record in records)
    if end <= start:
        ended = min(records, key=lambda record: record.arrivals_s[-1])
        raise SystemExit(
            f"stream {records.index(ended)} ended after {ended.tokens} tokens ({ended.finish}), before the last began"
        )
    times = [[at for at in record.arrivals_s if start <= at <= end] for record in records[:free]]
    return [later - earlier for each in times for earlier, later in pairwise(each)]


if __name__ == "__main__":
    main()
