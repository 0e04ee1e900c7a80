from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from deploy.evaluation.bench.workloads.sharegpt import ShareGptOptions, sharegpt_sessions

if TYPE_CHECKING:
    from pathlib import Path


def conversation(*messages: tuple[str, str]) -> dict[str, object]:
    return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in messages]}


TWO_TURNS = conversation(("human", "q" * 40), ("gpt", "a" * 80), ("human", "Q" * 40), ("gpt", "A" * 40))


def write(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_a_turn_is_a_question_and_the_length_of_its_answer(tmp_path: Path) -> None:
    file = write(tmp_path / "s.json", [TWO_TURNS])
    (session,) = sharegpt_sessions(file, ShareGptOptions(count=5))
    (request,) = session.requests
    assert [(segment.role, segment.text) for segment in request.segments] == [("user", "q" * 40)]
    assert (request.input_tokens, request.output_tokens) == (10, 20)
    assert request.user == "user-00000"


def test_later_turns_carry_the_history(tmp_path: Path) -> None:
    file = write(tmp_path / "s.json", [TWO_TURNS])
    (session,) = sharegpt_sessions(file, ShareGptOptions(count=1, turns=4, output_tokens=7))
    assert [[segment.role for segment in request.segments] for request in session.requests] == [
        ["user"],
        ["user", "assistant", "user"],
    ]
    assert {request.output_tokens for request in session.requests} == {7}


def test_conversations_of_another_form_are_left_out(tmp_path: Path) -> None:
    entries = [
        conversation(("human", "x" * 10_000), ("gpt", "y")),
        conversation(("gpt", "hello"), ("human", "?")),
        conversation(("human", "alone")),
        {"something": "else"},
        "text",
        conversation(("system", "be kind"), ("human", "hi"), ("gpt", "hello")),
        TWO_TURNS,
    ]
    sessions = sharegpt_sessions(write(tmp_path / "s.json", entries), ShareGptOptions(count=99))
    assert {session.requests[0].user for session in sessions} == {"user-00005", "user-00006"}


def test_the_choice_is_a_function_of_the_seed(tmp_path: Path) -> None:
    file = write(tmp_path / "s.json", [conversation(("human", f"q{i}"), ("gpt", "a")) for i in range(50)])
    options = ShareGptOptions(count=10)
    assert len(sharegpt_sessions(file, options)) == 10
    assert sharegpt_sessions(file, options, 1) == sharegpt_sessions(file, options, 1)
    assert sharegpt_sessions(file, options, 1) != sharegpt_sessions(file, options, 2)


@pytest.mark.parametrize("content", ["[", "{}", "[]", "[1, 2]"])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "s.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"s\.json"):
        sharegpt_sessions(file, ShareGptOptions(count=1))
