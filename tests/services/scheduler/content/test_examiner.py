from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING

import numpy as np
import pytest

from services.scheduler.content import child as examiner_module
from services.scheduler.content.child import CheckVerdict, Examiner, make_detectors
from services.scheduler.content.interface import DetectorOptions, RulesError
from services.scheduler.content.text import Transcriber
from tests.services.scheduler.content.corpus import drawn
from tests.services.scheduler.content.detectors import WordDetector

if TYPE_CHECKING:
    from common.tokenization import TextModel
    from common.types import TokenIds

HERE = "tests.services.scheduler.content.detectors"


def ids_of(model: TextModel, text: str) -> TokenIds:
    return np.array(model.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)


def examiner(model: TextModel, *names: str) -> Examiner:
    made = Examiner(Transcriber(model), make_detectors(names or ("patterns",), DetectorOptions()))
    made.refresh()
    return made


def test_a_harmless_prompt_may_be_public_as_a_whole(model: TextModel) -> None:
    ids = ids_of(model, "You are the patient guide of a botanical garden.")
    assert examiner(model).examine(ids) == CheckVerdict(len(ids))


def test_only_text_before_a_finding_may_be_public(model: TextModel) -> None:
    before = "You are the assistant of Acme. The key is "
    ids = ids_of(model, f"{before}sk-{drawn(48)} and nothing else.")
    verdict = examiner(model).examine(ids)
    assert verdict.rule == "sk_key"
    kept = model.tokenizer.decode(ids[: verdict.allowed_tokens].tolist(), skip_special_tokens=False)
    assert before.startswith(kept)
    assert len(kept) >= len(before) - 2


def test_all_detectors_are_asked_and_the_strictest_wins(model: TextModel) -> None:
    ids = ids_of(model, f"One. The colour is purple. The key is sk-{drawn(48)}.")
    assert examiner(model, "patterns").examine(ids).rule == "sk_key"
    strict = examiner(model, "patterns", f"{HERE}:WordDetector").examine(ids)
    assert strict.rule == "word"
    assert 0 < strict.allowed_tokens < examiner(model, "patterns").examine(ids).allowed_tokens


def test_unreadable_tokens_cannot_be_public(model: TextModel) -> None:
    ids = np.concatenate([ids_of(model, "Readable."), np.array([9_000_000, 5, 6], np.int32)])
    assert examiner(model).examine(ids) == CheckVerdict(len(ids) - 3, "unreadable")
    assert examiner(model).examine(ids[-3:]) == CheckVerdict(0, "unreadable")


def test_an_empty_input_is_an_error_and_no_permission(model: TextModel) -> None:
    with pytest.raises(RulesError, match="nothing to examine"):
        examiner(model).examine(np.empty(0, np.int32))


def test_without_detectors_nothing_is_judged(model: TextModel) -> None:
    with pytest.raises(RulesError, match="no content detector"):
        Examiner(Transcriber(model), {})


def test_a_finding_outside_of_the_text_is_an_error(model: TextModel) -> None:
    with pytest.raises(RulesError, match="found something at"):
        examiner(model, f"{HERE}:LyingDetector").examine(ids_of(model, "Harmless."))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("paterns", "there are patterns"),
        ("no.such.module:Detector", "No module named"),
        (f"{HERE}:Missing", "Missing"),
        (f"{HERE}:unmakeable", "no licence"),
    ],
)
def test_a_detector_that_cannot_be_loaded_is_explained(name: str, words: str) -> None:
    with pytest.raises(RulesError, match=words):
        make_detectors([name], DetectorOptions())


def test_a_detector_gets_the_operator_s_rules() -> None:
    made = make_detectors([f"{HERE}:WordDetector"], DetectorOptions("/etc/rules"))[f"{HERE}:WordDetector"]
    assert isinstance(made, WordDetector)
    assert made.options.rules == "/etc/rules"


def test_a_detector_can_come_as_an_entry_point_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(*, group: str) -> list[EntryPoint]:
        return [EntryPoint("words", f"{HERE}:WordDetector", group)] if group == "pando.content_detectors" else []

    monkeypatch.setattr(examiner_module, "entry_points", installed)
    assert isinstance(make_detectors(["words"], DetectorOptions())["words"], WordDetector)
    with pytest.raises(RulesError, match="there are patterns, words"):
        make_detectors(["sentences"], DetectorOptions())
