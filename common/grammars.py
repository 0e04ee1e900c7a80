"""Rules that a whole output has to conform to, as every service carries them; only workers read the text."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

# A schema of a large API takes some tens of kilobytes.
MAX_GRAMMAR_BYTES = 128 * 1024


class GrammarKind(Enum):
    """What a grammar's text is written in; see `GrammarKind` in the contract."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class GrammarScope:
    """A view, by its parts: requests of one view share a compiled grammar, others neither use nor notice it."""

    tenant: str = ""
    # Name of the subject within the tenant.
    subject: str = ""
    salt: str = ""


NO_SCOPE = GrammarScope()


@dataclass(frozen=True, slots=True)
class Grammar:
    """Equal ones are compiled once, whatever the request field `param` that they came from, which errors name."""

    kind: GrammarKind
    text: str
    param: str = field(compare=False)
    # Set by the scheduler from the request's view.
    scope: GrammarScope = NO_SCOPE
