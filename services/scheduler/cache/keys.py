"""Token ids as bytes, divided into pages, so that comparison is a memcmp and a page can key a dict."""

from __future__ import annotations

from hashlib import blake2b, shake_256
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.types import RowImage, TokenIds

TOKEN_BYTES = 4
# With an adapter, the upper bits of the ids of a key are combined with bits of its digest. These repeat after
# TAGGED_TOKENS tokens, so that every page, which must have at least as many, has 132 of them: equal pages have equal
# adapters. What is derived from keys (names in storage, evidence of other groups) thus differs by adapter, too.
ID_BITS = 20
ID_MASK = (1 << ID_BITS) - 1
TAGGED_TOKENS = 12
_TAG_BITS = 31 - ID_BITS


def adapter_tags(digest: str) -> TokenIds:
    """Return the upper bits of ids for an adapter, [TAGGED_TOKENS] int32; `digest` is a SHA-256 in hexadecimal."""
    number = int(digest, 16)
    tags = [(number >> (_TAG_BITS * i)) & ((1 << _TAG_BITS) - 1) for i in range(TAGGED_TOKENS)]
    return np.array(tags, np.int32) << ID_BITS


def image_tags(token_ids: TokenIds, images: Sequence[RowImage], page_size: int) -> TokenIds:
    """Return the upper bits of ids for the images of a prompt, [tokens of its pages] int32.

    A page with texts and embeddings can have a single embedding, whose id has 31 bits only. There, the upper bits of
    the texts' ids are combined with bits of the images' digests, so that all of a page's ids depend on them: of 16
    tokens, 196 bits at least.
    """
    below = np.flatnonzero(token_ids < 0)
    owners = np.repeat(np.arange(len(images)), [image.length for image in images])
    tags = np.zeros((-(-len(token_ids) // page_size), page_size), np.int32)
    counts = np.bincount(below // page_size, minlength=len(tags))
    for page in np.flatnonzero((counts > 0) & (counts < page_size)):
        start, end = np.searchsorted(below, (page * page_size, (page + 1) * page_size))
        digests = b"".join(images[i].digest for i in np.unique(owners[start:end]))
        words = np.frombuffer(shake_256(b"page" + digests).digest(4 * page_size), "<u4")
        tags[page] = (words & ((1 << _TAG_BITS) - 1)) << ID_BITS
    flat = tags.reshape(-1)
    flat[below] = 0
    return flat


def tagged(token_ids: TokenIds, tags: TokenIds) -> TokenIds:
    """Return the ids of a key, [tokens] int32, from those of a prompt and the tags of its adapter."""
    # Of images' ids, which are below 0, all bits are in use.
    return token_ids ^ np.resize(tags, len(token_ids))


def plain_ids(key: bytes) -> TokenIds:
    """Return the token ids in a key, [tokens] int32, without tags; those below 0 are of images."""
    ids = np.frombuffer(key, np.int32)
    return np.where(ids > ID_MASK, ids & ID_MASK, ids) if len(ids) and bool((ids > ID_MASK).any()) else ids


def text_ids(key: bytes) -> TokenIds:
    """Return the token ids in a key as `plain_ids` does, but without those of images."""
    ids = plain_ids(key)
    return ids if text_tokens(ids) == len(ids) else ids[ids >= 0]


def text_tokens(token_ids: TokenIds) -> int:
    """Return the number of token ids before the first image."""
    below = token_ids < 0
    return int(below.argmax()) if below.any() else len(token_ids)


class PagedKey:
    """The whole pages of a token sequence; bytes are created only for the requested parts.

    A tree edge has the same form: 4 bytes per token, little-endian int32, a whole number of pages.
    """

    __slots__ = ("_page_bytes", "_page_size", "_view", "pages")

    def __init__(self, token_ids: TokenIds, page_size: int) -> None:
        """Wrap `token_ids`, [tokens] int32, without copying them."""
        self.pages = len(token_ids) // page_size
        self._page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._view = np.ascontiguousarray(token_ids, dtype="<i4").view(np.uint8).data

    def page(self, index: int) -> bytes:
        """Return one page's tokens."""
        start = index * self._page_bytes
        return bytes(self._view[start : start + self._page_bytes])

    def slice(self, first: int, end: int) -> bytes:
        """Return the tokens of pages [first, end)."""
        return bytes(self._view[first * self._page_bytes : end * self._page_bytes])

    def common_pages(self, edge: bytes, first: int, end: int) -> int:
        """Return the number of equal leading pages of `edge` and the pages [first, end)."""
        ours = self.slice(first, min(end, first + len(edge) // self._page_bytes))
        if edge.startswith(ours):
            return len(ours) // self._page_bytes
        lhs = np.frombuffer(ours, np.int32)
        rhs = np.frombuffer(edge, np.int32, count=len(lhs))
        return int((lhs != rhs).argmax()) // self._page_size


def common_run(keys: Sequence[bytes], page_bytes: int) -> int:
    """Return the number of leading pages that all of `keys` have in common."""
    first = keys[0]
    common = min(map(len, keys)) // page_bytes
    for other in keys[1:]:
        if not other.startswith(first[: common * page_bytes]):
            lhs = np.frombuffer(first, np.int32, count=common * page_bytes // TOKEN_BYTES)
            rhs = np.frombuffer(other, np.int32, count=len(lhs))
            common = int((lhs != rhs).argmax()) * TOKEN_BYTES // page_bytes
    return common


def chain_hashes(key: bytes, page_bytes: int, chain: bytes = b"") -> list[bytes]:
    """Return one hash [32] per page, of all tokens from the prompt's first to the page's last.

    `chain` is the hash of the page before `key`; empty: `key` begins with the prompt's first token.
    """
    hashes: list[bytes] = []
    for start in range(0, len(key), page_bytes):
        chain = blake2b(chain + key[start : start + page_bytes], digest_size=32).digest()
        hashes.append(chain)
    return hashes
