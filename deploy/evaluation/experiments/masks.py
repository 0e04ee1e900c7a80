"""Costs of grammars: compiling, and the masks of a pass, at two sizes of vocabulary.

Run as `python -m deploy.evaluation.experiments.masks --json deploy/evaluation/results/masks.json`.
The larger vocabulary is the bundled model's, followed by pairs of its tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xgrammar

from common.models import resolve_model
from common.tokenization import load_text_model
from common.tokenization.vocabulary import read_vocabulary
from deploy.evaluation.bench.figures import Spread
from deploy.evaluation.bench.results import Provenance, ResultSheet, write_results
from services.worker.engine.grammars.matcher import Matcher, mask_words
from services.worker.engine.sampling.logits_processors import apply_masks
from tests.services.worker.engine.grammars.corpus import CORPUS
from tests.services.worker.engine.grammars.outputs import EOS, VOCABULARY_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable

LARGE = 128 * 1024
ROWS = (1, 32)
REPEATS = 20
# Each is put before the masks that are measured: structure, the inside of a text, and a number.
PLACES = {"structure": "", "text": '{"name": "Ab', "number": '{"name": "Ab", "age": 1'}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMAS = {
    "person": PERSON,
    "order": CORPUS["order"],
    "text of at most 40": {"type": "string", "maxLength": 40},
    "1,000 values": {"enum": [f"value {number}" for number in range(1000)]},
}


def main() -> None:
    """Measure and print; write results where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, tuple[Spread, str]] = {}
    for size in (VOCABULARY_SIZE, LARGE):
        figures |= measure(size)
    for metric, (spread, unit) in figures.items():
        sys.stdout.write(f"{metric:60} {spread.median:10.3f} {unit}  ({spread.low:.3f} to {spread.high:.3f})\n")
    if arguments.json is not None:
        command = f"python -m deploy.evaluation.experiments.masks --json {arguments.json}"
        sheet = ResultSheet("masks", "smollm2-135m-instruct", 1, replace(Provenance.collect(()), command=command))
        for metric, (spread, unit) in figures.items():
            sheet.add_spread(metric, spread, unit)
        write_results(arguments.json, sheet.results)


def measure(size: int) -> dict[str, tuple[Spread, str]]:
    """Return the figures of one size of vocabulary."""
    compiler = xgrammar.GrammarCompiler(
        xgrammar.TokenizerInfo(pieces(size), vocab_size=size, stop_token_ids=[EOS]), max_threads=2, cache_enabled=False
    )
    name = f"{size // 1000} k"
    figures = {}
    for title, schema in SCHEMAS.items():
        text = json.dumps(schema)
        spread = timed(lambda text=text: compiler.compile_json_schema(text, any_whitespace=False), 3)  # type: ignore[misc]
        figures[f"compile, {title}, vocabulary {name}"] = spread, "ms"
    compiled = compiler.compile_json_schema(json.dumps(PERSON), any_whitespace=False)
    own = pieces(size)
    for rows in ROWS:
        for place, start in PLACES.items():
            matchers = [Matcher(compiled, size, own) for _ in range(rows)]
            for matcher in matchers:
                matcher._matcher.accept_string(start)
            masks = np.empty((rows, mask_words(size)), np.int32)
            figures[f"fill, {place}, {rows} rows, vocabulary {name}"] = timed(lambda: fill(matchers, masks)), "ms"  # noqa: B023
        logits, samples = torch.randn(rows, size), np.arange(rows)
        figures[f"apply, {rows} rows, vocabulary {name}"] = timed(lambda: apply_masks(logits, samples, masks)), "ms"  # noqa: B023
        theirs, bits = torch.randn(rows, size), torch.from_numpy(masks)
        figures[f"apply with XGrammar's own function, {rows} rows, vocabulary {name}"] = (
            timed(lambda: xgrammar.apply_token_bitmask_inplace(theirs, bits)),  # noqa: B023
            "ms",
        )
    return figures


def fill(matchers: list[Matcher], masks: np.ndarray[Any, np.dtype[np.int32]]) -> None:
    """Compute each row's mask, as `RowMasks` does."""
    for index, matcher in enumerate(matchers):
        # Else it would be remembered.
        matcher._is_current = False
        if matcher.only() is None:
            matcher.spelling()
        masks[index] = matcher.mask()


def timed(run: Callable[[], object], repeats: int = REPEATS) -> Spread:
    """Return milliseconds of a call."""
    run()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        seconds.append((time.perf_counter() - started) * 1e3)
    return Spread.of(seconds)


def pieces(size: int) -> list[bytes]:
    """Return the bytes of a vocabulary of `size` tokens."""
    tokenizer = load_text_model(resolve_model("smollm2-135m-instruct")).tokenizer
    own = list(read_vocabulary(tokenizer, VOCABULARY_SIZE).plain_pieces.data)
    random = np.random.default_rng(0)
    pairs = random.integers(300, len(own), (size - len(own), 2))
    return own + [own[left] + own[right] for left, right in pairs.tolist()]


if __name__ == "__main__":
    main()
