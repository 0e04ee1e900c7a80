"""The flags of `pando bench serve`, and the options and sessions built from them."""

from __future__ import annotations

import argparse
import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from deploy.evaluation.bench.arrivals import gamma_arrivals
from deploy.evaluation.bench.measure import TargetOptions
from deploy.evaluation.bench.prompts import DEFAULT_VOCABULARY
from deploy.evaluation.bench.workloads.m1 import M1Shape, m1_sessions
from deploy.evaluation.bench.workloads.random_text import random_sessions
from deploy.evaluation.bench.workloads.shared_prefix import SharedPrefixShape, shared_prefix_sessions
from deploy.evaluation.bench.workloads.sharegpt import ShareGptOptions, sharegpt_sessions
from deploy.evaluation.bench.workloads.trace import BLOCK_TOKENS, TraceOptions, trace_sessions
from deploy.evaluation.bench.workloads.w1 import w1_sessions

if TYPE_CHECKING:
    from collections.abc import Callable

    from deploy.evaluation.bench.records import WorkloadSession

DEFAULT_URL = "http://127.0.0.1:8000"
USER_FIELDS = ("user", "user_id", "safety_identifier", "cache_salt", "none")


def json_object(text: str) -> dict[str, Any]:
    """Parse a flag's value that is a JSON object."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def positive_int(text: str) -> int:
    """Parse a flag's value that is a positive integer."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def positive_float(text: str) -> float:
    """Parse a flag's value that is a positive number."""
    value = float(text)
    if value <= 0:
        raise argparse.ArgumentTypeError("must be positive")
    return value


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the form of requests to a server."""
    group = parser.add_argument_group("server")
    group.add_argument("--model", help="model name; default: the first in /v1/models")
    group.add_argument("--api-key", help="sent as bearer token; never written to results")
    group.add_argument("--prompt-form", choices=("auto", "ids", "text"), default="auto", help="auto: ids if accepted")
    group.add_argument(
        "--vocabulary", type=positive_int, default=DEFAULT_VOCABULARY, help="upper bound of random ids (%(default)s)"
    )
    group.add_argument("--timeout", type=positive_float, default=600.0, metavar="S", help="per request (%(default)s)")
    group.add_argument(
        "--seed",
        type=int,
        default=secrets.randbelow(1 << 31),
        help="of lengths, contents and arrivals; default: random, so that no server has cached the last run",
    )


def add_result_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the results."""
    group = parser.add_argument_group("results")
    group.add_argument("--json", type=Path, metavar="FILE", help="write results into the list in FILE")
    group.add_argument("--label", help="the measured server, if it is not this repository's")
    group.add_argument(
        "--tp", type=positive_int, default=1, help="tensor-parallel ranks, for the results (%(default)s)"
    )


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all flags of `pando bench serve`."""
    parser.add_argument("--url", default=DEFAULT_URL, help="any OpenAI-compatible server (%(default)s)")
    add_target_arguments(parser)
    asking = parser.add_argument_group("requests")
    asking.add_argument("--endpoint", choices=("completions", "chat"), help="completions; chat for sharegpt")
    asking.add_argument("--temperature", type=float, default=0.0, help="(%(default)s)")
    asking.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="generate the full length; --no-ignore-eos for servers that do not support the field",
    )
    asking.add_argument("--user-field", choices=USER_FIELDS, default="user", help="field for the user (%(default)s)")
    asking.add_argument("--extra-body", type=json_object, default={}, metavar="JSON", help="added to each request")
    _add_loop_arguments(parser)
    _add_workload_arguments(parser)
    add_result_arguments(parser)


def _add_loop_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("loop")
    loop = group.add_mutually_exclusive_group()
    loop.add_argument("--concurrency", type=positive_int, metavar="N", help="closed loop: N at a time (default, 8)")
    loop.add_argument("--rate", type=positive_float, metavar="R", help="open loop: R arrivals per second")
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="CV",
        help="coefficient of variation of the gaps: 1: Poisson, more: bursts, 0: constant (%(default)s)",
    )
    group.add_argument("--warmup", type=int, default=2, metavar="N", help="warm-up requests (%(default)s)")


def _add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument("--workload", choices=tuple(WORKLOADS), default="random", help="(%(default)s)")
    group.add_argument("--requests", type=positive_int, metavar="N", help="number; default: 64, or all of a workload")
    group.add_argument("--input-tokens", type=positive_int, default=256, help="random (%(default)s)")
    group.add_argument("--output-tokens", type=positive_int, help="default: 64, or as in the workload")
    group.add_argument("--length-spread", type=float, default=0.0, help="random: lengths ± this share (%(default)s)")
    shape = SharedPrefixShape()
    group.add_argument("--apps", type=positive_int, default=shape.apps, help="shared-prefix, m1 (%(default)s)")
    group.add_argument("--users", type=positive_int, default=shape.users, help="shared-prefix, m1 (%(default)s)")
    group.add_argument("--requests-per-user", type=positive_int, default=shape.requests_per_user, help="(%(default)s)")
    group.add_argument("--system-tokens", type=positive_int, default=shape.system_tokens, help="(%(default)s)")
    group.add_argument("--question-tokens", type=positive_int, default=shape.question_tokens, help="(%(default)s)")
    group.add_argument("--think-s", type=float, default=M1Shape().think_s, help="m1: median pause (%(default)s)")
    group.add_argument("--file", "--trace", type=Path, help="sharegpt: JSON; trace: JSON lines in the Mooncake format")
    group.add_argument("--turns", type=positive_int, default=1, help="sharegpt: user turns per session (%(default)s)")
    group.add_argument("--max-input-tokens", type=positive_int, default=1024, help="sharegpt (%(default)s)")
    group.add_argument("--trace-speed", type=positive_float, default=1.0, help="2 is twice as fast (%(default)s)")
    group.add_argument(
        "--scale", type=positive_float, default=1.0, help="factor on lengths, except for random (%(default)s)"
    )
    group.add_argument("--block-tokens", type=positive_int, default=BLOCK_TOKENS, help="trace (%(default)s)")


def target_options(arguments: argparse.Namespace) -> TargetOptions:
    """Return the server's address and the form of requests."""
    endpoint = arguments.endpoint or ("chat" if arguments.workload == "sharegpt" else "completions")
    return TargetOptions(
        url=arguments.url,
        model=arguments.model,
        api_key=arguments.api_key,
        endpoint=endpoint,
        prompt_form=arguments.prompt_form,
        vocabulary=arguments.vocabulary,
        temperature=arguments.temperature,
        ignore_eos=arguments.ignore_eos,
        user_field=None if arguments.user_field == "none" else arguments.user_field,
        extra_body=arguments.extra_body,
        timeout_s=arguments.timeout,
        seed=arguments.seed,
    )


