"""Apps with one system prompt each and many users, to measure the cost of isolation between users."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from deploy.evaluation.bench.records import BenchRequest, Segment, WorkloadSession


@dataclass(frozen=True, slots=True)
class SharedPrefixShape:
    """Parameters of the workload; the defaults are workload S1 of the performance targets."""

    apps: int = 16
    users: int = 512
    requests_per_user: int = 2
    system_tokens: int = 3563
    question_tokens: int = 223
    output_tokens: int = 64

    def scaled(self, factor: float) -> SharedPrefixShape:
        """Return the shape with all lengths multiplied by `factor`, for small models."""

        def length(tokens: int) -> int:
            return max(1, round(tokens * factor))

        return replace(
            self,
            system_tokens=length(self.system_tokens),
            question_tokens=length(self.question_tokens),
            output_tokens=length(self.output_tokens),
        )


def shared_prefix_sessions(shape: SharedPrefixShape, seed: int = 0) -> list[WorkloadSession]:
    """Return all requests of all users in random order; user u uses app u mod apps."""
    if min(shape.apps, shape.users, shape.requests_per_user) < 1:
        raise ValueError("apps, users and requests per user must be at least 1")
    sessions = [
        WorkloadSession((_request(shape, user, number),))
        for user in range(shape.users)
        for number in range(shape.requests_per_user)
    ]
    random.Random(seed).shuffle(sessions)
    return sessions


def _request(shape: SharedPrefixShape, user: int, number: int) -> BenchRequest:
    system = Segment(f"system/{user % shape.apps}", shape.system_tokens, role="system")
    question = Segment(f"question/{user}/{number}", shape.question_tokens)
    return BenchRequest((system, question), shape.output_tokens, user=f"user-{user:05d}")
