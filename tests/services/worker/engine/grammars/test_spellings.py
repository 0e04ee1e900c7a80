from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from services.worker.engine.grammars.matcher import mask_words, only_token
from services.worker.engine.grammars.spellings import Spellings

PIECES = st.lists(st.text("ab", max_size=4).map(str.encode), min_size=1, max_size=70)


@given(PIECES, st.text("ab", max_size=6).map(str.encode), st.data())
@example([b"a", b"ab", b"ab", b"b"], b"abb", None)
def test_the_longest_beginning_is_found_where_all_tokens_are_beginnings(
    pieces: list[bytes], text: bytes, data: st.DataObject | None
) -> None:
    beginnings = [id_ for id_, piece in enumerate(pieces) if text.startswith(piece)]
    allowed = beginnings
    if data is not None:
        allowed = data.draw(st.one_of(st.lists(st.sampled_from(range(len(pieces))), unique=True), st.just(beginnings)))
    longest = max(sorted(allowed), key=lambda id_: len(pieces[id_]), default=None)
    expected = longest if set(allowed) <= set(beginnings) and len(allowed) <= 64 else None
    assert Spellings(pieces).longest(text, mask_of(allowed, len(pieces))) == expected


@given(st.sets(st.integers(0, 99), max_size=3))
def test_a_token_is_the_only_one_if_it_is(allowed: set[int]) -> None:
    expected = next(iter(allowed)) if len(allowed) == 1 else None
    assert only_token(mask_of(allowed, 100)) == expected


def mask_of(ids: list[int] | set[int], size: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    bits = np.zeros(mask_words(size) * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
