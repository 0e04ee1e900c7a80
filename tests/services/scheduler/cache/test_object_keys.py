from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.cache.object_keys import ObjectKeys, scope_keys, scope_tag
from services.scheduler.cache.types import PUBLIC_SCOPE

SECRET, SEED, CHAIN = b"s" * 32, b"r" * 32, b"c" * 32
# The public, a tenant, and views of subjects.
SCOPES = st.lists(st.text(max_size=5), max_size=3).map(tuple)


def keys_of(
    secret: bytes = SECRET, seed: bytes = SEED, scope: tuple[str, ...] = ("t", "u"), chain: bytes = CHAIN
) -> ObjectKeys:
    return scope_keys(secret, seed, scope).of_pages([chain])


def test_equal_input_gives_equal_keys_of_32_bytes() -> None:
    assert keys_of() == keys_of()
    assert [len(keys_of().names[0]), len(keys_of().cipher_key)] == [32, 32]


def test_each_part_changes_the_name_and_all_but_the_tokens_the_key() -> None:
    """Storage keys without the scope let tenant B read A's pages."""
    different = [
        keys_of(),
        keys_of(secret=b"t" * 32),
        keys_of(seed=b"q" * 32),
        keys_of(scope=("t", "v")),
        keys_of(scope=("v", "u")),
        keys_of(scope=("t", "u", "salt")),
        keys_of(scope=("t",)),
        keys_of(scope=PUBLIC_SCOPE),
    ]
    assert len({keys.names for keys in different}) == len({keys.cipher_key for keys in different}) == len(different)
    other_tokens = keys_of(chain=b"d" * 32)
    assert other_tokens.names != keys_of().names
    assert other_tokens.cipher_key == keys_of().cipher_key


@given(SCOPES, SCOPES)
def test_no_two_scopes_have_the_same_keys(lhs: tuple[str, ...], rhs: tuple[str, ...]) -> None:
    one, other = keys_of(scope=lhs), keys_of(scope=rhs)
    assert (one.names == other.names) == (one.cipher_key == other.cipher_key) == (lhs == rhs)
    assert (scope_tag(SECRET, lhs) == scope_tag(SECRET, rhs)) == (lhs == rhs)


def test_names_with_invalid_unicode_have_distinct_keys() -> None:
    assert keys_of(scope=("t", "\udcff")) != keys_of(scope=("t", "?"))


def test_pages_get_a_name_each_in_their_order() -> None:
    chains = [bytes([number]) * 32 for number in range(5)]
    names = scope_keys(SECRET, SEED, ("t", "u")).of_pages(chains).names
    assert list(names) == [keys_of(chain=chain).names[0] for chain in chains]


def test_no_key_is_printed() -> None:
    keys = scope_keys(SECRET, SEED, ("t", "u"))
    for secret in (keys.cipher, keys.naming):
        assert repr(secret) not in repr((keys, keys.of_pages([CHAIN])))
