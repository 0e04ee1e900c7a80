"""Bad grammars harm nobody but themselves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from common.errors import UnavailableError
from common.grammars import Grammar, GrammarKind
from common.models import resolve_model
from common.tokenization import load_text_model
from services.worker.engine.grammars.compiler import Compiler
from services.worker.engine.grammars.matcher import Matcher
from services.worker.engine.grammars.vocabulary_source import VocabularySource
from services.worker.grammars.process import LIBRARY, CompileProcesses, CompileResult
from tests.examples import is_exploring
from tests.waiting import is_running, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SOURCE = VocabularySource("smollm2-135m-instruct", "auto", 49_152, (2,))
GOOD = Grammar(GrammarKind.REGEX, "[0-9]{3}", "regex")


# Seconds of work for several threads.
HOSTILE = Grammar(GrammarKind.REGEX, r"[\u0000-\uffff]{0,100000}", "regex")


def schema(value: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value), "response_format")


def ebnf(text: str) -> Grammar:
    return Grammar(GrammarKind.EBNF, text, "ebnf")


BAD = {
    "a regex that is none": Grammar(GrammarKind.REGEX, "(abc", "regex"),
    "a regex that looks ahead": Grammar(GrammarKind.REGEX, "(?=a)b", "regex"),
    "a rule that is not there": ebnf("root ::= other"),
    "no root": ebnf('a ::= "x"'),
    "rules of itself alone": ebnf("root ::= root"),
    "rules in a circle": ebnf("root ::= a\na ::= b\nb ::= a"),
    "a schema of itself alone": schema({"$ref": "#"}),
    "a schema in a circle": schema(
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    ),
    "a reference to nothing": schema({"$ref": "#/$defs/none"}),
    "what would be ignored": schema({"type": "string", "pattern": "^a+$", "maxLength": 3}),
    "no JSON": Grammar(GrammarKind.JSON_SCHEMA, "{", "response_format"),
    "a tag that is none": Grammar(GrammarKind.STRUCTURAL_TAG, '{"type": "structural_tag", "format": {}}', "x"),
    "a token that is none": Grammar(
        GrammarKind.STRUCTURAL_TAG, '{"type": "structural_tag", "format": {"type": "token", "token": "<|no|>"}}', "x"
    ),
}


# Starting the process takes seconds, and minutes where many others start.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def processes() -> AsyncIterator[CompileProcesses]:
    """The template takes seconds to start, so that all tests share one."""
    made = CompileProcesses()
    yield made
    await made.close()


async def compiled(processes: CompileProcesses, grammar: Grammar) -> CompileResult:
    process = await processes.take(SOURCE)
    try:
        return await process.compile(grammar)
    finally:
        await process.kill()


async def test_a_valid_grammar_is_returned_compiled(processes: CompileProcesses) -> None:
    result = await compiled(processes, GOOD)
    assert result.refusal is None
    matcher = Matcher(Compiler(SOURCE).load(result.data), SOURCE.vocabulary_size)
    vocabulary = load_text_model(resolve_model(SOURCE.model)).tokenizer
    assert [matcher.accept(vocabulary.encode(text).ids[0]) for text in ("1", "x", "2", "3", "4")] == [
        True,
        False,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_grammar_is_refused_with_a_reason(processes: CompileProcesses, name: str) -> None:
    refusal = (await compiled(processes, BAD[name])).refusal
    assert refusal
    assert "\n" not in refusal
    assert "/project/" not in refusal


async def test_no_random_grammar_ends_the_compile_template(processes: CompileProcesses) -> None:
    await compiled(processes, GOOD)
    template = processes._template
    random_ = random.Random(7)
    pieces = [
        "root ::= ",
        '"a"',
        "|",
        "(",
        ")",
        "[a-z",
        "]",
        "*",
        "+",
        "{3",
        ",9}",
        "?",
        "\\",
        "root",
        "\n",
        "x ::= ",
        "\x00",
        "é",
    ]
    for number in range(1000 if is_exploring() else 80):
        text = "".join(random_.choice(pieces) for _ in range(random_.randrange(1, 24)))
        kind = (GrammarKind.EBNF, GrammarKind.REGEX, GrammarKind.JSON_SCHEMA, GrammarKind.STRUCTURAL_TAG)[number % 4]
        result = await compiled(processes, Grammar(kind, text, "x"))
        assert result.refusal != "it takes too much memory to compile", text
    assert processes._template is template


@pytest.mark.slow
@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(GrammarKind.JSON_SCHEMA, '{"items":' * 12_000 + "{}" + "}" * 12_000, "response_format"),
        pytest.param(ebnf("root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000), marks=pytest.mark.soak),
        pytest.param(Grammar(GrammarKind.REGEX, "(" * 20_000 + "a" + ")" * 20_000, "regex"), marks=pytest.mark.soak),
        Grammar(GrammarKind.REGEX, "((((a{1,999}){1,999}){1,999}){1,999}){1,999}", "regex"),
        ebnf("\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)).replace("r0 ", "root ", 1) + '\nr60 ::= "a"'),
    ],
    ids=["deep schema", "deep rules", "deep regex", "repetitions of repetitions", "rules that double"],
)
async def test_huge_grammars_harm_at_most_their_process(processes: CompileProcesses, grammar: Grammar) -> None:
    process = await processes.take(SOURCE)
    template = processes._template
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.5):
            await process.compile(grammar)
    await process.kill()
    await until(lambda: not is_running(process.pid))
    assert (await compiled(processes, GOOD)).refusal is None
    assert processes._template is template


async def test_a_process_that_is_busy_compiling_can_be_killed(processes: CompileProcesses) -> None:
    process = await processes.take(SOURCE)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await process.compile(HOSTILE)
    assert is_running(process.pid)
    await process.kill()
    await until(lambda: not is_running(process.pid))


async def test_two_processes_compile_at_a_time(processes: CompileProcesses) -> None:
    slow = await processes.take(SOURCE)
    compiling = asyncio.create_task(slow.compile(HOSTILE))
    assert (await compiled(processes, GOOD)).refusal is None
    assert not compiling.done()
    # As the kernel does where memory is short.
    os.kill(slow.pid, signal.SIGKILL)
    assert (await compiling).refusal == "it takes too much memory to compile"
    await slow.kill()


async def test_a_template_that_died_is_started_again(processes: CompileProcesses) -> None:
    await (await processes.take(SOURCE)).kill()
    assert processes._template is not None
    await processes._template.kill()
    assert (await compiled(processes, GOOD)).refusal is None


async def test_processes_end_with_the_template(processes: CompileProcesses) -> None:
    process = await processes.take(SOURCE)
    compiling = asyncio.create_task(process.compile(HOSTILE))
    await asyncio.sleep(0.1)
    await processes.close()
    await until(lambda: not is_running(process.pid))
    await compiling


async def test_a_compile_process_that_does_not_start_is_reported_as_unavailable() -> None:
    broken = CompileProcesses((sys.executable, "-c", ""))
    for _ in range(2):
        with pytest.raises(UnavailableError):
            await broken.take(SOURCE)
    await broken.close()


# A template that loads any vocabulary, and forks nothing.
TEMPLATE = (sys.executable, "-c", "import sys; sys.stdin.readline(); print('{}', flush=True); sys.stdin.read()")


async def test_a_template_that_was_started_ahead_loads_the_first_vocabulary_and_no_other() -> None:
    made = CompileProcesses(TEMPLATE)
    await made.start()
    ahead = made._template
    assert ahead is not None
    await made.start()
    await made.warm(SOURCE)
    await made.start()
    await made.warm(SOURCE)
    assert made._template is ahead
    await made.warm(replace(SOURCE, vocabulary_size=49_153))
    assert made._template is not ahead
    assert ahead.has_ended
    await made.close()


async def test_a_template_that_was_started_ahead_and_died_is_started_again() -> None:
    made = CompileProcesses(TEMPLATE)
    await made.start()
    ahead = made._template
    assert ahead is not None
    await ahead.kill()
    await made.warm(SOURCE)
    assert made._template is not ahead
    await made.close()


async def test_a_template_imports_the_library_before_it_knows_a_vocabulary() -> None:
    made = CompileProcesses()
    await made.start()
    assert made._template is not None
    maps = Path(f"/proc/{made._template.pid}/maps")
    await until(lambda: LIBRARY in maps.read_text())
    await made.close()
