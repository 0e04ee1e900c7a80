from __future__ import annotations

import numpy as np
import pytest
import xgrammar

from services.worker.engine.grammars.matcher import MaskFiller, Matcher, mask_words


@pytest.mark.parametrize("pattern", ["[a-z]*", "[a-z]+", "[^a]*", "a"])
@pytest.mark.parametrize("size", [27, 50, 64])
def test_only_tokens_are_in_a_mask(pattern: str, size: int) -> None:
    pieces = [bytes([97 + id_ % 26]) * (1 + id_ // 26) for id_ in range(size - 1)] + [b"\xff"]
    tokens = xgrammar.TokenizerInfo(pieces, vocab_size=size, stop_token_ids=[size - 1])
    matcher = Matcher(xgrammar.GrammarCompiler(tokens).compile_regex(pattern), size)
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    assert not bits[size:].any()
    assert bits[:size].any()


@pytest.mark.parametrize("size", [27, 50, 64, 2000])
@pytest.mark.parametrize("threads", [1, 3])
def test_masks_of_several_outputs_are_those_of_each(size: int, threads: int) -> None:
    pieces = [bytes([97 + id_ % 26]) * (1 + id_ // 26) for id_ in range(size - 1)] + [b"\xff"]
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(pieces, vocab_size=size, stop_token_ids=[size - 1]))
    # The last allows whatever is a token.
    everything = {"type": "structural_tag", "format": {"type": "any_text"}}
    compiled = [compiler.compile_regex(pattern) for pattern in ("[a-z]*", "a+b", "[^a]*", "b{4}", "(a|b|c){70}")]
    compiled.append(compiler.compile_structural_tag(everything))
    matchers = [Matcher(each, size) for each in compiled]
    assert all(matcher.accept(1) for matcher in (matchers[0], matchers[3], matchers[5]))
    masks = np.full((9, mask_words(size)), 7, np.int32)
    lines = [8, 0, 3, 2, 5, 6]
    MaskFiller(threads).fill(matchers, masks, lines)
    for matcher, line in zip(matchers, lines, strict=True):
        assert masks[line].tolist() == matcher.mask().tolist()
    assert masks[6].any()
    untouched = masks[[1, 4, 7], :-1]
    assert (untouched == 7).all()
