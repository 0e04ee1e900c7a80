"""Output for the detokenizer, collected between two pushes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from common.deltas import TokenOrigin

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as OrderedValues

    from numpy.typing import NDArray

    from common.types import Finish, TokenIds, TokenLogprob
    from services.scheduler.core.sequence import PromptPart, Sequence

OwnerT = TypeVar("OwnerT")


@dataclass(frozen=True, slots=True)
class Output:
    """One push: accepted choices, choices that got a row, token_ids[i] of choice handles[i] (int32 each), finishes.

    `origins` has a `TokenOrigin` for each token in a byte, or none if all were sampled.
    """

    opens: tuple[Sequence, ...]
    starts: tuple[Sequence, ...]
    handles: TokenIds
    token_ids: TokenIds
    logprobs: tuple[tuple[int, TokenLogprob], ...]
    finishes: tuple[tuple[int, Finish], ...]
    prompt_logprobs: tuple[PromptPart, ...] = ()
    origins: bytes = b""


def divide(output: Output, owners: Mapping[int, OwnerT], among: OrderedValues[OwnerT]) -> list[tuple[OwnerT, Output]]:
    """Return the part of `output` that belongs to each of `among`, by the `owners` of its choices' handles.

    The order stays the same. Owners without output are omitted, and the choices of others dropped.
    """
    numbers = {id(owner): number for number, owner in enumerate(among)}
    # [tokens]: the number of each token's owner, -1 for others.
    found = (numbers.get(id(owners.get(handle)), -1) for handle in output.handles.tolist())
    parts = np.fromiter(found, np.int32, len(output.handles))
    divided = []
    for number, owner in enumerate(among):
        part = _part_of(output, parts == number, owners, owner)
        if part is not None:
            divided.append((owner, part))
    return divided


def _part_of(output: Output, mask: NDArray[np.bool_], owners: Mapping[int, OwnerT], owner: OwnerT) -> Output | None:
    """Return the part of `output` with the tokens of `mask` [tokens] and the choices of `owner`."""
    places = np.cumsum(mask) - 1
    opens = tuple(sequence for sequence in output.opens if owners.get(sequence.handle) is owner)
    starts = tuple(sequence for sequence in output.starts if owners.get(sequence.handle) is owner)
    finishes = tuple((handle, finish) for handle, finish in output.finishes if owners.get(handle) is owner)
    prompt_logprobs = tuple(part for part in output.prompt_logprobs if owners.get(part.handle) is owner)
    if not (opens or starts or finishes or prompt_logprobs or mask.any()):
        return None
    logprobs = tuple((int(places[index]), logprob) for index, logprob in output.logprobs if mask[index])
    return Output(
        opens, starts, output.handles[mask], output.token_ids[mask], logprobs, finishes, prompt_logprobs,
        np.frombuffer(output.origins, np.int8)[mask].tobytes() if output.origins else b"",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class EndedChoice:
    """A choice that the detokenizer has ended: by stop text after `completion_tokens`, or as its subscriber is gone."""

    handle: int
    completion_tokens: int | None = None


@dataclass(slots=True)
class OutputBuffer:
    """Collects output in order; `take` empties it."""

    _opens: list[Sequence] = field(default_factory=list)
    _starts: list[Sequence] = field(default_factory=list)
    _handles: list[TokenIds] = field(default_factory=list)
    _token_ids: list[TokenIds] = field(default_factory=list)
    _logprobs: list[tuple[int, TokenLogprob]] = field(default_factory=list)
    _finishes: list[tuple[int, Finish]] = field(default_factory=list)
    _scores: list[PromptPart] = field(default_factory=list)
    # The first and after the last of tokens that were not sampled.
    _unsampled: list[tuple[int, int, TokenOrigin]] = field(default_factory=list)
    _tokens: int = 0

    def open(self, sequence: Sequence) -> None:
        """Announce an accepted choice; one that is computed for another group has no output."""
        if sequence.follower is None:
            self._opens.append(sequence)

    def start(self, sequence: Sequence) -> None:
        """Announce that a choice got its first row; the cached part of its prompt is known now."""
        if sequence.follower is not None:
            return
        self._starts.append(sequence)
        nothing_to_compute = sequence.scoring.begin(sequence.handle) if sequence.scoring is not None else None
        if nothing_to_compute is not None:
            self.score(nothing_to_compute)

    def score(self, part: PromptPart) -> None:
        """Add log probabilities of a choice's prompt."""
        self._scores.append(part)

    def tokens(
        self,
        handles: TokenIds,
        token_ids: TokenIds,
        logprobs: list[tuple[int, TokenLogprob]],
        origin: TokenOrigin = TokenOrigin.SAMPLED,
    ) -> None:
        """Add tokens of one forward pass, all of one origin; `logprobs` index into these arrays."""
        if origin is not TokenOrigin.SAMPLED:
            self._unsampled.append((self._tokens, self._tokens + len(token_ids), origin))
        self._logprobs.extend((self._tokens + index, logprob) for index, logprob in logprobs)
        self._handles.append(handles)
        self._token_ids.append(token_ids)
        self._tokens += len(token_ids)

    def finish(self, sequence: Sequence, finish: Finish) -> None:
        if sequence.follower is None:
            self._finishes.append((sequence.handle, finish))

    def take(self) -> Output | None:
        """Return the collected output and clear it; None if it is empty."""
        if not (self._opens or self._starts or self._tokens or self._finishes or self._scores):
            return None
        empty = np.empty(0, np.int32)
        output = Output(
            opens=tuple(self._opens),
            starts=tuple(self._starts),
            handles=np.concatenate(self._handles) if self._handles else empty,
            token_ids=np.concatenate(self._token_ids) if self._token_ids else empty,
            logprobs=tuple(self._logprobs),
            finishes=tuple(self._finishes),
            prompt_logprobs=tuple(self._scores),
            origins=self._origins(),
        )
        self._opens, self._starts, self._handles, self._token_ids = [], [], [], []
        self._logprobs, self._finishes, self._scores, self._unsampled, self._tokens = [], [], [], [], 0
        return output

    def _origins(self) -> bytes:
        if not self._unsampled:
            return b""
        origins = np.full(self._tokens, TokenOrigin.SAMPLED, np.int8)
        for start, end, origin in self._unsampled:
            origins[start:end] = origin
        return origins.tobytes()
