from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deploy.evaluation.bench.prompts import LOWEST_ID, PromptMaker
from deploy.evaluation.bench.records import Segment


def ids(maker: PromptMaker, *segments: Segment) -> list[int]:
    return [int(token) for token in maker.prompt(segments)]


@given(st.integers(1, 600), st.integers(0, 600))
def test_a_longer_segment_starts_with_the_shorter_one_of_its_key(short: int, more: int) -> None:
    maker = PromptMaker(seed=1)
    assert ids(maker, Segment("a", short + more))[:short] == ids(maker, Segment("a", short))
    words = PromptMaker(seed=1, as_ids=False)
    assert str(words.prompt([Segment("a", short + more)])).startswith(str(words.prompt([Segment("a", short)])))


def test_content_depends_on_key_and_seed_only() -> None:
    first, second = PromptMaker(seed=1), PromptMaker(seed=1)
    assert ids(first, Segment("b", 5), Segment("a", 50))[5:] == ids(second, Segment("a", 50, role="system"))
    assert ids(first, Segment("a", 50)) != ids(first, Segment("b", 50))
    assert ids(first, Segment("a", 50)) != ids(PromptMaker(seed=2), Segment("a", 50))


def test_ids_stay_inside_the_vocabulary_and_off_the_special_tokens() -> None:
    drawn = ids(PromptMaker(vocabulary=300), Segment("a", 2000))
    assert (min(drawn), max(drawn)) == (LOWEST_ID, 299)


def test_literal_ids_are_taken_as_they_are() -> None:
    assert ids(PromptMaker(), Segment("x", 3, ids=(0, 5, 9999))) == [0, 5, 9999]


def test_literal_text_makes_the_prompt_text() -> None:
    assert PromptMaker().prompt([Segment("", 2, text="Hello there")]) == "Hello there"


def test_messages_join_neighbours_of_one_role() -> None:
    segments = [Segment("s", 3, role="system"), Segment("", 1, text="What"), Segment("", 1, text=" now?")]
    system, user = PromptMaker(as_ids=False).messages(segments)
    assert (system["role"], len(system["content"].split())) == ("system", 3)
    assert user == {"role": "user", "content": "What now?"}
    assert not system["content"].startswith(" ")


def test_words_follow_the_measured_length() -> None:
    prompt = PromptMaker(as_ids=False, tokens_per_word=1.25).prompt([Segment("a", 100)])
    assert len(str(prompt).split()) == 80
