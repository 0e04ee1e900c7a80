"""Bad grammars harm nobody but themselves."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from common.errors import UnavailableError
from common.grammars import Grammar, GrammarKind
from common.models import resolve
from common.tokenization import load_text_model
from services.worker.engine.grammars.compiler import Compiler
from services.worker.engine.grammars.matcher import Matcher
from services.worker.engine.grammars.vocabulary_source import VocabularySource
from services.worker.grammars.process import CompileProcess
from tests.waiting import is_running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SOURCE = VocabularySource("smollm2-135m-instruct", "auto", 49_152, (2,))
GOOD = Grammar(GrammarKind.REGEX, "[0-9]{3}", "regex")


# Loads a vocabulary, and compiles for ever.
SLEEPER = """import sys, time
sys.stdin.readline()
print('{"elapsed_us": 0, "bytes": 0}', flush=True)
time.sleep(600)
"""


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
async def process() -> AsyncIterator[CompileProcess]:
    """The process takes seconds to start, so that all tests share one."""
    made = await CompileProcess.start(SOURCE)
    yield made
    await made.kill()


async def test_a_good_grammar_comes_back_compiled(process: CompileProcess) -> None:
    verdict = await process.compile(GOOD)
    assert verdict.refusal is None
    matcher = Matcher(Compiler(SOURCE).load(verdict.data), SOURCE.vocabulary_size)
    vocabulary = load_text_model(resolve(SOURCE.model)).tokenizer
    assert [matcher.accept(vocabulary.encode(text).ids[0]) for text in ("1", "x", "2", "3", "4")] == [
        True,
        False,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_grammar_is_refused_with_a_reason(process: CompileProcess, name: str) -> None:
    refusal = (await process.compile(BAD[name])).refusal
    assert refusal
    assert "\n" not in refusal
    assert "/project/" not in refusal


async def test_nothing_that_is_thrown_at_it_ends_the_process(process: CompileProcess) -> None:
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
    for number in range(200):
        text = "".join(random_.choice(pieces) for _ in range(random_.randrange(1, 24)))
        kind = (GrammarKind.EBNF, GrammarKind.REGEX, GrammarKind.JSON_SCHEMA, GrammarKind.STRUCTURAL_TAG)[number % 4]
        verdict = await process.compile(Grammar(kind, text, "x"))
        assert verdict.refusal != "it takes too much memory to compile", text
    assert process.is_alive


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
async def test_huge_grammars_harm_at_most_their_process(grammar: Grammar) -> None:
    process = await CompileProcess.start(SOURCE)
    try:
        async with asyncio.timeout(3.0):
            await process.compile(grammar)
    except TimeoutError:
        assert not is_running(process.pid)
    finally:
        await process.kill()


async def test_cancelling_ends_the_process() -> None:
    process = await CompileProcess.start(SOURCE, (sys.executable, "-c", SLEEPER))
    assert is_running(process.pid)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await process.compile(GOOD)
    assert not is_running(process.pid)
    assert not process.is_alive


async def test_a_process_that_does_not_start_is_not_the_grammars_fault() -> None:
    with pytest.raises(UnavailableError):
        await CompileProcess.start(SOURCE, (sys.executable, "-c", ""))