def build_sessions(arguments: argparse.Namespace) -> list[WorkloadSession]:
    """Return the workload's sessions, with arrival times if the loop is open.

    Raises:
        ValueError: flags are inconsistent, or a file is not of the workload's format.
        OSError: a file cannot be read.
    """
    sessions = WORKLOADS[arguments.workload](arguments)
    if arguments.rate is not None:
        times = gamma_arrivals(len(sessions), arguments.rate, arguments.burstiness, arguments.seed)
        return [replace(session, arrival_s=time) for session, time in zip(sessions, times, strict=True)]
    return sessions


def is_open_loop(arguments: argparse.Namespace) -> bool:
    """Whether sessions have arrival times: from a rate, or from the trace."""
    return arguments.rate is not None or (arguments.workload == "trace" and arguments.concurrency is None)


def _random(arguments: argparse.Namespace) -> list[WorkloadSession]:
    return random_sessions(
        arguments.requests or 64,
        arguments.input_tokens,
        arguments.output_tokens or 64,
        length_spread=arguments.length_spread,
        seed=arguments.seed,
    )


def _shared_prefix(arguments: argparse.Namespace) -> list[WorkloadSession]:
    shape = SharedPrefixShape(
        arguments.apps,
        arguments.users,
        arguments.requests_per_user,
        arguments.system_tokens,
        arguments.question_tokens,
        arguments.output_tokens or SharedPrefixShape().output_tokens,
    ).scaled(arguments.scale)
    return shared_prefix_sessions(shape, arguments.seed)[: arguments.requests]


def _m1(arguments: argparse.Namespace) -> list[WorkloadSession]:
    shape = M1Shape(users=arguments.users, apps=arguments.apps, think_s=arguments.think_s, scale=arguments.scale)
    return m1_sessions(shape, arguments.requests or 64, seed=arguments.seed)


def _sharegpt(arguments: argparse.Namespace) -> list[WorkloadSession]:
    options = ShareGptOptions(
        count=arguments.requests or 64,
        turns=arguments.turns,
        output_tokens=arguments.output_tokens,
        max_input_tokens=arguments.max_input_tokens,
    )
    return sharegpt_sessions(_file(arguments), options, arguments.seed)


def _trace(arguments: argparse.Namespace) -> list[WorkloadSession]:
    options = TraceOptions(
        count=arguments.requests,
        speed=arguments.trace_speed,
        scale=arguments.scale,
        block_tokens=arguments.block_tokens,
    )
    return trace_sessions(_file(arguments), options)


def _w1(arguments: argparse.Namespace) -> list[WorkloadSession]:
    sessions = w1_sessions(scale=arguments.scale)
    return sessions[: arguments.requests]


def _file(arguments: argparse.Namespace) -> Path:
    if arguments.file is None:
        raise ValueError(f"workload {arguments.workload} needs --file")
    path: Path = arguments.file
    return path


# Another workload needs a module and one line here.
WORKLOADS: dict[str, Callable[[argparse.Namespace], list[WorkloadSession]]] = {
    "random": _random,
    "shared-prefix": _shared_prefix,
    "s1": _shared_prefix,
    "sharegpt": _sharegpt,
    "trace": _trace,
    "w1": _w1,
    "m1": _m1,
}
