"""The requests of a workload and the records of their responses."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

TokenTuple = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a prompt. Equal keys give equal content for all users, which a prefix cache can share."""

    key: str
    tokens: int
    """Intended length; exact if the server accepts token ids."""
    role: str = "user"
    """system, user or assistant; only used by the chat endpoint."""
    text: str | None = None
    """Literal content instead of generated content."""
    ids: TokenTuple | None = None
    """Literal token ids instead of generated ones."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a workload."""

    segments: tuple[Segment, ...]
    output_tokens: int
    user: str | None = None
    delay_s: float = 0.0
    """Seconds between the end of the previous request of the session and this one."""
    answer: Segment | None = None
    """The answer in later prompts of the session; a server's real answer differs and is not used."""

    @property
    def input_tokens(self) -> int:
        """Intended length of the prompt."""
        return sum(segment.tokens for segment in self.segments)


@dataclass(frozen=True, slots=True)
class WorkloadSession:
    """Consecutive requests, such as the turns of a conversation; in most workloads a single one."""

    requests: tuple[BenchRequest, ...]
    arrival_s: float | None = None
    """Arrival time of the first request, in seconds after the start of the load; None in a closed loop."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """The record of one request. Times are in seconds of one monotonic clock."""

    started_s: float
    ended_s: float
    chunks_s: tuple[float, ...] = ()
    """Arrival time of each chunk with output."""
    input_tokens: int = 0
    output_tokens: int = 0
    counted_by_chunks: bool = False
    """The server sent no usage: output tokens are the number of chunks, input tokens the intended number."""
    cached_tokens: int | None = None
    """Prompt tokens from the server's cache; None if it does not report them."""
    error: str | None = None
    """Kind of failure; None if the request succeeded."""
    message: str = ""
    late_s: float = 0.0
    """Delay of its sending after its arrival time."""

    @property
    def time_to_first_s(self) -> float | None:
        """Seconds from sending to the first output; None if there was none."""
        return self.chunks_s[0] - self.started_s if self.chunks_s else None

    @property
    def duration_s(self) -> float:
        """Seconds from sending to the end of the response."""
        return self.ended_s - self.started_s

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Times between chunks; tokens of one chunk count as one."""
        return tuple(later - earlier for earlier, later in pairwise(self.chunks_s))

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Output rate after the first token; None if the output is too short."""
        if self.output_tokens < 2 or not self.chunks_s or self.chunks_s[-1] == self.chunks_s[0]:
            return None
        return (self.output_tokens - 1) / (self.chunks_s[-1] - self.chunks_s[0])


@dataclass(frozen=True, slots=True)
class LoadResult:
    """All records of one load and its duration, from its first request to its last response."""

    records: tuple[RequestRecord, ...]
    duration_s: float
