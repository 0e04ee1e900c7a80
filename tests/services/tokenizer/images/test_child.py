"""Answers of a decoding process that fails itself."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from services.tokenizer.images import child
from services.tokenizer.images.child import ChildLimits, Cutting, read_frame, serve, write_frame
from services.tokenizer.images.faults import MOST_CHARACTERS, described

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

    from services.tokenizer.images.processor import JsonObject, Values

LIMITS = ChildLimits(max_pixels=100, max_frames=2, memory_bytes=1, cpu_seconds=1e6)


class Failing(Cutting):
    """Fails for files that say so."""

    def cut(self, question: JsonObject, files: Sequence[bytes]) -> tuple[JsonObject, Values]:
        if files[0] == b"fail":
            question["side"]
        return {"grid": [1]}, np.zeros(1, np.uint8)


def test_an_error_of_its_own_is_named_with_its_place_and_the_process_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "allow_time", lambda _: None)
    questions, answers = BytesIO(), BytesIO()
    question = json.dumps({"detail": "auto", "frames": 0, "is_video_file": False, "rate": None}).encode()
    write_frame(questions, question, b"fail", question, b"good")
    questions.seek(0)
    serve(questions, answers, Failing(None, LIMITS, None))  # type: ignore[arg-type]  # nothing is cut
    answers.seek(0)
    failed, nothing, good, values = (read_frame(answers) for _ in range(4))
    assert list(json.loads(failed)) == ["failure"]
    assert json.loads(failed)["failure"].startswith(f"KeyError: 'side' ({Path(__file__).name}:")
    assert nothing == b""
    assert json.loads(good) == {"grid": [1]}
    assert values == b"\0"


def test_descriptions_are_short_and_keep_the_place() -> None:
    try:
        raise ValueError("x" * 10_000)
    except ValueError as error:
        text = described(error)
    assert len(text) == MOST_CHARACTERS
    assert text.startswith("ValueError: xxx")
    assert text.endswith("in test_descriptions_are_short_and_keep_the_place)")
