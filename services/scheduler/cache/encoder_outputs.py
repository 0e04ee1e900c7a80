"""Outputs of the vision encoder that workers keep: embeddings of images, by the view that sent them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from common.types import EncoderOutputId

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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
    unused_since: int = 0
    """How many times outputs had become unused before this one did last."""


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
        self._outputs: dict[OutputKey, EncoderOutput] = {}
        # Those that are kept and that no row uses, by subject, least recently used first.
        self._unused: dict[Scope, dict[EncoderOutputId, EncoderOutput]] = {}
        self._times_unused = 0
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
        return self.share(output)

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
        if output.state is OutputState.READY and not output.users:
            self._set_used(output)
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
        if output.users:
            return
        if output.state is OutputState.READY:
            self._times_unused += 1
            output.unused_since = self._times_unused
            self._unused.setdefault(output.key.subject, {})[output.output_id] = output
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
        self._unused.clear()
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
        unused = {
            each.output_id for each in self._outputs.values() if each.state is OutputState.READY and not each.users
        }
        if unused != {number for numbers in self._unused.values() for number in numbers}:
            found.append("other outputs are unused")
        return found

    def _make_room(self, key: OutputKey) -> bool:
        """Evict until an output fits; nothing is evicted for one that cannot."""
        missing = self.embeddings + key.cost - self.capacity
        if missing <= 0:
            return True
        victims: list[EncoderOutput] = []
        tenants, subjects = self._of_tenants.copy(), self._of_subjects.copy()
        tenants[key.tenant] += key.cost
        subjects[key.subject] += key.cost
        unused = {subject: iter(outputs.values()) for subject, outputs in self._unused.items()}
        # Only a subject's oldest output can be next.
        oldest = {subject: next(outputs) for subject, outputs in unused.items()}
        while missing > 0:
            victim = _first_to_go(key, oldest, tenants, subjects)
            if victim is None:
                return False
            victims.append(victim)
            missing -= victim.key.cost
            tenants[victim.key.tenant] -= victim.key.cost
            subjects[victim.key.subject] -= victim.key.cost
            following = next(unused[victim.key.subject], None)
            if following is None:
                del oldest[victim.key.subject]
            else:
                oldest[victim.key.subject] = following
        self.evicted += len(victims)
        self._drop(victims)
        return True

    def _drop(self, outputs: Iterable[EncoderOutput]) -> None:
        for output in outputs:
            was_ready = output.state is OutputState.READY
            self._remove(output)
            if was_ready:
                self._dropped.append(output.output_id)

    def _set_used(self, output: EncoderOutput) -> None:
        """Take an output out of those that no row uses."""
        subject = output.key.subject
        del self._unused[subject][output.output_id]
        if not self._unused[subject]:
            del self._unused[subject]

    def _remove(self, output: EncoderOutput) -> None:
        if output.state is OutputState.READY and not output.users:
            self._set_used(output)
        output.state = OutputState.DROPPED
        del self._outputs[output.key]
        self._count(output.key, -output.key.cost)

    def _count(self, key: OutputKey, embeddings: int) -> None:
        self.embeddings += embeddings
        for counts, owner in ((self._of_tenants, key.tenant), (self._of_subjects, key.subject)):
            counts[owner] += embeddings
            if not counts[owner]:
                del counts[owner]


def _first_to_go(
    new: OutputKey, oldest: Mapping[Scope, EncoderOutput], tenants: Counter[Scope], subjects: Counter[Scope]
) -> EncoderOutput | None:
    """Return the output, of each subject's `oldest`, that gives way to `new` first; None: none may."""
    found, highest = None, (-1, -1, 0)
    for subject, output in oldest.items():
        key = output.key
        rank = tenants[key.tenant], subjects[subject], -output.unused_since
        if rank > highest and _may_displace(new, key, tenants, subjects):
            found, highest = output, rank
    return found


def _may_displace(new: OutputKey, old: OutputKey, tenants: Counter[Scope], subjects: Counter[Scope]) -> bool:
    """Return whether an output may give way to another one, as owners would hold so much with that."""
    if new.tenant != old.tenant:
        return tenants[old.tenant] >= tenants[new.tenant]
    return new.subject == old.subject or subjects[old.subject] >= subjects[new.subject]
