"""Grammars that a whole output must match. All services pass them on; only workers parse their text."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

# A schema of a large API takes some tens of kilobytes.
MAX_GRAMMAR_BYTES = 128 * 1024


class GrammarKind(Enum):
    """The language of a grammar's text; see `GrammarKind` in protos/pando/v1/common.proto."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class GrammarScope:
    """The parts of a view: requests of one view share compiled grammars; other views neither use nor detect them."""

    tenant: str = ""
    # Name of the subject within the tenant.
    subject: str = ""
    salt: str = ""


NO_SCOPE = GrammarScope()


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar, compiled once for all equal ones.

    `param` is the request field that it came from, for error messages; it does not take part in the comparison.
    """

    kind: GrammarKind
    text: str
    param: str = field(compare=False)
    # Set by the scheduler from the request's view.
    scope: GrammarScope = NO_SCOPE
