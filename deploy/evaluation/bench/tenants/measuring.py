"""Loads of several users with common prompts, in rounds of two phases, played against one server per cache mode."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import grpc

from common.rpc.options import CHANNEL_OPTIONS
from deploy.evaluation.bench.arrivals import gamma_arrivals
from deploy.evaluation.bench.deployments import LaunchedDeployment
from deploy.evaluation.bench.figures import summarize
from deploy.evaluation.bench.measure import ServerUnderTest, TargetOptions
from deploy.evaluation.bench.prompts import PromptMaker
from deploy.evaluation.bench.target import TargetError
from deploy.evaluation.bench.workloads.ideal import PAGE_TOKENS
from deploy.evaluation.bench.workloads.m1 import M1Shape, m1_sessions
from deploy.evaluation.bench.workloads.shared_prefix import SharedPrefixShape, shared_prefix_sessions
from protos.gen.pando.v1 import scheduler_pb2, scheduler_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deploy.evaluation.bench.figures import LoadFigures
    from deploy.evaluation.bench.records import BenchRequest, LoadResult, Segment, WorkloadSession

# Keys of segments that many users share: equal in both phases of a round, and new in each round.
COMMON_KEYS = ("system/", "template/", "secret/")

MODES = ("shared", "isolated", "isolated_pinned", "user_aware")
DEVICE_PAGES = 2048
RPC_TIMEOUT_S = 10.0
# Requests per point of the throughput curve after a cold start.
CURVE_STEP = 8


@dataclass(frozen=True, slots=True)
class LoadPhase:
    """One load: `name` is cold, with new prompts, or warm, with other users of the same apps."""

    name: str
    sessions: tuple[WorkloadSession, ...]


@dataclass(frozen=True, slots=True)
class MixSize:
    """The size of one phase."""

    users: int
    apps: int
    scale: float


def s1_sessions(size: MixSize, seed: int) -> list[WorkloadSession]:
    """Return workload S1, scaled: system prompts, questions and answers in its own proportions."""
    return shared_prefix_sessions(SharedPrefixShape(apps=size.apps, users=size.users).scaled(size.scale), seed)


def m1_mix_sessions(size: MixSize, seed: int) -> list[WorkloadSession]:
    """Return workload M1, scaled and without pauses: conversations, private documents, a template with secrets.

    Documents have the lower lengths of M1: the longest ones would dominate the time on a CPU.
    """
    documents = M1Shape().document_tokens[0]
    shape = M1Shape(
        users=size.users,
        apps=size.apps,
        think_s=0,
        scale=size.scale,
        secrets=16,
        zipf=0.5,
        document_tokens=(documents, 2 * documents),
    )
    return m1_sessions(shape, 2 * size.users, seed=seed)


MIXES: dict[str, Callable[[MixSize, int], list[WorkloadSession]]] = {"s1": s1_sessions, "m1": m1_mix_sessions}


DEFAULT_SIZES = {"s1": MixSize(users=32, apps=2, scale=1 / 8), "m1": MixSize(users=32, apps=2, scale=1 / 8)}


def round_phases(mix: str, size: MixSize, number: int, seed: int) -> tuple[LoadPhase, LoadPhase]:
    """Return the phases of one round: the same work for other users, with prompts that no earlier round has used."""
    sessions = MIXES[mix](size, seed + number)

    def phase(name: str) -> LoadPhase:
        return LoadPhase(name, tuple(_rename(session, number, name) for session in sessions))

    return phase("cold"), phase("warm")


def arriving(sessions: Sequence[WorkloadSession], rate: float, seed: int) -> list[WorkloadSession]:
    """Return the sessions with Poisson arrivals of `rate` per second; equal seeds give equal times."""
    times = gamma_arrivals(len(sessions), rate, seed=seed)
    return [replace(session, arrival_s=time) for session, time in zip(sessions, times, strict=True)]


def system_prompts(sessions: Sequence[WorkloadSession], page_tokens: int = PAGE_TOKENS) -> list[Segment]:
    """Return the distinct system prompts that an operator would pin: those of at least a page."""
    segments = (session.requests[0].segments[0] for session in sessions)
    long = (segment for segment in segments if segment.role == "system" and segment.tokens >= page_tokens)
    return list({segment.key: segment for segment in long}.values())


def _rename(session: WorkloadSession, number: int, phase: str) -> WorkloadSession:
    return replace(session, requests=tuple(_rename_request(request, number, phase) for request in session.requests))


def _rename_request(request: BenchRequest, number: int, phase: str) -> BenchRequest:
    def renamed(segment: Segment) -> Segment:
        is_common = segment.key.startswith(COMMON_KEYS)
        prefix = f"{number}" if is_common else f"{number}/{phase}"
        return replace(segment, key=f"{prefix}/{segment.key}")

    segments = tuple(renamed(segment) for segment in request.segments)
    return replace(request, segments=segments, user=f"{phase}-{number}-{request.user}")


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """The figures of one phase; `curve` has the requests/s of successive groups of requests, ordered by their ends."""

    load: LoadFigures
    curve: tuple[float, ...]


@dataclass(slots=True)
class ModeRounds:
    """All rounds of one mode, by phase."""

    mode: str
    phases: dict[str, list[PhaseFigures]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RoundOptions:
    """Options of the rounds: `concurrency` sessions at a time, or `rate` new sessions per second if it is set."""

    mix: str
    size: MixSize
    rounds: int
    concurrency: int
    rate: float | None
    sharing_seconds: float
    seed: int


class ModeServer:
    """A deployment in one cache mode, with a client."""

    def __init__(self, mode: str, config: str | None, overrides: Sequence[str], options: RoundOptions) -> None:
        """Prepare the deployment; `start` connects to it."""
        self.mode = mode
        self._options = options
        self._admin_token = secrets.token_hex(16)
        sharing = f"scheduler.cache.sharing_seconds={options.sharing_seconds}"
        defaults = [sharing, f"scheduler.device_pages={DEVICE_PAGES}"]
        forced = [f"scheduler.cache.mode={mode}", f"scheduler.admin_token={self._admin_token}"]
        self.deployment = LaunchedDeployment(config, [*overrides, *forced], defaults)
        self._prompts = PromptMaker(options.seed)
        self._bench: ServerUnderTest | None = None

    async def start(self, stack: AsyncExitStack) -> None:
        """Connect to the deployment, which has been entered, and warm it up.

        Raises:
            TargetError: the deployment cannot be measured.
        """
        url = self.deployment.url
        bench = await ServerUnderTest.connect(TargetOptions(url=url, prompt_form="ids", seed=self._options.seed))
        stack.push_async_callback(bench.close)
        await bench.warm_up(4, 2, 128, 8)
        self._bench = bench

    def pin(self, prompts: Sequence[Segment]) -> None:
        """Pin prompts, as an operator does before users access an app.

        Raises:
            TargetError: the scheduler does not support pins or refuses one.
        """
        metadata = (("authorization", f"Bearer {self._admin_token}"),)
        with grpc.insecure_channel(self.deployment.address_of("scheduler"), options=CHANNEL_OPTIONS) as channel:
            stub = scheduler_pb2_grpc.SchedulerStub(channel)
            for prompt in prompts:
                ids = self._prompts.prompt((prompt,))
                assert not isinstance(ids, str), "prompts are ids here"
                request = scheduler_pb2.PinRequest(token_ids=ids.tolist())
                try:
                    answer = stub.Pin(request, timeout=RPC_TIMEOUT_S, metadata=metadata)
                except grpc.RpcError as error:
                    raise TargetError(f"{self.mode}: prompts cannot be pinned: {error}") from None
                if not answer.pinned_tokens:
                    raise TargetError(f"{self.mode}: a prompt of {prompt.tokens} tokens was not pinned")

    async def play(self, phase: LoadPhase) -> PhaseFigures:
        """Run one phase and return its figures.

        Raises:
            TargetError: a request failed.
        """
        assert self._bench is not None, "it has been started"
        if self._options.rate is None:
            result = await self._bench.closed_loop(phase.sessions, self._options.concurrency)
        else:
            result = await self._bench.open_loop(arriving(phase.sessions, self._options.rate, self._options.seed))
        for record in result.records:
            if record.error is not None:
                raise TargetError(f"{self.mode}: a request failed: {record.error}: {record.message}")
        return PhaseFigures(summarize(result), throughput_curve(result))


async def play_rounds(
    servers: Sequence[ModeServer], options: RoundOptions, report: Callable[[str], None]
) -> list[ModeRounds]:
    """Run all rounds; each measures the servers in turn, so that other load on the machine affects all equally.

    Raises:
        TargetError: see `ModeServer`.
    """
    played = [ModeRounds(server.mode) for server in servers]
    async with AsyncExitStack() as stack:
        for server in servers:
            await server.start(stack)
        for number in range(options.rounds):
            phases = round_phases(options.mix, options.size, number, options.seed)
            for server, kept in zip(servers, played, strict=True):
                if server.mode == "isolated_pinned":
                    await asyncio.to_thread(server.pin, system_prompts(phases[0].sessions))
                    await asyncio.sleep(1.5 * options.sharing_seconds)
                for phase in phases:
                    report(f"round {number + 1} of {options.rounds}: {server.mode}, {phase.name}")
                    kept.phases.setdefault(phase.name, []).append(await server.play(phase))
                    # Prompts with sufficient evidence become shared at the next boundary.
                    await asyncio.sleep(1.5 * options.sharing_seconds)
    return played


def throughput_curve(result: LoadResult, step: int = CURVE_STEP) -> tuple[float, ...]:
    """Return the requests/s of successive groups of `step` requests, ordered by their ends, without a partial group."""
    ends = sorted(record.ended_s for record in result.records)
    start = min(record.started_s for record in result.records)
    marks = [start, *ends[step - 1 :: step]]
    return tuple(step / (later - earlier) for earlier, later in pairwise(marks))
