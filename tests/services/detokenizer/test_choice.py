from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.deltas import CachedPart, PromptUsage, TokenOrigin
from common.errors import UnavailableError
from common.models import resolve_model
from common.tokenization import load_text_model
from common.types import Finish, FinishReason, Resume
from services.detokenizer.decoding import DecoderFactory
from services.detokenizer.messages import Push
from tests.examples import examples
from tests.services.detokenizer.pushing import LENGTH, STOP, Pushing, spec

MODEL = load_text_model(resolve_model("smollm2-135m-instruct"))
DECODERS = DecoderFactory(MODEL)
EOS = 2

any_ids = st.lists(st.one_of(st.integers(0, MODEL.vocabulary_size - 1), st.integers(0, 300)), min_size=1, max_size=40)


def encode(text: str) -> list[int]:
    return MODEL.tokenizer.encode(text, add_special_tokens=False).ids


def decode(ids: list[int], *, skip: bool = True) -> str:
    return MODEL.tokenizer.decode(ids, skip_special_tokens=skip)


@examples(60)
@given(ids=any_ids, per_push=st.integers(1, 7), skip=st.booleans())
async def test_deltas_add_up_to_the_whole(ids: list[int], per_push: int, skip: bool) -> None:
    received = await Pushing(DECODERS).run(spec(skip_special_tokens=skip), ids, per_push=per_push)
    assert received.text == decode(ids, skip=skip)
    assert received.token_ids == ids
    assert received.finish == LENGTH
    counts = [len(delta.token_ids) for delta in received.deltas]
    assert [delta.first_token_index for delta in received.deltas] == [sum(counts[:i]) for i in range(len(counts))]


async def test_usage_comes_once_with_the_first_delta() -> None:
    received = await Pushing(DECODERS).run(spec(), encode("one two three"))
    assert [delta.prompt_usage for delta in received.deltas] == [PromptUsage(10, 4), None, None]


async def test_origins_are_counted_up_to_a_stop_string() -> None:
    ids = encode("Hello there stop and more")
    pushing = Pushing(DECODERS)
    await pushing.push(opens=[spec(stops=[" stop"])])
    origins = bytes(
        [TokenOrigin.SAMPLED, TokenOrigin.FORCED, TokenOrigin.DRAFTED, *[TokenOrigin.FORCED] * (len(ids) - 3)]
    )
    pushing.session.apply(Push(handles=[1] * len(ids), token_ids=ids, origins=origins))
    [delta] = await pushing.mailbox.take()
    assert delta.finish == Finish(FinishReason.STOP, matched_text=" stop")
    counted = origins[: len(delta.token_ids)]
    assert 3 <= len(delta.token_ids) < len(ids)
    assert delta.forced_tokens == counted.count(TokenOrigin.FORCED) > 0
    assert delta.drafted_tokens == 1


async def test_the_parts_of_the_cached_prompt_come_with_its_usage() -> None:
    pushing = Pushing(DECODERS)
    parts = (CachedPart("device", "public", 3), CachedPart("host", "private", 1))
    pushing.session.apply(Push([spec()], [1], encode("one")[:1], starts={1: 4}, cached={1: parts}))
    [delta] = await pushing.mailbox.take()
    assert delta.prompt_usage == PromptUsage(10, 4, parts)


async def test_a_choice_that_never_got_a_token_still_ends_once_with_its_usage() -> None:
    pushing = Pushing(DECODERS)
    (delta,) = await pushing.push(opens=[spec()], finishes={1: Finish(FinishReason.ABORT)})
    assert (delta.token_ids, delta.text, delta.prompt_usage) == ([], "", PromptUsage(10, 0))
    assert delta.finish == Finish(FinishReason.ABORT)
    assert pushing.hub.open_choices == 0


async def test_a_stop_string_across_tokens_ends_the_choice() -> None:
    ids = encode("Hello there\n\nUser: how are you")
    pushing = Pushing(DECODERS)
    received = await pushing.run(spec(stops=["\n\nUser:"]), ids, finish=None)
    assert received.text == "Hello there"
    assert received.finish == Finish(FinishReason.STOP, matched_text="\n\nUser:")
    assert decode(received.token_ids) == "Hello there\n\nUser:"
    answers = await pushing.answers()
    assert answers.stop_hits == [(1, len(received.token_ids))]
    assert pushing.hub.open_choices == 0


async def test_tokens_after_a_stop_match_are_ignored() -> None:
    ids = encode("one STOP two three four")
    received = await Pushing(DECODERS).run(spec(stops=["STOP"]), ids, finish=LENGTH, per_push=len(ids))
    assert received.text == "one "
    assert decode(received.token_ids) == "one STOP"
    assert received.finish == Finish(FinishReason.STOP, matched_text="STOP")
    assert len(received.deltas) == 1


async def test_stop_text_stays_in_the_output_if_asked() -> None:
    received = await Pushing(DECODERS).run(spec(stops=["STOP"], include_stop_text=True), encode("one STOP two"))
    assert received.text == "one STOP"


@examples(80)
@given(
    words=st.lists(st.sampled_from(["a", "b", " ", "ab", "ba", "漢", "😀", "\n"]), min_size=1, max_size=25),
    stops=st.lists(st.text("ab 漢😀", min_size=1, max_size=4), min_size=1, max_size=3),
    min_tokens=st.integers(0, 10),
    per_push=st.integers(1, 5),
)
async def test_min_tokens_and_stops_equal_a_search_of_the_whole_text(
    words: list[str], stops: list[str], min_tokens: int, per_push: int
) -> None:
    ids = encode("".join(words))
    expected, counted = search(ids, stops, min_tokens)
    received = await Pushing(DECODERS).run(spec(stops=stops, min_tokens=min_tokens), ids, per_push=per_push)
    assert received.text == expected
    assert len(received.token_ids) == counted


