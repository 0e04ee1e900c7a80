"""Whether this worker can compile grammars: XGrammar is in no extra, as its own dependencies are large and unused."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from common.errors import InvalidRequestError

if TYPE_CHECKING:
    from common.grammars import Grammar

LIBRARY = "xgrammar"


def check_installed(grammar: Grammar) -> None:
    """Raise InvalidRequestError, which names the package, if XGrammar is missing."""
    if importlib.util.find_spec(LIBRARY) is None:
        raise InvalidRequestError(
            f"'{grammar.param}' needs the package {LIBRARY}, which the server lacks; "
            f"its operator can run `pip install --no-deps {LIBRARY}`.",
            param=grammar.param,
        )
