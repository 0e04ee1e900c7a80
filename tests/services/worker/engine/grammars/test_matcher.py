from __future__ import annotations

import numpy as np
import pytest
import xgrammar

from services.worker.engine.grammars.matcher import Matcher


@pytest.mark.parametrize("pattern", ["[a-z]*", "[a-z]+", "[^a]*", "a"])
@pytest.mark.parametrize("size", [27, 50, 64])
def test_only_tokens_are_in_a_mask(pattern: str, size: int) -> None:
    pieces = [bytes([97 + id_ % 26]) * (1 + id_ // 26) for id_ in range(size - 1)] + [b"\xff"]
    tokens = xgrammar.TokenizerInfo(pieces, vocab_size=size, stop_token_ids=[size - 1])
    matcher = Matcher(xgrammar.GrammarCompiler(tokens).compile_regex(pattern), size)
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    assert not bits[size:].any()
    assert bits[:size].any()
