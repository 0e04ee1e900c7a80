"""Bad grammars harm nobody but themselves."""

from __future__ import annotations

import json
import random
import sys
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from common.errors import InvalidRequestError, UnavailableError
from common.grammars import Grammar, GrammarKind
from services.worker.engine.grammars.library import GrammarLibrary
from services.worker.engine.grammars.vocabulary_source import VocabularySource
from services.worker.grammars.checker import GrammarChecker
from services.worker.grammars.desk import GrammarDesk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SOURCE = VocabularySource("smollm2-135m-instruct", "auto", 49_152, (2,))
GOOD = Grammar(GrammarKind.REGEX, "[0-9]{3}", "regex")


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
async def checker() -> AsyncIterator[GrammarChecker]:
    """The process takes seconds to start, so that all tests share one."""
    made = GrammarChecker(deadline_s=20.0)
    yield made
    await made.close()


async def test_a_good_grammar_is_found_good(checker: GrammarChecker) -> None:
    assert (await checker.check(SOURCE, GOOD)).refusal is None


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_grammar_is_refused_with_a_reason(checker: GrammarChecker, name: str) -> None:
    refusal = (await checker.check(SOURCE, BAD[name])).refusal
    assert refusal
    assert "\n" not in refusal
    assert "/project/" not in refusal


async def test_nothing_that_is_thrown_at_it_ends_the_process(checker: GrammarChecker) -> None:
    await checker.check(SOURCE, GOOD)
    process = checker._process
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
        verdict = await checker.check(SOURCE, Grammar(kind, text, "x"))
        assert verdict.refusal != "it takes too much memory to compile", text
    assert checker._process is process


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
async def test_huge_grammars_harm_at_most_the_process_which_starts_anew(grammar: Grammar) -> None:
    checker = GrammarChecker(deadline_s=3.0)
    try:
        await checker.check(SOURCE, grammar)
        # Only the huge one is to be given up soon.
        checker._deadline_s = 60.0
        assert (await checker.check(SOURCE, GOOD)).refusal is None
    finally:
        await checker.close()


async def test_a_grammar_that_takes_too_long_is_refused_and_its_process_ends() -> None:
    sleeper = "import sys, time\nsys.stdin.readline(); print('{\"elapsed_us\": 0}', flush=True)\ntime.sleep(60)"
    checker = GrammarChecker(deadline_s=0.2, command=(sys.executable, "-c", sleeper))
    try:
        verdict = await checker.check(SOURCE, GOOD)
        assert verdict.refusal == "it takes longer than 0.2 s to compile"
        assert checker._process is None
    finally:
        await checker.close()


async def test_a_process_that_does_not_start_is_not_the_grammars_fault() -> None:
    desk = GrammarDesk(library(), GrammarChecker(deadline_s=1.0, command=(sys.executable, "-c", "")))
    with pytest.raises(UnavailableError):
        await desk.prepare(GOOD)
    await desk.close()


async def test_a_grammar_is_compiled_once_and_a_refusal_is_remembered(checker: GrammarChecker) -> None:
    made = library()
    desk = GrammarDesk(made, checker)
    assert await desk.prepare(GOOD) > 0
    assert made.has(GOOD)
    assert await desk.prepare(GOOD) == 0
    bad = Grammar(GrammarKind.REGEX, "(", "guided_regex")
    with pytest.raises(InvalidRequestError) as first:
        await desk.prepare(bad)
    assert first.value.param == "guided_regex"
    with pytest.raises(InvalidRequestError) as again:
        await GrammarDesk.prepare(desk, Grammar(GrammarKind.REGEX, "(", "regex"))
    assert again.value.param == "regex"


async def test_without_a_vocabulary_grammars_are_not_heeded(checker: GrammarChecker) -> None:
    assert await GrammarDesk(GrammarLibrary(), checker).prepare(BAD["no root"]) == 0


def library() -> GrammarLibrary:
    made = GrammarLibrary()
    made.serve(SOURCE)
    return made