def search(ids: list[int], stops: list[str], min_tokens: int) -> tuple[str, int]:
    """Return the text and the number of tokens that count, by looking at ever longer beginnings of the whole text."""
    checked = 0
    for count in range(1, len(ids) + 1):
        text = decode(ids[:count]).rstrip("\ufffd")
        for end in range(checked + 1, len(text) + 1):
            matches = [stop for stop in stops if text[:end].endswith(stop)]
            if matches and count >= min_tokens:
                return text[: end - max(map(len, matches))], count
        checked = len(text)
    return decode(ids), len(ids)


async def test_the_token_that_ends_a_choice_is_no_text() -> None:
    paris = encode(" Paris")
    for skip in (True, False):
        for last in (EOS, *paris):
            ids = [*encode("in"), last]
            received = await Pushing(DECODERS).run(spec(skip_special_tokens=skip), ids, finish=STOP)
            assert received.text == "in"
            assert received.token_ids == ids


async def test_the_token_that_ends_a_choice_is_text_if_asked() -> None:
    ids = encode("in Paris")
    matched = Finish(FinishReason.STOP, matched_token_id=ids[-1])
    received = await Pushing(DECODERS).run(spec(include_stop_text=True), ids, finish=matched)
    assert received.text == "in Paris"
    assert received.finish == matched


async def test_the_token_that_ends_a_choice_cannot_complete_a_stop_string() -> None:
    ids = encode("in Paris")
    received = await Pushing(DECODERS).run(spec(stops=["Paris"]), ids, finish=STOP)
    assert (received.text, received.finish) == ("in", STOP)


async def test_held_back_text_is_released_at_the_length_limit() -> None:
    received = await Pushing(DECODERS).run(spec(stops=["STOPPING"]), encode("one STOP"))
    assert (received.text, received.finish) == ("one STOP", LENGTH)


async def test_after_an_error_nothing_uncertain_is_shown() -> None:
    failed = Finish(FinishReason.ERROR, error=UnavailableError("away").to_failure())
    received = await Pushing(DECODERS).run(spec(stops=["STOPPING"]), encode("one STOP"), finish=failed)
    assert (received.text, received.finish) == ("one ", failed)
    part = encode("漢")[:1]
    received = await Pushing(DECODERS).run(spec(), part, finish=failed)
    assert received.text == ""


@examples(100)
@given(
    ids=any_ids,
    cut=st.integers(0, 40),
    per_push=st.integers(1, 4),
    stops=st.lists(st.text("abe t\ufffd", min_size=1, max_size=4), max_size=2),
)
async def test_a_resumed_choice_gives_the_same_output_as_an_uninterrupted_one(
    ids: list[int], cut: int, per_push: int, stops: list[str]
) -> None:
    whole = await Pushing(DECODERS).run(spec(stops=stops), ids, per_push=per_push)
    cut = min(cut, len(ids) - 1)
    interrupted = Pushing(DECODERS)
    before = await interrupted.run(spec(stops=stops), ids[:cut], finish=None, per_push=per_push)
    if before.finish is not None:
        return  # the stop string came before the interruption
    resume = Resume(tuple(before.token_ids), len(before.text))
    after = await Pushing(DECODERS).run(spec(stops=stops, resume=resume), ids[cut:], per_push=per_push)
    assert before.text + after.text == whole.text
    assert before.token_ids + after.token_ids == whole.token_ids
    assert after.finish == whole.finish
    assert after.deltas[0].first_token_index == cut


async def test_a_resumed_choice_first_sends_the_undelivered_text() -> None:
    ids = encode("one two three four")
    resume = Resume(tuple(ids[:3]), len("one"))
    received = await Pushing(DECODERS).run(spec(resume=resume), ids[3:])
    assert received.text == " two three four"


async def test_a_resumed_choice_skips_text_delivered_beyond_its_ids() -> None:
    ids = encode("one two three four")
    resume = Resume(tuple(ids[:1]), len("one two th"))
    received = await Pushing(DECODERS).run(spec(resume=resume), ids[1:])
    assert received.text == "ree four"


async def test_a_stop_string_in_the_resumed_text_ends_the_choice_at_once() -> None:
    pushing = Pushing(DECODERS)
    resume = Resume(tuple(encode("one STOP two")), len("one "))
    (delta,) = await pushing.push(opens=[spec(stops=["STOP"], resume=resume)])
    assert delta.finish == Finish(FinishReason.STOP, matched_text="STOP")
    assert (delta.text, list(delta.token_ids)) == ("", [])
    assert (await pushing.answers()).stop_hits == [(1, len(encode("one STOP")))]


async def test_a_choice_that_ends_in_two_ways_at_once_ends_once() -> None:
    pushing = Pushing(DECODERS)
    resume = Resume(tuple(encode("one STOP two")), len("one "))
    stopped = spec(stops=["STOP"], resume=resume)
    (delta,) = await pushing.push(opens=[stopped], finishes={1: Finish(FinishReason.ABORT)})
    assert delta.finish == Finish(FinishReason.STOP, matched_text="STOP")
    again = spec(2, stops=["STOP"], resume=resume)
    (delta,) = await pushing.push(opens=[again], tokens=[(2, i) for i in encode(" three")])
    assert (delta.finish, list(delta.token_ids)) == (Finish(FinishReason.STOP, matched_text="STOP"), [])
