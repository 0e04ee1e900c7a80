"""Runs all detectors on a prompt and determines how much of it may become public."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from services.scheduler.content.interface import DetectorOptions, RulesError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from common.types import TokenIds
    from services.scheduler.content.interface import Detector
    from services.scheduler.content.text import Transcriber

ENTRY_POINTS = "pando.content_detectors"
SHIPPED = {"patterns": "services.scheduler.content.patterns:PatternDetector"}


@dataclass(frozen=True, slots=True)
class CheckVerdict:
    """Number of leading tokens that may be public, and the rule that ended them, if one did."""

    allowed_tokens: int
    rule: str | None = None


class Examiner:
    """Gives verdicts. It raises if it cannot judge, and callers must then allow nothing."""

    def __init__(self, transcriber: Transcriber, detectors: Mapping[str, Detector]) -> None:
        """Use `detectors`, by name.

        Raises:
            RulesError: there are none, so nothing would ever be refused.
        """
        if not detectors:
            raise RulesError("no content detector is named")
        self._transcriber = transcriber
        self._detectors = detectors

    def refresh(self) -> str:
        """Let all detectors reload changed rules; return an identifier of the rules in effect.

        Raises:
            RulesError: a detector's rules are unusable.
        """
        return ",".join(f"{name}={detector.refresh()}" for name, detector in self._detectors.items())

    def examine(self, token_ids: TokenIds) -> CheckVerdict:
        """Return the verdict on a prompt, [tokens] int32.

        Raises:
            RulesError: the prompt has no text, which indicates a bug rather than a harmless prompt.
        """
        readable = self._transcriber.readable_tokens(token_ids)
        if not readable:
            if len(token_ids):
                return CheckVerdict(0, "unreadable")
            raise RulesError("there is nothing to examine")
        transcript = self._transcriber.transcribe(token_ids[:readable])
        text = transcript.text
        if not text:
            raise RulesError("the prompt has no text")
        verdict = CheckVerdict(readable, None if readable == len(token_ids) else "unreadable")
        for name, detector in self._detectors.items():
            for finding in detector.find(text):
                if not 0 <= finding.start < len(text):
                    raise RulesError(f"detector {name} found something at {finding.start} of {len(text)} characters")
                tokens = transcript.token_of(finding.start)
                if tokens < verdict.allowed_tokens:
                    verdict = CheckVerdict(tokens, finding.rule)
        return verdict


def make_detectors(names: Sequence[str], options: DetectorOptions) -> dict[str, Detector]:
    """Return the configured detectors: shipped ones, entry points, or `package.module:factory`.

    Raises:
        RulesError: a detector cannot be found or created.
    """
    installed = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
    detectors: dict[str, Detector] = {}
    for name in names:
        path = SHIPPED.get(name) or installed.get(name) or name
        module, colon, attribute = path.partition(":")
        if not colon:
            known = ", ".join(sorted({*SHIPPED, *installed}))
            raise RulesError(f"no content detector {name!r}: there are {known}, or write package.module:factory")
        try:
            factory = getattr(importlib.import_module(module), attribute)
            detectors[name] = factory(options)
        except Exception as error:
            raise RulesError(f"content detector {name!r}: {type(error).__name__}: {error}") from error
    return detectors
