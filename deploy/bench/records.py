"""What is sent and what came back, as values."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a prompt. Equal keys give equal content, whoever sends them: that is what a prefix cache can find."""

    key: str
    tokens: int
    """Length aimed at; exact where the server accepts token ids."""
    role: str = "user"
    """system, user or assistant; used by the chat endpoint only."""
    text: str | None = None
    """Literal content instead of generated one."""
    ids: TokenIds | None = None
    """Literal token ids instead of generated ones."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a workload."""

    segments: tuple[Segment, ...]
    output_tokens: int
    user: str | None = None
    delay_s: float = 0.0
    """Time to think before it, counted from the end of the request before it in the same session."""
    answer: Segment | None = None
    """What the session goes on with as the answer; a server's real one is another, and is not waited for."""

    @property
    def input_tokens(self) -> int:
        """Length of the prompt as the workload intends it."""
        return sum(segment.tokens for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Session:
    """Requests that follow one another, such as the turns of a conversation; most workloads have one each."""

    requests: tuple[BenchRequest, ...]
    arrival_s: float | None = None
    """When its first request is due, from the start of the load; absent: the load decides."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What one request did. Times are seconds of one monotonic clock."""

    started_s: float
    ended_s: float
    chunks_s: tuple[float, ...] = ()
    """Arrival of each chunk that brought output."""
    input_tokens: int = 0
    output_tokens: int = 0
    counted_by_chunks: bool = False
    """The server sent no usage, so that output tokens are chunks and input tokens the workload's intention."""
    cached_tokens: int | None = None
    """Prompt tokens from the server's cache; absent if it does not tell."""
    error: str | None = None
    """Kind of failure; absent for a request that ended as it should."""
    message: str = ""
    late_s: float = 0.0
    """How much later than due it was sent."""

    @property
    def time_to_first_s(self) -> float | None:
        """From sending to the first output; absent if there was none."""
        return self.chunks_s[0] - self.started_s if self.chunks_s else None

    @property
    def duration_s(self) -> float:
        """From sending to the end of the response."""
        return self.ended_s - self.started_s

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Times between chunks; tokens that arrived together count as one."""
        return tuple(later - earlier for earlier, later in pairwise(self.chunks_s))

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Output rate after the first token; absent if too short to tell."""
        if self.output_tokens < 2 or not self.chunks_s or self.chunks_s[-1] == self.chunks_s[0]:
            return None
        return (self.output_tokens - 1) / (self.chunks_s[-1] - self.chunks_s[0])


@dataclass(frozen=True, slots=True)
class LoadResult:
    """All records of one load and the time it took, from its first request to its last response."""

    records: tuple[RequestRecord, ...]
    duration_s: float
