"""A worker without XGrammar serves everything but grammars, and names the package."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from common.errors import InvalidRequestError
from common.grammars import Grammar, GrammarKind
from services.worker.grammars.process import LIBRARY, check_installed

GRAMMAR = Grammar(GrammarKind.REGEX, "[0-9]{3}", "regex")


def test_a_missing_library_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(InvalidRequestError, match="pip install --no-deps xgrammar") as refused:
        check_installed(GRAMMAR)
    assert refused.value.param == "regex"


def test_the_library_is_the_one_that_is_locked_and_here() -> None:
    locked = Path(__file__).parents[4] / "deploy" / "locks" / "grammars.txt"
    assert re.search(rf"^{LIBRARY}==", locked.read_text(), flags=re.MULTILINE)
    check_installed(GRAMMAR)
