"""What images install."""

from __future__ import annotations

import pytest

from deploy.setup.requirements import requirements_of

EXTRAS = {"one": ["a>=1", "b"], "two": ["b", "c"], "both": ["pando[one,two]", "d"]}


def test_each_requirement_is_named_once() -> None:
    assert requirements_of(["base"], EXTRAS, ["one", "two"]) == ["base", "a>=1", "b", "c"]


def test_extras_of_our_own_are_taken_apart() -> None:
    assert requirements_of([], EXTRAS, ["both"]) == ["a>=1", "b", "c", "d"]


def test_an_unknown_extra_is_an_error() -> None:
    with pytest.raises(KeyError):
        requirements_of([], EXTRAS, ["three"])
