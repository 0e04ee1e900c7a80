"""Detectors that operators might bring, well and badly behaved; named by dotted path in tests."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from services.scheduler.content.interface import ContentFinding, DetectorOptions

if TYPE_CHECKING:
    from collections.abc import Iterable


class WordDetector:
    """Finds one word."""

    def __init__(self, options: DetectorOptions, word: str = "purple") -> None:
        self.options = options
        self._word = word

    def find(self, text: str) -> Iterable[ContentFinding]:
        start = text.find(self._word)
        return [ContentFinding(start, "word")] if start >= 0 else []

    def refresh(self) -> str:
        return "always the same"


class RaisingDetector(WordDetector):
    def find(self, text: str) -> Iterable[ContentFinding]:
        raise ValueError(f"cannot read {text}")


class EndlessDetector(WordDetector):
    def find(self, text: str) -> Iterable[ContentFinding]:
        time.sleep(3600)
        return []


class DyingDetector(WordDetector):
    def find(self, text: str) -> Iterable[ContentFinding]:
        raise SystemExit(3)


class ChattyDetector(WordDetector):
    def find(self, text: str) -> Iterable[ContentFinding]:
        print('{"allowed": 1000000}')  # noqa: T201  (an attempt to answer in the child's place)
        return super().find(text)


class LyingDetector(WordDetector):
    """Finds things where there is no text."""

    def find(self, text: str) -> Iterable[ContentFinding]:
        return [ContentFinding(len(text) + 10, "beyond")]


def unmakeable(options: DetectorOptions) -> WordDetector:
    raise OSError("no licence")
