"""One spelling for all ways to write a text: secrets are found however they are spelled, at their place."""

from __future__ import annotations

import time
import unicodedata
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from services.scheduler.content.child import Examiner
from services.scheduler.content.interface import DetectorOptions
from services.scheduler.content.patterns import PatternDetector, normalise
from services.scheduler.content.text import Transcriber
from tests.services.scheduler.content.corpus import POSITIVES

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.tokenization import TextModel

INVISIBLE = "\u00ad\u034f\u115f\u180e\u200b\u200c\u200d\u200e\u200f\u202e\u2060\u2066\ufe0f\ufeff\U000e0041"
SPACES = "\u00a0\u1680\u2000\u2002\u2007\u2009\u202f\u205f\u3000"
HYPHENS = "\u2010\u2011\u2012\u2013\u2014\u2212\ufe63\uff0d"
# First digits of scripts; the others follow.
ZEROS = "\u0660\u06f0\u0966\u0e50\uff10\U0001d7ce"
SECRETS = [(rule, value) for rule, values in POSITIVES.items() for value in values]


def detector() -> PatternDetector:
    made = PatternDetector(DetectorOptions())
    made.refresh()
    return made


DETECTOR = detector()


def full_width(character: str) -> str:
    return chr(ord(character) + 0xFEE0) if "!" <= character <= "~" else character


@st.composite
def respelled(draw: st.DrawFn, value: str) -> str:
    """Return `value` with spaces, hyphens, digits and letters written otherwise, and invisible characters anywhere."""
    pieces = []
    for character in value:
        options: list[Callable[[], str]] = [lambda c=character: c, lambda c=character: full_width(c)]  # type: ignore[misc]
        if character == " ":
            options.append(lambda: draw(st.sampled_from(SPACES)))
        elif character == "-":
            options.append(lambda: draw(st.sampled_from(HYPHENS)))
        elif character in "0123456789":
            options.append(lambda c=character: chr(ord(draw(st.sampled_from(ZEROS))) + int(c)))  # type: ignore[misc]
        pieces.append(draw(st.sampled_from(options))())
        # Not only between characters of a word: also where a rule looks for its end.
        pieces.append(draw(st.text(INVISIBLE, max_size=2)))
    return "".join(pieces)


@given(st.sampled_from(SECRETS), st.data())
def test_each_secret_is_found_however_it_is_spelled(secret: tuple[str, str], data: st.DataObject) -> None:
    rule, value = secret
    before = data.draw(st.sampled_from(["Use ", "ﬃ\u200b½: ", "漢字\u3000", "", "Ｕｓｅ\u00a0"]))
    text = f"{before}{data.draw(respelled(value))} where you need it."
    findings = {finding.rule: finding.start for finding in DETECTOR.find(text)}
    assert rule in findings, text
    # The cut comes before the secret, or at the value where a name precedes it.
    names = len(text) if rule == "assigned_secret" else 0
    assert min(findings.values()) <= len(before) + names


@pytest.mark.parametrize("rule", ["card_number", "iban"])
@given(st.data())
def test_separators_anywhere_in_a_number_do_not_hide_it(rule: str, data: st.DataObject) -> None:
    number = data.draw(st.sampled_from([v for v in POSITIVES[rule] if "plate" not in v and "07/29" not in v]))
    compact = "".join(character for character in number if character.isalnum())
    separator = data.draw(st.sampled_from([" ", "\u00a0", "-", ".", "\n", "\u2009\n", "\u200b"]))
    cuts = data.draw(st.sets(st.integers(4, len(compact) - 1), max_size=6))
    assume(separator != "." or len(cuts) != 1)  # a decimal number
    text = "".join((separator if place in cuts else "") + letter for place, letter in enumerate(compact))
    assert rule in {finding.rule for finding in DETECTOR.find(f"Use {text}, please.")}


@given(st.text())
def test_each_character_comes_from_one_of_the_original_in_order(text: str) -> None:
    normal = normalise(text)
    origins = [normal.origin(place) for place in range(len(normal.text))]
    assert origins == sorted(origins)
    assert all(0 <= origin < len(text) for origin in origins)
    for place, origin in enumerate(origins):
        assert normal.text[place] in normalise(text[origin]).text
    assert not any(unicodedata.category(character) in ("Cf", "Mn", "Me") for character in normal.text)
    # Nothing is lost but what shows nothing or marks another character.
    lost = set(range(len(text))) - set(origins)
    assert all(normalise(text[place]).text == "" for place in lost)


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126)))
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert normalise(text).text == text


@pytest.mark.parametrize(
    ("original", "normal"),
    [
        ("ｐａｓｓｗｏｒｄ：", "password:"),
        ("a\u00a0b\u3000c\u2028d\r\ne", "a b c\nd\n\ne"),
        ("4️⃣1️⃣", "41"),
        ("\u0661\u06f2\u0969", "123"),
        ("4111・1111。1111·1111", "4111.1111.1111.1111"),
        ("mu\u0308ller", "muller"),
        ("müller 漢字 Ответ", "müller 漢字 Ответ"),
    ],
)
def test_known_spellings_are_normalised(original: str, normal: str) -> None:
    assert normalise(original).text == normal


def test_the_cut_is_at_the_token_in_which_a_disguised_secret_begins(model: TextModel) -> None:
    before = "Die Karte\u200b ﬁndet sich hier:\u00a0"
    ids = np.array(
        model.tokenizer.encode(f"{before}４１１１\u200b １１１１ 1111\u00a01111 und", add_special_tokens=False).ids
    )
    examiner = Examiner(Transcriber(model), {"patterns": DETECTOR})
    verdict = examiner.examine(ids.astype(np.int32))
    assert verdict.rule == "card_number"
    kept = model.tokenizer.decode(ids[: verdict.allowed_tokens].tolist(), skip_special_tokens=False)
    assert before.startswith(kept.rstrip("\ufffd"))
    assert len(kept) >= len(before) - 2


def test_texts_of_nothing_but_unusual_characters_take_linear_time() -> None:
    seconds = []
    for length in (5_000, 80_000):
        text = "４\u200b１ ½\u0308-" * length
        started = time.process_time()
        list(DETECTOR.find(text))
        seconds.append(time.process_time() - started)
    # Sixteen times as much text; a quadratic step would take 256 times as long.
    assert seconds[1] < 64 * seconds[0] + 0.1
