"""Selects a scheduler group for each request, deterministically from names and loads.

`PrefixAware` is rendezvous hashing (Thaler and Ravishankar, 1998): each group has a score for each key, and the highest
wins, so that only the keys of a group that leaves move. The bound on its load is that of consistent hashing with
bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018).
"""

from __future__ import annotations

import hashlib
import heapq
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from common.fleet.names import PREFIX_TOKENS
from common.types import EXPECTED_OUTPUT_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from common.types import ScheduleRequest, View
    from services.tokenizer.routing.shared_prefixes import SharedPrefix

# Below this load a request stays with the group that has its prefix cached: this many requests decode together as fast
# as one. Also, reported loads are some tenths of a second old.
FREE_LOAD = 8
# Largest load of a group under `PrefixAware`, as a multiple of its share of the open requests.
LOAD_FACTOR = 1.25


@dataclass(frozen=True, slots=True)
class RoutingCandidate:
    """A group that would serve a request now, and the number of its requests.

    `free_tokens` is its room for KV, in tokens, beside what these are expected to need; None: not known.
    """

    name: str
    load: int
    free_tokens: int | None = None

    def after(self, tokens: int) -> RoutingCandidate:
        """Return the group with one more request, of `tokens` tokens."""
        left = None if self.free_tokens is None else self.free_tokens - tokens
        return RoutingCandidate(self.name, self.load + 1, left)


class RoutingPolicy(Protocol):
    """Selects one of several groups."""

    def choose(self, key: bytes, candidates: Sequence[RoutingCandidate], prefix: SharedPrefix | None = None) -> str:
        """Return the name of the group for a request; `candidates` is not empty.

        Args:
            key: The key of its view and first tokens.
            candidates: The groups that would serve it.
            prefix: The prefix that it begins with, if the fleet shares one.
        """
        ...


class RoundRobin:
    """Selects groups in turn, independently of the request."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, key: bytes, candidates: Sequence[RoutingCandidate], prefix: SharedPrefix | None = None) -> str:
        """Return the next group's name; `key` is ignored."""
        self._turn += 1
        return candidates[(self._turn - 1) % len(candidates)].name


class LeastLoaded:
    """Selects the group with the fewest open requests; among equals, the one with the highest score for the key."""

    def choose(self, key: bytes, candidates: Sequence[RoutingCandidate], prefix: SharedPrefix | None = None) -> str:
        return min(candidates, key=lambda candidate: (candidate.load, -score(key, candidate.name))).name


class PrefixAware:
    """Selects the same group for a key, unless its load is too far above that of the others."""

    def __init__(self, load_factor: float) -> None:
        """No group gets more than `load_factor` (above 1) times its share of all open requests, or FREE_LOAD."""
        self._load_factor = load_factor

    def choose(self, key: bytes, candidates: Sequence[RoutingCandidate], prefix: SharedPrefix | None = None) -> str:
        """Return the group with the highest score among those below the bound; there is always one.

        A prompt with a shared prefix goes to one of the groups with the highest scores for the prefix; among these, a
        user's prompts stay with one group. So a wider set contains a narrower one, and few users change their group.
        """
        open_requests = sum(candidate.load for candidate in candidates) + 1
        bound = max(FREE_LOAD, math.ceil(self._load_factor * open_requests / len(candidates)))
        with_room = [candidate for candidate in candidates if candidate.load < bound]
        if prefix is not None:
            name = prefix.name
            with_room = heapq.nlargest(prefix.width, with_room, lambda candidate: score(name, candidate.name))
        return max(with_room, key=lambda candidate: score(key, candidate.name)).name


def with_room(candidates: Sequence[RoutingCandidate], tokens: int) -> Sequence[RoutingCandidate]:
    """Return the groups that have room for a request of `tokens` tokens; if none has, all of them.

    A group that does not report its room counts as one that has it. A policy that chooses among the result keeps a
    request where its prefix is cached while there is room, and avoids that a full group preempts beside one with room.
    """
    roomy = [each for each in candidates if each.free_tokens is None or each.free_tokens >= tokens]
    return roomy or candidates


def expected_tokens(request: ScheduleRequest) -> int:
    """Return the tokens of KV that a request is expected to need: its prompt, and the output of all its choices."""
    options = request.options
    before = len(options.turn.conversation_ids) if options.turn is not None else 0
    if options.pooling is not None:
        return before + len(request.token_ids)
    generated = len(options.resume.token_ids) if options.resume is not None else 0
    most = options.stop.max_tokens
    # A resumed request may generate as many as at first, less what it has generated.
    left = EXPECTED_OUTPUT_TOKENS if most is None else min(EXPECTED_OUTPUT_TOKENS, max(1, most - generated))
    return before + len(request.token_ids) + options.n * (generated + left)


def score(key: bytes, name: str) -> int:
    """Return the score of a group for `key`: uniform over 64 bits, independent of all other groups."""
    return int.from_bytes(hashlib.blake2b(name.encode(), key=key, digest_size=8).digest(), "big")


def affinity_key(request: ScheduleRequest) -> bytes:
    """Return the key of a request, 32 bytes: its view, then its routing key or else its first `PREFIX_TOKENS` tokens.

    The view comes first and with its length, so that requests of different views never share a key: the choice of a
    user's group depends on that user's own requests only.
    """
    digest = _scoped(request.view)
    if request.options.adapter:
        digest.update(b"adapter" + request.options.adapter.encode() + b"\0")
    if request.routing_key is not None:
        digest.update(b"key" + request.routing_key.encode())
        return digest.digest()
    digest.update(b"ids" + np.ascontiguousarray(request.token_ids[:PREFIX_TOKENS], dtype="<u4").tobytes())
    return digest.digest()


def session_key(view: View, session: str) -> bytes:
    """Return the key of all requests of a session, 32 bytes."""
    digest = _scoped(view)
    digest.update(session.encode())
    return digest.digest()


def favourite(key: bytes, names: Iterable[str]) -> str:
    """Return the name with the highest score for `key`; `names` is not empty."""
    return max(names, key=lambda name: score(key, name))


def _scoped(view: View) -> hashlib.blake2b:
    digest = hashlib.blake2b(digest_size=32)
    for part in (view.tenant, view.subject.name, view.salt):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(4, "big") + encoded)
    return digest


def make_policy(name: str, load_factor: float = LOAD_FACTOR) -> RoutingPolicy:
    """Return the policy with this name in the settings."""
    match name:
        case "round_robin":
            return RoundRobin()
        case "least_loaded":
            return LeastLoaded()
        case _:
            return PrefixAware(load_factor)
