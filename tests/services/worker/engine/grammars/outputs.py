"""Outputs of grammars: the real matcher and the real sampler, over logits that are drawn at random."""

from __future__ import annotations

import json
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from common.grammars import Grammar, GrammarKind
from common.models import resolve_model
from common.tokenization import load_text_model
from common.tokenization.vocabulary import Vocabulary, read_vocabulary
from common.types import SamplingParams
from services.worker.engine.grammars.compiler import Compiler
from services.worker.engine.grammars.library import GrammarLibrary
from services.worker.engine.grammars.row_masks import RowMasks
from services.worker.engine.grammars.vocabulary_source import VocabularySource
from services.worker.engine.plans.rows import RowStates
from services.worker.engine.sampling.sampler import sample
from services.worker.engine.sampling.table import SamplingTable
from tests.services.worker.engine.scenario import open_row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from common.steps import RowOpen

VOCABULARY_SIZE = 49_152
EOS = 2
SOURCE = VocabularySource("smollm2-135m-instruct", "auto", VOCABULARY_SIZE, (EOS,))
PROMPT = (5, 6, 7)


@cache
def library() -> GrammarLibrary:
    compiler = Compiler(SOURCE)
    made = GrammarLibrary(lambda _source: compiler)
    made.serve(SOURCE)
    return made


@cache
def vocabulary() -> Vocabulary:
    return read_vocabulary(load_text_model(resolve_model(SOURCE.model)).tokenizer, VOCABULARY_SIZE)


def schema_grammar(schema: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), "response_format")


@cache
def leaning() -> NDArray[np.float32]:
    """Favour what ends texts, arrays and objects, so that outputs stay short whatever their schema."""
    logits = np.zeros(VOCABULARY_SIZE, np.float32)
    for id_, piece in enumerate(vocabulary().plain_pieces.data):
        logits[id_] -= 0.2 * len(piece)
        if piece[:1] in (b'"', b"}", b"]", b"Z"):
            logits[id_] += 9
    logits[EOS] += 4
    return logits


# 50 MB; most schemas' outputs are short, and all of them have rows of the same few seeds.
@lru_cache(maxsize=256)
def logits_of(seed: int, position: int) -> NDArray[np.float32]:
    """The logits of a made-up model: they depend on the row and the position alone."""
    random = np.random.default_rng((seed, position))
    noise: NDArray[np.float32] = random.standard_normal(VOCABULARY_SIZE, np.float32) * 2
    logits = leaning() + noise
    logits.flags.writeable = False
    return logits


class Rows:
    """Rows that sample one token per step."""

    def __init__(self, opens: Sequence[RowOpen], max_rows: int = 8, context: int = 512) -> None:
        self.rows = RowStates(max_rows, context, page_size=16)
        self.table = SamplingTable(max_rows, VOCABULARY_SIZE, RowMasks(library(), VOCABULARY_SIZE))
        self.running: list[RowOpen] = []
        for opened in opens:
            self.open(opened)

    def open(self, opened: RowOpen) -> None:
        self.rows.open(opened)
        self.table.open(opened)
        self.running.append(opened)

    def close(self, opened: RowOpen) -> None:
        self.running.remove(opened)
        self.rows.close(opened.row)

    def step(self) -> None:
        """Sample a token for each row; those that stop run no longer."""
        slots = np.array([opened.row for opened in self.running], np.int64)
        seeds = [opened.sampling.seed for opened in self.running]
        logits = [logits_of(seed, int(self.rows.lengths[slot])) for seed, slot in zip(seeds, slots, strict=True)]
        tokens = sample(torch.from_numpy(np.stack(logits)), slots, self.rows, self.table).token_ids.numpy()
        stopped = {stop.row for stop in self.rows.append_tokens(slots, tokens.astype(np.int32))}
        self.running = [opened for opened in self.running if opened.row not in stopped]

    def output(self, opened: RowOpen) -> list[int]:
        """What a row has sampled, without the end of the sequence."""
        ids: list[int] = self.rows.token_ids[opened.row, opened.prompt_tokens : self.rows.lengths[opened.row]].tolist()
        return ids[:-1] if ids and ids[-1] == EOS else ids


def bound_row(row: int, grammar: Grammar | None, *, seed: int, length: int = 400, more: Sequence[int] = ()) -> RowOpen:
    """A row that is bound to a grammar, with some of its output there already."""
    return open_row(
        row,
        (*PROMPT, *more),
        prompt=len(PROMPT),
        sampling=SamplingParams(temperature=1.0, seed=seed, grammar=grammar),
        total=len(PROMPT) + length,
        stop=(EOS,),
    )


def finished(opens: Sequence[RowOpen]) -> list[list[int]]:
    """Run rows until all have stopped, and return what they have sampled."""
    rows = Rows(opens)
    while rows.running:
        rows.step()
    return [rows.output(opened) for opened in opens]


def text_of(ids: Sequence[int]) -> str:
    return b"".join(vocabulary().plain_pieces.data[id_] for id_ in ids).decode(errors="replace")
