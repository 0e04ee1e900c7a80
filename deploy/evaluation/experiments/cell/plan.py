"""The size of a simulated cell, and where its parts meet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# Of the state server's keyed names; all groups and tokenizers have the same.
SECRET = "a secret of the simulated cell, long enough"


@dataclass(frozen=True, slots=True)
class CellPlan:
    """A cell that runs `slow_motion` times slower than planned: each group's steps, and so answers and requests."""

    directory: str
    state: str
    """URL of the state server."""
    groups: int = 64
    rows: int = 256
    """Choices that each group decodes at once, over all gateways."""
    step_s: float = 256 / 10_286
    """Of 256 rows on an H200 with Llama-3.1-8B, so that it generates 10,286 tokens/s."""
    slow_motion: float = 16.0
    answer_tokens: int = 562
    prompt_words: int = 500
    gateways: int = 14
    """One is real, the others are simulated."""
    tokenizers: int = 3
    detokenizers: int = 6

    @property
    def interval_s(self) -> float:
        """Time between the steps of a group."""
        return self.step_s * self.slow_motion

    @property
    def streams(self) -> int:
        """Open answers of one gateway."""
        return round(self.groups * self.rows / self.gateways)

    @property
    def tokens_per_s(self) -> float:
        """Output of all groups at the planned speed."""
        return self.groups * self.rows / self.step_s

    @property
    def requests_per_s(self) -> float:
        """Requests of all clients at the planned speed."""
        return self.tokens_per_s / self.answer_tokens

    @property
    def started(self) -> Path:
        """A file whose existence lets the groups begin."""
        return Path(self.directory, "started")

    def group(self, number: int) -> str:
        """Return the address of a group."""
        return f"unix:{self.directory}/{number}.sock"

    def tokenizer(self, number: int) -> str:
        """Return the address of a tokenizer."""
        return f"unix:{self.directory}/tokenizer-{number}.sock"

    def detokenizer(self, number: int) -> str:
        """Return the address of a detokenizer."""
        return f"unix:{self.directory}/detokenizer-{number}.sock"

    def counts(self, gateway: int) -> Path:
        """Return the file in which a simulated gateway counts what it has received."""
        return Path(self.directory, f"gateway-{gateway}.json")


def subscriber(gateway: int) -> str:
    """Return the name by which a simulated gateway subscribes."""
    return f"simulated-{gateway}"
