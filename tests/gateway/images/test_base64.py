"""Images in base64 are read as strictly as `binascii` does, wherever pieces of the text end."""

from __future__ import annotations

import asyncio
import base64
import binascii

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequestError
from gateway.images import images
from gateway.images.references import from_base64
from tests.examples import examples
from tests.gateway.endpoints.image_requests import SEEING, seeing

# The first bytes of a JPEG file.
HEAD = "/9j/"
READER = seeing().context.images


def read(text: str) -> bytes | None:
    try:
        (image,) = asyncio.run(READER.read(SEEING, [from_base64(text, "image")], {}))
    except InvalidRequestError as error:
        return None if "is not valid base64" in error.message else error.message.encode()
    return image.data


def strictly_decoded(text: str) -> bytes | None:
    try:
        return binascii.a2b_base64(text, strict_mode=True) if len(text) % 4 == 0 else None
    except ValueError:
        return None


GROUPS = st.text(alphabet="AQg5+/=", min_size=4, max_size=4) | st.sampled_from(["A\n==", "AA é", "A-_A", "-AA="])


@examples(300)
@given(st.lists(GROUPS))
def test_base64_is_read_as_binascii_reads_it(groups: list[str]) -> None:
    text = HEAD + "".join(groups)
    assert read(text) == strictly_decoded(text)


@pytest.mark.parametrize("text", ["AB==", "AAF=", "AAAAAAH="])
def test_bits_after_the_last_byte_may_be_set(text: str) -> None:
    assert read(HEAD + text) == base64.b64decode(HEAD + text)


@pytest.mark.parametrize("size", [5, 6, 7, 8, 9, 300])
def test_texts_of_several_pieces_are_read_whole(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "PIECE_CHARACTERS", 8)
    content = b"\xff\xd8\xff" + bytes(range(256)) * 2
    assert read(base64.b64encode(content[:size]).decode()) == content[:size]


def test_padding_between_pieces_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "PIECE_CHARACTERS", 8)
    assert read(HEAD + "AAA=AAAA") is None
