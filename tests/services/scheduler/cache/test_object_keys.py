from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.cache.accounts import PUBLIC_SCOPE
from services.scheduler.cache.object_keys import object_keys, scope_tag

SECRET = b"s" * 32
CHAIN = b"c" * 16
SCOPES = st.one_of(st.just(PUBLIC_SCOPE), st.tuples(st.text(max_size=5), st.text(max_size=5)))


def key_of(
    secret: bytes = SECRET, scope: tuple[str, ...] = ("t", "u"), generation: int = 0, chain: bytes = CHAIN
) -> bytes:
    return object_keys(secret, scope, generation, [chain])[0]


def test_equal_input_gives_equal_keys_of_32_bytes() -> None:
    assert key_of() == key_of()
    assert len(key_of()) == 32


def test_each_part_changes_the_key() -> None:
    """Storage keys without the scope let tenant B read A's pages."""
    keys = {
        key_of(),
        key_of(secret=b"t" * 32),
        key_of(scope=("t", "v")),
        key_of(scope=("v", "u")),
        key_of(scope=PUBLIC_SCOPE),
        key_of(generation=1),
        key_of(chain=b"d" * 16),
    }
    assert len(keys) == 7


@given(SCOPES, SCOPES)
def test_no_two_scopes_have_the_same_key(lhs: tuple[str, ...], rhs: tuple[str, ...]) -> None:
    assert (key_of(scope=lhs) == key_of(scope=rhs)) == (lhs == rhs)
    assert (scope_tag(SECRET, lhs) == scope_tag(SECRET, rhs)) == (lhs == rhs)


def test_names_that_are_no_text_have_keys_of_their_own() -> None:
    assert key_of(scope=("t", "\udcff")) != key_of(scope=("t", "?"))


def test_pages_get_a_key_each_in_their_order() -> None:
    chains = [bytes([number]) * 16 for number in range(5)]
    assert list(object_keys(SECRET, ("t", "u"), 0, chains)) == [key_of(chain=chain) for chain in chains]
