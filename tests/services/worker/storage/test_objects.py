from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.storage.objects import HEADER_BYTES, KEY_BYTES, Miss, ObjectFormat

FORM = ObjectFormat("model-a float32 page 16 rank 0/1", 64)
KEY = bytes(range(KEY_BYTES))
PAYLOADS = st.binary(min_size=64, max_size=64)


@given(PAYLOADS)
def test_what_was_encoded_is_decoded(payload: bytes) -> None:
    decoded = FORM.decode(KEY, FORM.encode(KEY, payload))
    assert not isinstance(decoded, Miss)
    assert bytes(decoded) == payload


@given(PAYLOADS, st.data())
def test_any_truncation_is_a_miss(payload: bytes, data: st.DataObject) -> None:
    blob = FORM.encode(KEY, payload)
    cut = data.draw(st.integers(0, len(blob) - 1))
    assert FORM.decode(KEY, blob[:cut]) is Miss.TRUNCATED


@given(PAYLOADS, st.data())
def test_any_flipped_bit_is_a_miss(payload: bytes, data: st.DataObject) -> None:
    blob = bytearray(FORM.encode(KEY, payload))
    bit = data.draw(st.integers(0, 8 * len(blob) - 1))
    blob[bit // 8] ^= 1 << (bit % 8)
    assert isinstance(FORM.decode(KEY, bytes(blob)), Miss)


@given(PAYLOADS, st.binary(min_size=1, max_size=HEADER_BYTES))
def test_anything_appended_is_a_miss(payload: bytes, more: bytes) -> None:
    assert isinstance(FORM.decode(KEY, FORM.encode(KEY, payload) + more), Miss)


@given(st.binary(max_size=HEADER_BYTES + 128))
def test_anything_else_is_a_miss(data: bytes) -> None:
    assert isinstance(FORM.decode(KEY, data), Miss)


@pytest.mark.parametrize(
    "other", [dataclasses.replace(FORM, fingerprint="model-a float32 page 16 rank 1/2"), ObjectFormat("b", 64)]
)
def test_an_object_of_another_layout_is_a_miss(other: ObjectFormat) -> None:
    assert FORM.decode(KEY, other.encode(KEY, bytes(64))) is Miss.FOREIGN_LAYOUT
    assert FORM.name(KEY) != other.name(KEY)


def test_a_page_of_another_length_is_a_miss() -> None:
    assert FORM.decode(KEY, ObjectFormat(FORM.fingerprint, 32).encode(KEY, bytes(32))) is Miss.FOREIGN_LAYOUT


def test_a_whole_object_under_another_key_is_a_miss() -> None:
    blob = FORM.encode(bytes(KEY_BYTES), bytes(64))
    assert FORM.decode(KEY, blob) is Miss.CORRUPT
