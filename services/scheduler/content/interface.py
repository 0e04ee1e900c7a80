"""Interface of content detectors. Operators name their own in `scheduler.content_check.detectors`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class ContentFinding:
    """Text that must not become public, from character `start` on."""

    start: int
    rule: str


class Detector(Protocol):
    """Searches for text that must not become public. It runs in a separate process, subject to a deadline.

    A detector can only refuse: its approval alone never makes anything public, and any exception that it raises counts
    as a refusal. A detector is named as `package.module:factory`, or by an entry point of the group
    `pando.content_detectors`; the factory takes a `DetectorOptions`.
    """

    def find(self, text: str) -> Iterable[ContentFinding]:
        """Return the findings, in any order. `text` starts with the prompt, but may end in the middle of it."""

    def refresh(self) -> str:
        """Reload rules that have changed; return an identifier of those in effect, equal as long as they are.

        Raises:
            RulesError: the new rules are unusable; the old ones stay in effect, if there are any.
        """


@dataclass(frozen=True, slots=True)
class DetectorOptions:
    """Options of a detector: the path of `scheduler.content_check.rules`, or None for its own rules."""

    rules: str | None = None


class RulesError(Exception):
    """A detector's rules cannot be used, for the reason in the message."""
