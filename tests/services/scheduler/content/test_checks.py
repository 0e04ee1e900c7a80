from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.content.checks import CheckError, find_check, is_card, is_phone, is_random, starts_with_iban
from tests.services.scheduler.content.corpus import NEAR_MISSES, POSITIVES, drawn

CARDS = tuple({re.sub(r"[^0-9]", "", card) for card in POSITIVES["card_number"] if not card.startswith("12 ")})
IBANS = tuple({re.sub(r"[^0-9A-Z]", "", number) for number in POSITIVES["iban"] if "plate" not in number})


@given(st.sampled_from(CARDS), st.data())
def test_a_card_number_with_one_wrong_digit_is_rejected(card: str, data: st.DataObject) -> None:
    place = data.draw(st.integers(4, len(card) - 1))
    digit = data.draw(st.sampled_from("0123456789").filter(lambda digit: digit != card[place]))
    assert is_card(card)
    assert not is_card(card[:place] + digit + card[place + 1 :])


@given(st.sampled_from(IBANS), st.data())
def test_an_iban_is_found_whatever_follows_and_rejected_with_a_wrong_digit(number: str, data: st.DataObject) -> None:
    assert starts_with_iban(number + data.draw(st.text("ABC 123", max_size=6)))
    place = data.draw(st.sampled_from([i for i, letter in enumerate(number) if letter.isdecimal() and i > 3]))
    digit = data.draw(st.sampled_from("0123456789").filter(lambda digit: digit != number[place]))
    assert not starts_with_iban(number[:place] + digit + number[place + 1 :])


@pytest.mark.parametrize(("length", "share"), [(24, 0.85), (32, 0.93), (40, 0.97), (64, 0.99)])
def test_most_random_texts_are_recognised_and_the_longer_the_more(length: int, share: float) -> None:
    texts = [drawn(length, seed=seed) for seed in range(2000)]
    assert sum(map(is_random, texts)) >= share * len(texts)


def test_names_in_programs_are_not_random() -> None:
    words = sorted({word for text in NEAR_MISSES for word in re.findall(r"[A-Za-z]{4,}", text)})
    chance = random.Random(1)
    joined = ["".join(chance.choices(words, k=4)) + str(chance.randrange(100)) for _ in range(2000)]
    joined += ["".join(word.title() for word in chance.choices(words, k=5)) for _ in range(2000)]
    assert sum(map(is_random, joined)) <= 0.01 * len(joined)


@pytest.mark.parametrize(
    ("text", "holds"), [("1234567", False), ("12345678", True), ("1" * 9, False), ("1" * 16, False)]
)
def test_a_phone_number_needs_a_plausible_number_of_digits(text: str, holds: bool) -> None:
    assert is_phone(text) is holds


def test_checks_are_found_by_name() -> None:
    assert find_check("stdnum.de.idnr")("36574261809")
    for name in ("nothing", "stdnum.nowhere", "stdnum.de", "os.system"):
        with pytest.raises(CheckError):
            find_check(name)
