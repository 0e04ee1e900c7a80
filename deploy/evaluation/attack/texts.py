"""What victims ask and attackers guess: private documents, and templates with a secret in a slot."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.evaluation.bench.records import Segment

QUESTION_TOKENS = 8


@dataclass(frozen=True, slots=True)
class ProbeTexts:
    """Prompts of equal length: `tokens` that somebody may hold, then a question of the asker's own.

    Only whole pages match, so a slot is a page: the least that can be guessed at once.
    """

    page_tokens: int = 16
    tokens: int = 64

    def document(self, name: str) -> tuple[Segment, ...]:
        """Return a private document, like no other from its first token on."""
        return (Segment(f"document/{name}", self.tokens),)

    def filled(self, template: str, secret: str, tokens: int | None = None) -> tuple[Segment, ...]:
        """Return a template that everybody knows, filled with a secret: only the slot's page is unknown."""
        rest = (tokens or self.tokens) - self.head_tokens - self.page_tokens
        return (*self.head(template), Segment(f"slot/{secret}", self.page_tokens), Segment(f"rest/{template}", rest))

    def head(self, template: str) -> tuple[Segment, ...]:
        """Return a template up to its slot."""
        return (Segment(f"head/{template}", self.head_tokens),)

    @property
    def head_tokens(self) -> int:
        """Length of a template up to its slot: whole pages."""
        return max(self.tokens // 2 // self.page_tokens, 1) * self.page_tokens


def with_question(text: tuple[Segment, ...], name: str) -> tuple[Segment, ...]:
    """Return a text with a question that only `name` asks, as no prompt is found in a cache to its last token."""
    return (*text, Segment(f"question/{name}", QUESTION_TOKENS))
