"""Costs of grammars: compiling, and the masks of a pass, by vocabulary.

Run as `python -m deploy.evaluation.experiments.masks --json deploy/evaluation/results/masks.json`, which measures the
bundled model's vocabulary, and that vocabulary followed by pairs of its tokens. `--model qwen3-0.6b/` measures the
vocabulary of a directory instead, such as `deploy.evaluation.experiments.qwen_vocabulary` writes.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xgrammar

from common.models import resolve_model
from common.tokenization import load_text_model
from common.tokenization.vocabulary import read_vocabulary
from deploy.evaluation.bench.partial_results import PartialResults
from services.worker.engine.grammars.library import fill_threads
from services.worker.engine.grammars.matcher import MaskFiller, Matcher
from services.worker.engine.grammars.row_masks import RowMasks
from services.worker.engine.grammars.spellings import Spellings
from services.worker.engine.plans.rows import RowStates
from services.worker.engine.sampling.logits_processors import apply_masks
from tests.services.worker.engine.grammars.corpus import CORPUS
from tests.services.worker.engine.grammars.outputs import EOS, VOCABULARY_SIZE, bound_row, schema_grammar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from common.grammars import Grammar

BUNDLED = "smollm2-135m-instruct"
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


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """The bytes of each token, and the token that ends a text."""

    pieces: Sequence[bytes]
    eos: int

    @property
    def name(self) -> str:
        """The part of a metric's name."""
        return f"vocabulary {len(self.pieces) // 1000} k"


def main() -> None:
    """Measure and print; write results where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="DIRECTORY", help="model whose vocabulary is measured instead")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.model is None:
        results = PartialResults("masks", BUNDLED, arguments.json)
        for size in (VOCABULARY_SIZE, LARGE):
            measure(bundled_vocabulary(size), results)
    else:
        results = PartialResults("masks", arguments.model.resolve().name, arguments.json)
        measure(vocabulary_of(arguments.model), results)


def measure(vocabulary: TokenBytes, results: PartialResults) -> None:
    """Add the figures of one vocabulary."""
    size, name = len(vocabulary.pieces), vocabulary.name
    info = xgrammar.TokenizerInfo(list(vocabulary.pieces), vocab_size=size, stop_token_ids=[vocabulary.eos])
    compiler = xgrammar.GrammarCompiler(info, max_threads=2, cache_enabled=False)
    for title, schema in SCHEMAS.items():
        text = json.dumps(schema)
        times = timed(lambda text=text: compiler.compile_json_schema(text, any_whitespace=False), 3)  # type: ignore[misc]
        results.add(f"compile, {title}, {name}", "ms", times)
    compiled = compiler.compile_json_schema(json.dumps(PERSON), any_whitespace=False)
    spellings = Spellings(vocabulary.pieces)
    for rows in ROWS:
        for place, start in PLACES.items():
            masks_of = rows_at(OneGrammar(compiled, size, spellings, start), rows)
            results.add(f"fill, {place}, {rows} rows, {name}", "ms", timed(masks_of))
        logits, samples, masks = torch.randn(rows, size), np.arange(rows), masks_of()
        times = timed(lambda: apply_masks(logits, samples, masks))  # noqa: B023
        results.add(f"apply, {rows} rows, {name}", "ms", times)
        theirs, bits = torch.randn(rows, size), torch.from_numpy(masks)
        times = timed(lambda: xgrammar.apply_token_bitmask_inplace(theirs, bits))  # noqa: B023
        results.add(f"apply with XGrammar's own function, {rows} rows, {name}", "ms", times)


@dataclass(frozen=True, slots=True)
class OneGrammar:
    """Stands in for `GrammarLibrary`: all rows have one grammar, and `start` behind them."""

    compiled: xgrammar.CompiledGrammar
    vocabulary_size: int
    spellings: Spellings
    start: str
    filler: MaskFiller = field(default_factory=lambda: MaskFiller(fill_threads()))
    threads: int = field(default_factory=fill_threads)

    def begin(self, grammar: Grammar) -> None:
        """Do nothing: it is compiled."""

    def matcher(self, grammar: Grammar) -> Matcher:
        """Return a matcher behind the text."""
        matcher = Matcher(self.compiled, self.vocabulary_size, self.spellings)
        matcher._matcher.accept_string(self.start)
        return matcher

    def fill(self, matchers: Sequence[Matcher], masks: NDArray[np.int32], lines: Sequence[int]) -> None:
        """Compute the masks of rows."""
        self.filler.fill(matchers, masks, lines)


def rows_at(library: OneGrammar, count: int) -> Callable[[], NDArray[np.int32]]:
    """Return a function that computes the masks of so many rows, as each pass does."""
    masks, rows = RowMasks(library, library.vocabulary_size), RowStates(count, 64, 16)
    for slot in range(count):
        opened = bound_row(slot, schema_grammar(PERSON), seed=1, length=40)
        rows.open(opened)
        masks.open(opened)
    return lambda: masks.masks(np.arange(count), rows)


def timed(run: Callable[[], object], repeats: int = REPEATS) -> list[float]:
    """Return the milliseconds of each call, after one that is not measured."""
    run()
    milliseconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        milliseconds.append((time.perf_counter() - started) * 1e3)
    return milliseconds


def bundled_vocabulary(size: int) -> TokenBytes:
    """Return the bundled model's vocabulary, with pairs of its tokens up to `size` tokens."""
    tokenizer = load_text_model(resolve_model(BUNDLED)).tokenizer
    own = list(read_vocabulary(tokenizer, VOCABULARY_SIZE).plain_pieces.data)
    random = np.random.default_rng(0)
    pairs = random.integers(300, len(own), (size - len(own), 2))
    return TokenBytes(own + [own[left] + own[right] for left, right in pairs.tolist()], EOS)


def vocabulary_of(directory: Path) -> TokenBytes:
    """Return the vocabulary of the model in `directory`.

    Raises:
        ConfigurationError: a file is missing or damaged.
        SystemExit: the model names no token that ends a text.
    """
    model = load_text_model(resolve_model(str(directory), weights=False))
    eos = model.tokenizer.token_to_id(model.special_tokens.get("eos_token", ""))
    if eos is None:
        raise SystemExit(f"{directory}: tokenizer_config.json names no eos_token")
    return TokenBytes(read_vocabulary(model.tokenizer, model.vocabulary_size).plain_pieces.data, eos)


if __name__ == "__main__":
    main()
