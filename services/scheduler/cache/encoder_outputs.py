"""Outputs of the vision encoder that workers keep: embeddings of images, by the view that sent them."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from common.types import EncoderOutputId

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.types import RowImage, Subject
    from services.scheduler.cache.types import Scope


# Every output counts for at least as many embeddings, so that there are not many of them.
LEAST_EMBEDDINGS = 16


class OutputState(Enum):
    """PROMISED: a row is to encode the image. READY: the workers keep its embeddings. DROPPED: nothing is kept."""

    PROMISED = "promised"
    READY = "ready"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class OutputKey:
    """The identity of an image: the view that sent it, its pixels, and the shape of its embeddings."""

    scope: Scope
    digest: bytes
    grid: tuple[int, ...]
    length: int

    @property
    def cost(self) -> int:
        """Embeddings that it counts for."""
        return max(self.length, LEAST_EMBEDDINGS)

    @property
    def tenant(self) -> Scope:
        """The tenant that it counts for; empty in a cache that all share."""
        return self.scope[:1]

    @property
    def subject(self) -> Scope:
        """The subject that it counts for; empty in a cache that all share."""
        return self.scope[:2]


def output_key(scope: Scope, image: RowImage) -> OutputKey:
    """Return the identity of an image that a view sends."""
    return OutputKey(scope, image.digest, image.grid, image.length)


@dataclass(slots=True, eq=False)
class EncoderOutput:
    """The embeddings of one image, for one view. While rows use it, its room is not given to others."""

    output_id: EncoderOutputId
    key: OutputKey
    state: OutputState = OutputState.PROMISED
    users: int = 0


class EncoderOutputs:
    """Owns the decision which outputs workers keep, within a number of embeddings.

    An output is found only in the view whose row encoded it, never by its tenant or by all: whether an image needs to
    be encoded shows in the time to the first token, as a prefix hit does, and there is no evidence that counts here.
    KV of an image that users share is found before its output is needed.

    Room is taken from the tenant that would hold the most, and there from the subject that would hold the most, its
    least recently used output first; never from one that holds less than who asks for it. So a flood of images, of
    whatever names, displaces those of other tenants, and of other subjects of its tenant, only down to an equal share.
    """

    def __init__(self, capacity: int, first: int = 1) -> None:
        """Start empty, with room for `capacity` embeddings, 0 to keep none; outputs have numbers from `first` on."""
        self.capacity = capacity
        self.embeddings = 0
        self.evicted = 0
        # Least recently used first.
        self._outputs: dict[OutputKey, EncoderOutput] = {}
        self._of_tenants: Counter[Scope] = Counter()
        self._of_subjects: Counter[Scope] = Counter()
        self._dropped: list[EncoderOutputId] = []
        self._next_id = first

    def __len__(self) -> int:
        return len(self._outputs)

    def find(self, scope: Scope, image: RowImage) -> EncoderOutput | None:
        """Return the output of an image, if a row of the view has encoded it; the caller uses it until `release`."""
        output = self._outputs.get(output_key(scope, image))
        if output is None or output.state is not OutputState.READY:
            return None
        self._outputs[output.key] = self._outputs.pop(output.key)
        output.users += 1
        return output

    def promise(self, scope: Scope, image: RowImage) -> EncoderOutput | None:
        """Make room for the output of an image that a row will encode; the caller uses it until `release`.

        None if there is no room, or another row has promised it.
        """
        key = output_key(scope, image)
        if key in self._outputs or not self._make_room(key):
            return None
        output = self._outputs[key] = EncoderOutput(EncoderOutputId(self._next_id), key, users=1)
        self._next_id += 1
        self._count(key, key.cost)
        return output

    def share(self, output: EncoderOutput) -> EncoderOutput:
        """Use an output once more, until `release`."""
        output.users += 1
        return output

    def confirm(self, output: EncoderOutput) -> None:
        """Record that the workers have encoded a promised output."""
        if output.state is OutputState.PROMISED:
            output.state = OutputState.READY
        elif output.state is OutputState.DROPPED:
            # The workers did not know of it when it was dropped.
            self._dropped.append(output.output_id)

    def release(self, output: EncoderOutput) -> None:
        """Use an output no longer; one that is only promised will not be encoded, as far as is known."""
        output.users -= 1
        if output.users or output.state is OutputState.READY:
            return
        if output.state is OutputState.PROMISED:
            self._remove(output)
        # A plan in flight may have encoded it.
        self._dropped.append(output.output_id)

    def take_dropped(self) -> tuple[EncoderOutputId, ...]:
        """Return the outputs that the next plan has to drop, and clear them."""
        dropped, self._dropped = tuple(dict.fromkeys(self._dropped)), []
        return dropped

    @property
    def has_dropped(self) -> bool:
        """Whether the workers have to drop outputs."""
        return bool(self._dropped)

    def flush(self) -> None:
        """Drop all outputs."""
        self._drop(list(self._outputs.values()))

    def forget(self, subject: Subject) -> None:
        """Drop all outputs of a subject, and those of a cache that all share."""
        mine = (subject.tenant, subject.name)
        self._drop([output for output in self._outputs.values() if output.key.subject in (mine, ())])

    def forget_all(self) -> None:
        """Forget all outputs, as the workers have none of them. No row may use any."""
        for output in self._outputs.values():
            output.state = OutputState.DROPPED
        self._outputs.clear()
        self._of_tenants.clear()
        self._of_subjects.clear()
        self._dropped.clear()
        self.embeddings = 0

    def faults(self) -> list[str]:
        """Return inconsistencies, for tests."""
        total = sum(key.cost for key in self._outputs)
        found = [] if total == self.embeddings <= self.capacity else [f"{total} embeddings, counted {self.embeddings}"]
        owners = self._of_tenants, self._of_subjects
        if any(counts.total() != total or not all(counts.values()) for counts in owners):
            found.append("owners' embeddings are miscounted")
        return found

    def _make_room(self, key: OutputKey) -> bool:
        """Evict until an output fits; nothing is evicted for one that cannot."""
        missing = self.embeddings + key.cost - self.capacity
        victims: list[EncoderOutput] = []
        tenants, subjects = self._of_tenants.copy(), self._of_subjects.copy()
        tenants[key.tenant] += key.cost
        subjects[key.subject] += key.cost
        unused = self._unused_by_owner()
        while missing > 0:
            # Only an owner's oldest output can be next, so it suffices to look at one of each.
            oldest = [outputs[0] for outputs in unused.values()]

            def rank(entry: tuple[int, EncoderOutput]) -> tuple[int, int, int]:
                age, output = entry
                return tenants[output.key.tenant], subjects[output.key.subject], age

            found = max(
                (each for each in oldest if _may_displace(key, each[1].key, tenants, subjects)), key=rank, default=None
            )
            if found is None:
                return False
            victim = found[1]
            victims.append(victim)
            owner = victim.key.tenant, victim.key.subject
            unused[owner].popleft()
            if not unused[owner]:
                del unused[owner]
            missing -= victim.key.cost
            tenants[victim.key.tenant] -= victim.key.cost
            subjects[victim.key.subject] -= victim.key.cost
        self.evicted += len(victims)
        self._drop(victims)
        return True

    def _unused_by_owner(self) -> dict[tuple[Scope, Scope], deque[tuple[int, EncoderOutput]]]:
        """Return the ages and outputs that no row uses, by tenant and subject, least recently used first."""
        unused: dict[tuple[Scope, Scope], deque[tuple[int, EncoderOutput]]] = {}
        for position, output in enumerate(self._outputs.values()):
            if output.state is OutputState.READY and not output.users:
                owner = output.key.tenant, output.key.subject
                unused.setdefault(owner, deque()).append((-position, output))
        return unused

    def _drop(self, outputs: Iterable[EncoderOutput]) -> None:
        for output in outputs:
            was_ready = output.state is OutputState.READY
            self._remove(output)
            if was_ready:
                self._dropped.append(output.output_id)

    def _remove(self, output: EncoderOutput) -> None:
        output.state = OutputState.DROPPED
        del self._outputs[output.key]
        self._count(output.key, -output.key.cost)

    def _count(self, key: OutputKey, embeddings: int) -> None:
        self.embeddings += embeddings
        for counts, owner in ((self._of_tenants, key.tenant), (self._of_subjects, key.subject)):
            counts[owner] += embeddings
            if not counts[owner]:
                del counts[owner]


def _may_displace(new: OutputKey, old: OutputKey, tenants: Counter[Scope], subjects: Counter[Scope]) -> bool:
    """Return whether an output may give way to another one, as owners would hold so much with that."""
    if new.tenant != old.tenant:
        return tenants[old.tenant] >= tenants[new.tenant]
    return new.subject == old.subject or subjects[old.subject] >= subjects[new.subject]
