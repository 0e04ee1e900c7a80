from __future__ import annotations

import dataclasses
import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.storage.objects import KEY_BYTES, OVERHEAD_BYTES, Miss, ObjectFormat

FORM = ObjectFormat("model-a float32 page 16 rank 0/1", 64)
KEY = bytes(range(KEY_BYTES))
CIPHER_KEY = b"k" * KEY_BYTES
PAYLOADS = st.binary(min_size=64, max_size=64)
KEYS = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)


def encode(payload: bytes, form: ObjectFormat = FORM, key: bytes = KEY, cipher_key: bytes = CIPHER_KEY) -> bytes:
    return bytes(form.encode(key, cipher_key, payload))


def decode(data: bytes, key: bytes = KEY, cipher_key: bytes = CIPHER_KEY) -> memoryview | Miss:
    return FORM.decode(key, cipher_key, data)


@given(PAYLOADS)
def test_decoding_restores_the_encoded_payload(payload: bytes) -> None:
    decoded = decode(encode(payload))
    assert not isinstance(decoded, Miss)
    assert bytes(decoded) == payload


@given(PAYLOADS)
def test_an_encoded_page_hides_its_content_and_no_two_encodings_are_equal(payload: bytes) -> None:
    first, second = encode(payload), encode(payload)
    assert len(first) == len(payload) + OVERHEAD_BYTES
    assert first[-80:-16] != second[-80:-16]
    assert payload not in first


@given(PAYLOADS, st.data())
def test_any_truncation_is_a_miss(payload: bytes, data: st.DataObject) -> None:
    blob = encode(payload)
    cut = data.draw(st.integers(0, len(blob) - 1))
    assert decode(blob[:cut]) is Miss.TRUNCATED


@given(PAYLOADS, st.data())
def test_any_flipped_bit_is_a_miss(payload: bytes, data: st.DataObject) -> None:
    blob = bytearray(encode(payload))
    bit = data.draw(st.integers(0, 8 * len(blob) - 1))
    blob[bit // 8] ^= 1 << (bit % 8)
    assert isinstance(decode(bytes(blob)), Miss)


@given(PAYLOADS, PAYLOADS, st.integers(0, 64 + OVERHEAD_BYTES))
def test_parts_of_two_objects_of_one_name_make_no_third(one: bytes, other: bytes, cut: int) -> None:
    first, second = encode(one), encode(other)
    spliced = first[:cut] + second[cut:]
    if spliced in (first, second):
        return
    assert isinstance(decode(spliced), Miss)


@given(PAYLOADS, st.binary(min_size=1, max_size=OVERHEAD_BYTES))
def test_anything_appended_is_a_miss(payload: bytes, more: bytes) -> None:
    assert decode(encode(payload) + more) is Miss.NOT_AUTHENTIC


@given(st.binary(max_size=OVERHEAD_BYTES + 128))
def test_arbitrary_bytes_decode_to_a_miss(data: bytes) -> None:
    assert isinstance(decode(data), Miss)


@given(PAYLOADS, KEYS.filter(lambda key: key != CIPHER_KEY))
def test_only_its_own_key_opens_an_object(payload: bytes, other: bytes) -> None:
    assert decode(encode(payload), cipher_key=other) is Miss.NOT_AUTHENTIC


@given(PAYLOADS, KEYS.filter(lambda key: key != KEY), st.booleans())
def test_an_object_under_another_name_is_a_miss_even_if_its_header_is_rewritten(
    payload: bytes, other: bytes, is_rewritten: bool
) -> None:
    blob = encode(payload, key=other)
    if is_rewritten:
        blob = blob.replace(other, KEY)
    assert decode(blob) is Miss.NOT_AUTHENTIC


@pytest.mark.parametrize(
    "other", [dataclasses.replace(FORM, fingerprint="model-a float32 page 16 rank 1/2"), ObjectFormat("b", 64)]
)
def test_an_object_of_another_layout_is_a_miss_even_if_its_header_is_rewritten(other: ObjectFormat) -> None:
    blob = encode(bytes(64), other)
    assert decode(blob) is Miss.FOREIGN_LAYOUT
    assert decode(blob.replace(other.layout, FORM.layout)) is Miss.NOT_AUTHENTIC
    assert FORM.name(KEY) != other.name(KEY)


def test_a_page_of_another_length_is_a_miss() -> None:
    assert decode(encode(bytes(32), ObjectFormat(FORM.fingerprint, 32))) is Miss.FOREIGN_LAYOUT


def test_an_object_of_the_earlier_format_is_a_miss() -> None:
    prefix = struct.pack("<8sIQ32s32s", b"PandoKV\n", 1, 64, FORM.layout, KEY)
    unencrypted = prefix + hashlib.sha256(prefix).digest()[:16] + bytes(64)
    assert decode(unencrypted + bytes(OVERHEAD_BYTES)) is Miss.CORRUPT


def test_an_earlier_object_of_the_same_name_and_key_is_indistinguishable() -> None:
    """The limit of what is claimed: its content is KV of the same tokens, so nothing wrong can come of it."""
    first, _ = encode(b"a" * 64), encode(b"b" * 64)
    decoded = decode(first)
    assert not isinstance(decoded, Miss)
    assert bytes(decoded) == b"a" * 64


def test_names_are_of_the_characters_that_back_ends_take() -> None:
    name = FORM.name(KEY)
    assert len(name) <= 128
    assert set(name) <= set("0123456789abcdef-")
