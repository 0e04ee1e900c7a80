"""Compiled grammars are kept by scope, within limits that subjects cannot push each other out of."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from common.grammars import Grammar, GrammarScope
from services.worker.engine.grammars.library import NICENESS, GrammarLibrary
from tests.services.worker.grammars.fakes import ANN, BOB, RIVAL, SIZE, SOURCE, Clock, FakeCompiler, grammar, library

if TYPE_CHECKING:
    from services.worker.engine.grammars.vocabulary_source import VocabularySource


def put(made: GrammarLibrary, *grammars: Grammar, seconds: float = 0.0) -> None:
    for one in grammars:
        made.load(SOURCE, one, b"%d" % SIZE, seconds).result(timeout=60)


@pytest.mark.parametrize("other", [BOB, RIVAL, GrammarScope(ANN.tenant, ANN.subject, "salt")])
def test_a_grammar_is_available_to_its_own_scope_only(other: GrammarScope) -> None:
    made = library()
    put(made, grammar("x", ANN))
    assert made.has(grammar("x", ANN))
    assert not made.has(grammar("x", other))


def test_a_subject_above_its_share_loses_its_own_oldest_grammars() -> None:
    made = library(subject_bytes=3 * SIZE)
    put(made, grammar("victim", BOB), *(grammar(f"g{index}") for index in range(10)))
    assert [made.has(grammar(f"g{index}")) for index in range(10)] == [False] * 7 + [True] * 3
    assert made.has(grammar("victim", BOB))


def test_above_the_total_the_tenant_and_subject_with_most_lose_grammars() -> None:
    made = library(cache_bytes=10 * SIZE)
    put(made, *(grammar(f"a{index}", ANN) for index in range(2)), grammar("b", BOB))
    put(made, *(grammar(f"r{index}", RIVAL) for index in range(50)))
    put(made, *(grammar("r", GrammarScope("rival", f"key/{index}")) for index in range(50)))
    assert all(made.has(one) for one in (grammar("a0", ANN), grammar("a1", ANN), grammar("b", BOB)))


def test_the_newest_stays_even_if_it_alone_is_too_large() -> None:
    made = library(subject_bytes=1, cache_bytes=1)
    put(made, grammar("x"), grammar("y"))
    assert [made.has(grammar("x")), made.has(grammar("y"))] == [False, True]


def test_a_grammar_compiled_for_another_vocabulary_is_not_used() -> None:
    made = library()
    made.serve(SOURCE.__class__("other", "fake", 16, (2,)))
    put(made, grammar("x"))
    assert not made.has(grammar("x"))


def test_a_dropped_grammar_that_takes_long_is_not_compiled_during_a_pass() -> None:
    compiler = FakeCompiler()
    made = GrammarLibrary(lambda _source: compiler, subject_bytes=SIZE)
    made.serve(SOURCE)
    put(made, grammar("slow"), seconds=20.0)
    put(made, grammar("quick"), seconds=0.01)
    put(made, grammar("last"))
    assert made.matcher(grammar("slow")) is None
    assert compiler.compiled == []
    made.begin(grammar("quick"))
    made.close()
    made._large.shutdown(wait=True)
    assert [one.text for one in compiler.compiled] in (["quick"], [])
    assert grammar("quick") in made._entries


def test_dropped_grammars_of_a_tenant_make_passes_wait_for_a_second_a_minute_in_all() -> None:
    compiler, clock = FakeCompiler(), Clock()
    made = GrammarLibrary(lambda _source: compiler, subject_bytes=SIZE, clock=clock)
    made.serve(SOURCE)

    def waited_for(scope: GrammarScope, prefix: str) -> int:
        grammars = [grammar(f"{prefix}{number}", scope) for number in range(24)]
        put(made, *grammars, seconds=0.2)
        put(made, grammar(f"{prefix}last", scope), seconds=0.2)
        for one in grammars:
            made.begin(one)
        return sum(one in made._entries for one in grammars)

    assert waited_for(RIVAL, "a") == 5
    assert waited_for(RIVAL, "b") == 0
    assert waited_for(ANN, "c") == 5
    clock.now += 30
    assert waited_for(RIVAL, "d") == 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads have priorities of their own on Linux")
@pytest.mark.parametrize("beside_requests", [True, False])
def test_a_vocabulary_is_loaded_at_low_priority_only_beside_requests(beside_requests: bool) -> None:
    values: list[int] = []

    def make(_source: VocabularySource) -> FakeCompiler:
        values.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return FakeCompiler()

    made = GrammarLibrary(make)
    made.serve(SOURCE)
    made.warm(beside_requests=beside_requests).result(timeout=60)
    made.close()
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    assert values == [NICENESS if beside_requests else ours]
