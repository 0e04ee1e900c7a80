"""Small tokenizers of kinds that the bundled model is not of."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models


def sentence_piece() -> Tokenizer:
    """Return a vocabulary with ▁ for blanks and <0xNN> for bytes; ids 3 to 258 are the bytes."""
    pieces = ("▁", "▁the", "the", "▁▁", "a", "é", "漢", "😀", ".", "\n", "<0xZZ>", "▁a▁")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def word_piece() -> Tokenizer:
    """Return a vocabulary whose decoder looks at a token's neighbours."""
    tokens = ("[UNK]", "[SEP]", "the", "run", "##ning", "##s", "quick", ",", "don", "'", "t", "漢")
    tokenizer = Tokenizer(models.WordPiece(vocab={token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["[SEP]"])
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer
