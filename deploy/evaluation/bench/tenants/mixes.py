"""Loads of several users with common prompts, scaled to a small model on a CPU, in two phases per round."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from deploy.evaluation.bench.arrivals import gamma_arrivals
from deploy.evaluation.bench.workloads.ideal import PAGE_TOKENS
from deploy.evaluation.bench.workloads.m1 import M1Shape, m1_sessions
from deploy.evaluation.bench.workloads.shared_prefix import SharedPrefixShape, shared_prefix_sessions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deploy.evaluation.bench.records import BenchRequest, Segment, WorkloadSession

# Keys of segments that many users share: equal in both phases of a round, and new in each round.
COMMON_KEYS = ("system/", "template/", "secret/")


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
