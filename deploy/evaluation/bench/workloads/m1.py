"""Workload M1: conversations of many users with many apps, with private documents and secrets in a template.

The users' request rates follow a Zipf distribution. Each user has a few apps; each app has a system prompt that all its
users share. A session is a conversation with one app. Some sessions begin with a private document, which later sessions
may use again; some are a public template with one of a few secrets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from deploy.evaluation.bench.records import BenchRequest, Segment, WorkloadSession

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

BLOCK = 4096  # sessions generated at a time


@dataclass(frozen=True, slots=True)
class M1Shape:
    """Parameters of M1. Lengths are in tokens, those of log-normal distributions are medians; `scale` multiplies all.

    The workload's specification does not define the spread of lengths (`sigma`, of their logarithms), the shares of
    sessions with a document or a template, and the template's length; these are our choice.
    """

    users: int = 10_000
    apps: int = 100
    zipf: float = 1.0
    apps_per_user: int = 3
    """Upper bound; the lower bound is 1."""
    system_tokens: float = 1500
    turns: float = 1.7
    """Mean of a geometric distribution."""
    turn_tokens: float = 120
    output_tokens: float = 250
    longest_output: int = 1200
    think_s: float = 120
    sigma: float = 0.7
    document_share: float = 0.1
    document_tokens: tuple[int, int] = (4_000, 30_000)
    asked_again: float = 0.3
    secret_share: float = 0.02
    secrets: int = 1000
    template_tokens: int = 240
    secret_tokens: int = 16
    scale: float = 1.0

    def __post_init__(self) -> None:
        """Check the parameters.

        Raises:
            ValueError: a value is out of range.
        """
        if min(self.users, self.apps, self.apps_per_user, self.secrets) < 1 or self.turns < 1 or self.scale <= 0:
            raise ValueError("M1 needs at least 1 user, app, secret and turn, and a positive scale")
        if self.document_share + self.secret_share > 1:
            raise ValueError("the shares of documents and secrets must not exceed 1 together")


def m1_sessions(
    shape: M1Shape, requests: int, rate: float = 1.0, burstiness: float = 1.0, seed: int = 0
) -> list[WorkloadSession]:
    """Return sessions with `requests` requests in total, in order of arrival, with `rate` requests per second."""
    sessions: list[WorkloadSession] = []
    left = requests
    for session in m1_stream(shape, rate, burstiness, seed):
        session = replace(session, requests=session.requests[:left])
        sessions.append(session)
        left -= len(session.requests)
        if left <= 0:
            break
    return sessions


def m1_stream(shape: M1Shape, rate: float = 1.0, burstiness: float = 1.0, seed: int = 0) -> Iterator[WorkloadSession]:
    """Yield sessions in order of arrival, without end; gaps between them are Gamma-distributed (CV `burstiness`)."""
    return _Drawer(shape, rate / shape.turns, burstiness, seed).sessions()


@dataclass(frozen=True, slots=True)
class _Block:
    """Random values for `BLOCK` sessions: arrays [BLOCK] each."""

    gaps: NDArray[np.float64]
    users: NDArray[np.int64]
    apps: NDArray[np.int64]
    kinds: NDArray[np.float64]
    documents: NDArray[np.int64]
    turns: NDArray[np.int64]


class _Drawer:
    """Generates sessions, with the state of each user's document."""

    def __init__(self, shape: M1Shape, rate: float, burstiness: float, seed: int) -> None:
        if rate <= 0 or burstiness <= 0:
            raise ValueError("rate and burstiness must be positive")
        self._shape = shape
        self._random = np.random.default_rng(seed)
        self._mean_gap_s, self._gap_shape = 1 / rate, 1 / burstiness**2
        weights = 1 / np.arange(1, shape.users + 1) ** shape.zipf
        self._reach = np.cumsum(weights / weights.sum())
        self._systems = self._lengths(shape.system_tokens, shape.apps)
        self._counts = self._random.integers(1, shape.apps_per_user + 1, shape.users)
        self._apps = self._random.integers(0, shape.apps, (shape.users, shape.apps_per_user))
        self._documents: dict[int, tuple[int, int]] = {}

    def sessions(self) -> Iterator[WorkloadSession]:
        number, now = 0, 0.0
        while True:
            block = self._block()
            for i in range(BLOCK):
                yield self._session(block, i, number, now)
                now += float(block.gaps[i])
                number += 1

    def _block(self) -> _Block:
        shape, random = self._shape, self._random
        users = np.minimum(np.searchsorted(self._reach, random.random(BLOCK)), shape.users - 1)
        low, high = shape.document_tokens
        return _Block(
            gaps=random.gamma(self._gap_shape, self._mean_gap_s / self._gap_shape, BLOCK),
            users=users,
            apps=self._apps[users, (random.random(BLOCK) * self._counts[users]).astype(np.int64)],
            kinds=random.random(BLOCK),
            documents=self._scaled(random.integers(low, high + 1, BLOCK)),
            turns=random.geometric(1 / shape.turns, BLOCK),
        )

    def _session(self, block: _Block, i: int, number: int, now: float) -> WorkloadSession:
        user, kind, shape = int(block.users[i]), float(block.kinds[i]), self._shape
        app = int(block.apps[i])
        system = Segment(f"system/{app}", int(self._systems[app]), role="system")
        if kind < shape.document_share:
            opening: tuple[Segment, ...] = (system, self._document(user, number, int(block.documents[i])))
        elif kind < shape.document_share + shape.secret_share:
            opening = self._template()
        else:
            opening = (system,)
        return WorkloadSession(
            tuple(self._turns(f"user-{user:06d}", number, opening, int(block.turns[i]))), arrival_s=now
        )

    def _document(self, user: int, number: int, tokens: int) -> Segment:
        """Return the user's last document again, or a new one."""
        if user not in self._documents or self._random.random() >= self._shape.asked_again:
            self._documents[user] = (number, tokens)
        number, tokens = self._documents[user]
        return Segment(f"document/{user}/{number}", tokens)

    def _template(self) -> tuple[Segment, ...]:
        half = max(1, round(self._shape.template_tokens * self._shape.scale / 2))
        secret = int(self._random.integers(self._shape.secrets))
        # The secret is not scaled: it must fill a page to be guessed.
        slot = Segment(f"secret/{secret}", self._shape.secret_tokens)
        return Segment("template/head", half, role="system"), slot, Segment("template/rest", half)

    def _turns(self, user: str, number: int, opening: tuple[Segment, ...], turns: int) -> Iterator[BenchRequest]:
        shape = self._shape
        questions = self._lengths(shape.turn_tokens, turns)
        outputs = np.minimum(
            self._lengths(shape.output_tokens, turns), max(1, round(shape.longest_output * shape.scale))
        )
        thoughts = shape.think_s * np.exp(self._random.normal(0, shape.sigma, turns))
        asked = opening
        for turn in range(turns):
            name = f"{number}/{turn}"
            asked = (*asked, Segment(f"turn/{name}", int(questions[turn])))
            output = int(outputs[turn])
            answer = Segment(f"answer/{name}", output, role="assistant")
            delay_s = float(thoughts[turn]) if turn else 0.0
            yield BenchRequest(asked, output, user=user, delay_s=delay_s, answer=answer)
            asked = (*asked, answer)

    def _lengths(self, median: float, count: int) -> NDArray[np.int64]:
        return self._scaled(median * np.exp(self._random.normal(0, self._shape.sigma, count)))

    def _scaled(self, lengths: NDArray[np.float64] | NDArray[np.int64]) -> NDArray[np.int64]:
        return np.maximum(np.rint(lengths * self._shape.scale), 1).astype(np.int64)
