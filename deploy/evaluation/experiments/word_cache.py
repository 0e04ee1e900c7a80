"""Savings of the tokenizer library's word cache, and what its times reveal.

Run as `python -m deploy.evaluation.experiments.word_cache`. Prompts are cut from this repository's documents
and programs.
"""

from __future__ import annotations

import argparse
import random
import string
import sys
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from common.models import resolve_model
from common.tokenization import load_text_model

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[3]
LENGTHS = (256, 1024, 4096, 16384)
WORD_LETTERS = 250


def seconds(tokenizer: Tokenizer, text: str) -> float:
    """Return the duration of encoding a text."""
    started = time.perf_counter()
    tokenizer.encode_batch_fast([text], add_special_tokens=False)
    return time.perf_counter() - started


def prompts(tokenizer: Tokenizer, tokens: int, number: int) -> list[str]:
    """Return pieces of so many tokens each."""
    paths = sorted(path for folder in ("common", "gateway", "services") for path in (ROOT / folder).rglob("*"))
    text = "".join(path.read_text() for path in paths if path.suffix in (".md", ".py"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    starts = random.Random(tokens).sample(range(len(ids) - tokens), number)
    return [tokenizer.decode(ids[start : start + tokens]) for start in starts]


def main(arguments: Sequence[str]) -> None:
    """Print milliseconds per prompt, and microseconds per word that was or was not encoded before."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args(arguments)
    without = load_text_model(resolve_model(options.model)).tokenizer
    cached = Tokenizer.from_str(without.to_str())
    tokenizers = {"without": without, "cached": cached}
    for tokens in LENGTHS:
        times: dict[str, list[float]] = {name: [] for name in tokenizers}
        for index, prompt in enumerate(prompts(without, tokens, options.repeats)):
            for name in sorted(tokenizers, reverse=bool(index % 2)):
                times[name].append(seconds(tokenizers[name], prompt))
        with_ms, without_ms = median(times["cached"]) * 1e3, median(times["without"]) * 1e3
        print(f"{tokens} tokens: cached {with_ms:.2f} ms, without {without_ms:.2f} ms, +{without_ms - with_ms:.2f} ms")  # noqa: T201
    draw = random.Random(1)
    for name, tokenizer in {"without": without, "cached": Tokenizer.from_str(without.to_str())}.items():
        words = ["".join(draw.choices(string.ascii_lowercase, k=WORD_LETTERS)) for _ in range(4 * options.repeats)]
        seen, new = words[::2], words[1::2]
        for word in seen:
            seconds(tokenizer, word)
        pairs = [(seconds(tokenizer, lhs), seconds(tokenizer, rhs)) for lhs, rhs in zip(seen, new, strict=True)]
        again, first = (median(times) * 1e6 for times in zip(*pairs, strict=True))
        print(f"{name}: a word of {WORD_LETTERS} letters seen before {again:.0f} µs, a new one {first:.0f} µs")  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
