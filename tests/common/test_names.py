from __future__ import annotations

import pytest

from common.errors import InvalidRequestError
from common.names import MAX_NAME_BYTES, check_name
from common.wire.identity import view_from_wire
from protos.gen.pando.v1 import common_pb2


@pytest.mark.parametrize("name", ["ann", "a b", "ann@example.com", "名前", "x" * MAX_NAME_BYTES, "😀", "a\u00a0b", "0"])
def test_names_that_people_have_are_kept_as_they_are(name: str) -> None:
    assert check_name("user", name) == name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a\nb", "control"),
        ("\x00", "control"),
        ("a\x7f", "control"),
        ("a\u2028b", "control"),
        ("\ud800", "control"),
        ("x" * (MAX_NAME_BYTES + 1), "256"),
        ("é" * 129, "256"),
        ("x" * 10_000_000, "256"),
    ],
    ids=["newline", "zero", "delete", "line separator", "surrogate", "too long", "too long in UTF-8", "10 MB"],
)
def test_other_names_are_refused_in_few_words(name: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as raised:
        check_name("user", name)
    assert raised.value.param == "user"
    assert len(raised.value.message) < 100


@pytest.mark.parametrize(
    ("tenant", "user", "param"),
    [
        ("", "ann", "subject"),
        ("acme", "", "subject"),
        ("acme", "a\nb", "subject.name"),
        ("a\x00", "ann", "subject.tenant"),
        ("acme", "x" * 10_000_000, "subject.name"),
    ],
    ids=["no tenant", "no user", "control character", "zero in the tenant", "10 MB"],
)
def test_a_subject_on_the_wire_is_held_to_the_same_rules(tenant: str, user: str, param: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        view_from_wire(common_pb2.View(subject=common_pb2.Subject(tenant=tenant, name=user)))
    assert raised.value.param == param
