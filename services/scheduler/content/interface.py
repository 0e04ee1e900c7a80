"""What a content detector is. Operators name their own in `scheduler.content_detectors`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that must not become public, from character `start` of the text on."""

    start: int
    rule: str


class Detector(Protocol):
    """Looks for what must not become public. It runs in a process of its own, which a deadline ends.

    It can only say no: nothing becomes public because a detector is pleased. Whatever it raises means no, too. A
    detector is named as `package.module:factory`, or by an entry point of the group `pando.content_detectors`; the
    factory takes a `DetectorOptions`.
    """

    def find(self, text: str) -> Iterable[Finding]:
        """Return what is found, in any order. `text` begins where the prompt does, but may end in the middle of it."""

    def refresh(self) -> str:
        """Take over rules that have changed; return what stands for those in effect, equal as long as they are.

        Raises:
            RulesError: the new rules are unusable; the old ones stay in effect, if there are any.
        """


@dataclass(frozen=True, slots=True)
class DetectorOptions:
    """What a detector is made with: the path of `scheduler.content_rules`, or None for its own rules."""

    rules: str | None = None


class RulesError(Exception):
    """A detector's rules cannot be used; the message says why."""
