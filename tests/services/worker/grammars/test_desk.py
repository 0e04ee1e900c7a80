"""Compilations are fair between subjects, bounded for each, stopped when unwanted, and seen by their own scope only."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from common.errors import InvalidRequestError, QueueFullError, UnavailableError
from common.grammars import GrammarScope
from services.worker.engine.grammars.library import GrammarLibrary
from services.worker.engine.grammars.vocabulary_source import VocabularySource
from services.worker.grammars import desk as desk_module
from services.worker.grammars.desk import GrammarDesk, GrammarLimits
from services.worker.grammars.process import CompileProcess, CompileProcesses
from tests.services.worker.grammars.fakes import (
    ANN,
    BOB,
    RIVAL,
    SOURCE,
    Clock,
    FakeCompiler,
    FakeProcess,
    Work,
    eventually,
    grammar,
    library,
)
from tests.waiting import is_running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from common.grammars import Grammar

REAL = VocabularySource("smollm2-135m-instruct", "auto", 49_152, (2,))
# Long enough that what takes no time never takes longer, on a busy machine, too.
SLICE_S = 0.3
LIMITS = GrammarLimits(timeout_s=60.0, slice_s=SLICE_S, open_per_subject=200, seconds_per_minute=30.0)


@dataclass
class Setup:
    desk: GrammarDesk
    work: Work
    clock: Clock
    library: GrammarLibrary

    def ask(self, *grammars: Grammar) -> list[asyncio.Task[int]]:
        return [asyncio.create_task(self.desk.prepare(one)) for one in grammars]


@asynccontextmanager
async def setup(limits: GrammarLimits = LIMITS) -> AsyncIterator[Setup]:
    work, clock, made = Work(), Clock(), library()
    desk = GrammarDesk(made, work, limits, clock)
    try:
        yield Setup(desk, work, clock, made)
    finally:
        await desk.close()
    assert not work.alive


def names(prefix: str, number: int) -> list[str]:
    return [f"{prefix}{index}" for index in range(number)]


@pytest.mark.parametrize("compiles", [True, False])
async def test_the_vocabulary_is_loaded_before_the_first_grammar_where_it_is_used(compiles: bool) -> None:
    made: list[VocabularySource] = []

    def make(source: VocabularySource) -> FakeCompiler:
        made.append(source)
        return FakeCompiler()

    work, vocabulary = Work(), GrammarLibrary(make)
    desk = GrammarDesk(vocabulary, work, LIMITS)
    await desk.warm(compiles=compiles)
    assert not made, "there is no model yet"
    vocabulary.serve(SOURCE)
    await desk.warm(compiles=compiles)
    assert made == [SOURCE]
    assert work.warmed == ([SOURCE] if compiles else [])
    await desk.prepare(grammar("first"))
    assert made == [SOURCE]
    await desk.close()


async def test_a_process_that_does_not_start_ahead_is_tried_again_for_the_first_grammar() -> None:
    async with setup() as it:
        it.work.cannot_start = True
        await it.desk.warm(compiles=True)
        it.work.cannot_start = False
        await asyncio.gather(*it.ask(grammar("first")))
        assert it.work.texts() == ["first"]


async def test_a_desk_begins_until_it_is_closed_and_a_failure_does_not_end_the_start() -> None:
    async with setup() as it:
        await it.desk.begin()
        it.work.cannot_start = True
        await it.desk.begin()
        assert it.work.begun == 2
        await it.desk.rest()
        assert it.work.closed == 1
        await it.desk.close()
        await it.desk.begin()
        assert it.work.begun == 2


async def test_a_victim_waits_for_one_slice_of_an_attacker_with_a_hundred_grammars() -> None:
    async with setup() as it:
        hostile = names("slow", 100)
        it.work.hold(*hostile)
        it.ask(*(grammar(text, RIVAL) for text in hostile))
        await eventually(lambda: it.work.started)
        [victim] = it.ask(grammar("quick", ANN))
        async with asyncio.timeout(30):
            assert await victim == 1000
        # The attacker gets no second slice while its first grammar goes on.
        for number in range(3):
            assert await it.desk.prepare(grammar(f"later{number}", ANN)) == 1000
        assert it.work.texts() == ["slow0", "quick", "later0", "later1", "later2"]


async def test_a_victim_waits_for_one_slice_of_each_hostile_subject() -> None:
    async with setup() as it:
        it.work.hold(*names("slow", 20))
        rivals = [GrammarScope("rival", f"key/{number % 4}") for number in range(20)]
        it.ask(*map(grammar, names("slow", 20), rivals))
        await eventually(lambda: it.work.started)
        assert await it.desk.prepare(grammar("quick", ANN)) == 1000
        # The one that moved on; its tenant has had its turn, so the victim comes next.
        assert it.work.texts() == ["slow0", "quick"]
        await eventually(lambda: len(it.work.started) == 5)
        assert await it.desk.prepare(grammar("later", ANN)) == 1000
        assert it.work.texts() == ["slow0", "quick", "slow1", "slow2", "slow3", "later"]


async def test_turns_go_round_tenants_and_then_subjects() -> None:
    async with setup() as it:
        it.work.hold("first")
        it.ask(grammar("first", RIVAL))
        await eventually(lambda: it.work.started)
        tasks = it.ask(
            *(grammar(text, ANN) for text in ("a0", "a1", "a2")),
            *(grammar(text, BOB) for text in ("b0", "b1")),
            *(grammar(text, RIVAL) for text in ("r0", "r1")),
        )
        await asyncio.sleep(0)
        it.work.gates["first"].set()
        await asyncio.gather(*tasks)
        assert it.work.texts() == ["first", "a0", "r0", "b0", "r1", "a1", "b1", "a2"]


async def test_a_grammar_that_takes_longer_than_a_slice_continues_while_others_compile() -> None:
    async with setup() as it:
        it.work.hold("long")
        [long] = it.ask(grammar("long"))
        await eventually(lambda: it.work.started)
        for text in names("quick", 5):
            assert await it.desk.prepare(grammar(text, BOB)) == 1000
        it.work.gates["long"].set()
        assert await long == 1000
        assert it.work.texts().count("long") == 1


async def test_a_second_long_compilation_is_stopped_and_restarted_after_the_first() -> None:
    async with setup() as it:
        it.work.hold("long0", "long1")
        first, second = it.ask(grammar("long0", RIVAL), grammar("long1", ANN))
        await eventually(lambda: [one.text for one in it.work.stopped] == ["long1"])
        assert await it.desk.prepare(grammar("quick", BOB)) == 1000
        for gate in it.work.gates.values():
            gate.set()
        assert await first == 1000
        assert await second == 1000
        assert it.work.texts() == ["long0", "long1", "quick", "long1"]


async def test_a_grammar_that_takes_too_long_is_refused_and_stopped() -> None:
    async with setup(GrammarLimits(timeout_s=0.2, slice_s=0.1)) as it:
        it.work.hold("endless")
        with pytest.raises(InvalidRequestError, match=r"it takes longer than 0\.2 s to compile"):
            await it.desk.prepare(grammar("endless"))
        await eventually(lambda: [one.text for one in it.work.stopped] == ["endless"])
        # The machine may have been busy: it may be tried again. What is wrong with a grammar is remembered.
        it.work.gates["endless"].set()
        assert await it.desk.prepare(grammar("endless")) == 1000
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match="it is bad"):
                await it.desk.prepare(grammar("bad"))
        assert it.work.texts() == ["endless", "endless", "bad"]


async def test_open_compilations_are_limited_per_subject_and_others_are_not_affected() -> None:
    limits = GrammarLimits(slice_s=SLICE_S, open_per_subject=3)
    async with setup(limits) as it:
        hostile = names("slow", 3)
        it.work.hold(*hostile)
        open_ = it.ask(*(grammar(text, RIVAL) for text in hostile))
        await eventually(lambda: it.work.started)
        # Another salt is another scope, but the same subject.
        with pytest.raises(QueueFullError, match="3 grammars of this user") as raised:
            await it.desk.prepare(grammar("more", GrammarScope(RIVAL.tenant, RIVAL.subject, "salt")))
        assert raised.value.param == "regex"
        assert await it.desk.prepare(grammar("quick", ANN)) == 1000
        # The same grammar waits with the first call.
        again = it.ask(grammar("slow0", RIVAL))
        for gate in it.work.gates.values():
            gate.set()
        await asyncio.gather(*open_, *again)
        assert await it.desk.prepare(grammar("more", RIVAL)) == 1000


async def test_compile_seconds_are_bounded_per_subject_and_come_back_with_time() -> None:
    async with setup(GrammarLimits(slice_s=SLICE_S, seconds_per_minute=10.0)) as it:
        it.work.hold("slow")
        [slow] = it.ask(grammar("slow", RIVAL))
        await eventually(lambda: it.work.started)
        it.clock.now += 25.0
        it.work.gates["slow"].set()
        await slow
        with pytest.raises(QueueFullError, match="more than the 10 s a minute") as raised:
            await it.desk.prepare(grammar("more", RIVAL))
        assert raised.value.retry_after_ms == pytest.approx(90_000)
        assert await it.desk.prepare(grammar("quick", ANN)) == 1000
        # What is compiled already is served.
        assert await it.desk.prepare(grammar("slow", RIVAL)) == 0
        it.clock.now += 91.0
        assert await it.desk.prepare(grammar("more", RIVAL)) == 1000


async def test_time_that_other_work_took_from_a_compilation_is_not_charged() -> None:
    async with setup(GrammarLimits(slice_s=SLICE_S, seconds_per_minute=10.0)) as it:
        it.work.cpu_seconds = 2.0
        it.work.hold("slow")
        [slow] = it.ask(grammar("slow", RIVAL))
        await eventually(lambda: it.work.started)
        it.clock.now += 25.0
        it.work.gates["slow"].set()
        await slow
        assert await it.desk.prepare(grammar("more", RIVAL)) == 1000


async def test_a_waiting_grammar_is_refused_once_its_subject_s_seconds_are_used_up() -> None:
    async with setup(GrammarLimits(slice_s=SLICE_S, seconds_per_minute=10.0)) as it:
        it.work.hold("slow")
        slow, waiting = it.ask(grammar("slow", RIVAL), grammar("next", RIVAL))
        await eventually(lambda: it.work.started)
        it.clock.now += 11.0
        it.work.gates["slow"].set()
        assert await slow == 1000
        with pytest.raises(QueueFullError, match="a minute"):
            await waiting
        assert it.work.texts() == ["slow"]


async def test_a_stopped_compilation_is_charged_too() -> None:
    async with setup(GrammarLimits(slice_s=SLICE_S, seconds_per_minute=10.0)) as it:
        it.work.hold("slow")
        [slow] = it.ask(grammar("slow", RIVAL))
        await eventually(lambda: it.work.started)
        it.clock.now += 11.0
        slow.cancel()
        await eventually(lambda: it.work.stopped)
        await eventually(lambda: not it.work.alive)
        with pytest.raises(QueueFullError, match="a minute"):
            await it.desk.prepare(grammar("slow", RIVAL))


async def test_compiling_stops_when_the_last_call_is_cancelled() -> None:
    async with setup() as it:
        it.work.hold("slow")
        first, second = it.ask(grammar("slow"), grammar("slow"))
        await eventually(lambda: it.work.started)
        first.cancel()
        await asyncio.sleep(0.05)
        assert not it.work.stopped
        second.cancel()
        await eventually(lambda: it.work.stopped)
        # A new call starts again, and nothing is left in its way.
        it.work.gates["slow"].set()
        assert await it.desk.prepare(grammar("slow")) == 1000


async def test_a_grammar_cancelled_before_its_compilation_takes_a_step_leaves_its_place_to_the_next() -> None:
    async with setup() as it:
        call = it.desk.prepare(grammar("gone", ANN))
        call.send(None)
        with pytest.raises(asyncio.CancelledError):
            call.throw(asyncio.CancelledError())
        async with asyncio.timeout(60):
            assert await it.desk.prepare(grammar("next", BOB)) == 1000
        assert it.work.texts() == ["next"]


async def test_a_grammar_restarted_as_its_first_compilation_ends_keeps_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with setup() as it:
        it.work.hold("long", "other")
        [long] = it.ask(grammar("long", BOB))
        await eventually(lambda: it.work.started)
        [other] = it.ask(grammar("other", ANN))
        nexts: list[asyncio.Task[int]] = []
        kill = FakeProcess.kill

        async def kill_slowly(process: FakeProcess) -> None:
            await kill(process)
            if it.work.stopped and not it.work.gates["long"].is_set():
                # The second place becomes free, and a call fills it before the first compilation's task has ended.
                it.work.gates["long"].set()
                await long
                await asyncio.sleep(0.01)
                nexts.extend(it.ask(grammar("next", RIVAL)))

        monkeypatch.setattr(FakeProcess, "kill", kill_slowly)
        await eventually(lambda: nexts)
        assert await nexts[0] == 1000
        await eventually(lambda: it.work.texts().count("other") == 2)
        other.cancel()
        await eventually(lambda: not it.work.alive)


async def test_a_waiting_grammar_is_removed_when_it_is_cancelled() -> None:
    async with setup() as it:
        it.work.hold("slow0", "slow1")
        it.ask(grammar("slow0", RIVAL), grammar("slow1", BOB))
        await eventually(lambda: len(it.work.started) == 2)
        [waiting] = it.ask(grammar("quick"))
        await asyncio.sleep(0)
        waiting.cancel()
        assert await it.desk.prepare(grammar("other")) == 1000
        assert "quick" not in it.work.texts()


async def test_equal_grammars_of_one_scope_are_compiled_once() -> None:
    async with setup() as it:
        assert await asyncio.gather(*it.ask(*[grammar("same")] * 5)) == [1000] * 5
        assert await it.desk.prepare(grammar("same")) == 0
        assert it.work.texts() == ["same"]


@pytest.mark.parametrize("other", [BOB, RIVAL, GrammarScope(ANN.tenant, ANN.subject, "salt")])
@pytest.mark.parametrize("text", ["same", "bad"])
async def test_another_scope_compiles_the_same_again(text: str, other: GrammarScope) -> None:
    async with setup() as it:
        results = []
        for scope in (ANN, other):
            try:
                results.append(str(await it.desk.prepare(grammar(text, scope))))
            except InvalidRequestError as error:
                results.append(error.message)
        assert results[0] == results[1]
        assert results[0] != "0"
        assert [one.scope for one in it.work.started] == [ANN, other]


async def test_too_many_waiting_grammars_are_refused_from_the_tenant_with_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk_module, "MAX_WAITING", 20)
    async with setup() as it:
        hostile = names("slow", 40)
        it.work.hold(*hostile)
        rivals = [GrammarScope("rival", f"key/{index % 4}") for index in range(40)]
        tasks = it.ask(*map(grammar, hostile, rivals))
        await eventually(lambda: sum(task.done() for task in tasks) >= 18)
        assert await it.desk.prepare(grammar("quick", ANN)) == 1000
        refused = [task for task in tasks if task.done()]
        assert all(isinstance(task.exception(), QueueFullError) for task in refused)


async def test_a_pool_that_cannot_start_is_reported_as_unavailable() -> None:
    class Broken(Work):
        async def take(self, source: VocabularySource) -> FakeProcess:
            raise UnavailableError("no")

    desk = GrammarDesk(library(), Broken(), LIMITS)
    for _ in range(2):
        with pytest.raises(UnavailableError):
            await desk.prepare(grammar("x"))
    await desk.close()


async def test_without_a_vocabulary_grammars_are_not_compiled() -> None:
    work = Work()
    desk = GrammarDesk(GrammarLibrary(), work, LIMITS)
    assert await desk.prepare(grammar("x")) == 0
    assert not work.started


@pytest.mark.timeout(300)
async def test_a_cancelled_compilation_leaves_no_process() -> None:
    class Recorded(CompileProcesses):
        def __init__(self) -> None:
            super().__init__()
            self.taken: list[CompileProcess] = []

        async def take(self, source: VocabularySource) -> CompileProcess:
            self.taken.append(await super().take(source))
            return self.taken[-1]

    made, processes = GrammarLibrary(), Recorded()
    made.serve(REAL)
    desk = GrammarDesk(made, processes, LIMITS)
    # Seconds of work for several threads.
    hostile = r"[\u0000-\uffff]{0,100000}"
    calls = [asyncio.create_task(desk.prepare(grammar(hostile, scope))) for scope in (ANN, RIVAL)]
    await eventually(lambda: processes.taken, 120)
    pid = processes.taken[0].pid
    assert is_running(pid)
    for call in calls:
        call.cancel()
    await eventually(lambda: not is_running(pid))
    await eventually(lambda: desk._first is None and desk._second is None)
    # Others are served as before.
    assert await desk.prepare(grammar("[0-9]{3}", BOB)) > 0
    await desk.close()
    for process in processes.taken:
        await eventually(lambda process=process: not is_running(process.pid))  # type: ignore[misc]
