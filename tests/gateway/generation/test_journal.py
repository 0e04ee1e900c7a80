from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.deltas import Delta, PromptUsage
from common.requests import GenerateRequest
from common.sampling import choice_seed
from common.types import (
    Finish,
    FinishReason,
    RequestId,
    RequestOptions,
    Resume,
    SamplingParams,
    StopConditions,
    Subject,
    View,
)
from gateway.generation.journal import ChoiceRecord, DeltaRelation, Journal, JournalEntry

ID = RequestId("cmpl-1")


def request(n: int = 1, max_tokens: int | None = None) -> GenerateRequest:
    options = RequestOptions(SamplingParams(seed=5), StopConditions(max_tokens=max_tokens), n=n)
    return GenerateRequest(ID, View(Subject("t", "u")), "tiny", "Hello", options)


def delta(first: int, text: str, *ids: int, finish: Finish | None = None) -> Delta:
    return Delta(ID, 0, first, ids, text, finish=finish)


def test_deltas_in_order_are_fresh() -> None:
    choice = ChoiceRecord(request(), 0, 0)
    for item in (delta(0, "a", 1), delta(1, "", 2), delta(2, "世"), delta(2, "b", 3, 4)):
        assert choice.judge(item) is DeltaRelation.FRESH
        choice.apply(item)
    assert list(choice.token_ids) == [1, 2, 3, 4]
    assert choice.delivered_characters == 3


def test_repeated_deltas_are_duplicates() -> None:
    choice = ChoiceRecord(request(), 0, 0)
    choice.apply(delta(0, "ab", 1, 2))
    assert choice.judge(delta(0, "a", 1)) is DeltaRelation.DUPLICATE
    assert choice.judge(delta(1, "b", 2)) is DeltaRelation.DUPLICATE
    assert choice.judge(delta(0, "ab", 1, 2)) is DeltaRelation.DUPLICATE


def test_gap_and_half_known_delta_do_not_fit() -> None:
    choice = ChoiceRecord(request(), 0, 0)
    choice.apply(delta(0, "ab", 1, 2))
    assert choice.judge(delta(3, "d", 4)) is DeltaRelation.MISFIT
    assert choice.judge(delta(1, "bc", 2, 3)) is DeltaRelation.MISFIT
    assert choice.judge(delta(0, "", 1, finish=Finish(FinishReason.STOP))) is DeltaRelation.MISFIT


def test_after_the_finish_everything_is_a_duplicate() -> None:
    choice = ChoiceRecord(request(), 0, 0)
    choice.apply(delta(0, "a", 1, finish=Finish(FinishReason.STOP)))
    assert choice.judge(delta(1, "b", 2)) is DeltaRelation.DUPLICATE


def test_a_continuation_contains_the_progress_that_the_client_has_received() -> None:
    choice = ChoiceRecord(request(n=3), 2, 2)
    choice.apply(delta(0, "世界", 1, 2))
    again = choice.continuation(RequestId("cmpl-1.2.1"))
    assert again.request_id == "cmpl-1.2.1"
    assert again.options.n == 1
    assert again.options.resume == Resume((1, 2), 2)
    assert again.options.sampling.seed == choice_seed(5, 2)
    assert again.prompt == "Hello"


def test_a_continuation_without_progress_is_the_request_itself() -> None:
    again = ChoiceRecord(request(), 0, 0).continuation(RequestId("cmpl-1.0.1"))
    assert again.options.resume is None
    assert again.options.sampling.seed == 5


def test_all_tokens_received_means_exhausted() -> None:
    choice = ChoiceRecord(request(max_tokens=2), 0, 0)
    assert not choice.is_exhausted
    choice.apply(delta(0, "ab", 1, 2))
    assert choice.is_exhausted


def test_a_lost_finish_is_reconstructed_at_the_limit() -> None:
    choice = ChoiceRecord(request(max_tokens=1), 0, 0)
    choice.apply(delta(0, "a", 1))
    assert choice.end_at_limit().finish == Finish(FinishReason.LENGTH)
    assert choice.is_finished


def test_prompt_usage_is_that_of_the_first_choice() -> None:
    entry = JournalEntry(request(n=2))
    entry.note_usage(entry.choices[1], PromptUsage(10, 10))
    entry.note_usage(entry.choices[0], PromptUsage(10, 4))
    entry.note_usage(entry.choices[1], PromptUsage(10, 10))
    assert entry.prompt_usage == PromptUsage(10, 4)


def test_prompt_usage_of_a_resumed_choice_is_ignored() -> None:
    entry = JournalEntry(request())
    entry.note_usage(entry.choices[0], PromptUsage(10, 4))
    entry.choices[0].apply(delta(0, "a", 1))
    entry.note_usage(entry.choices[0], PromptUsage(11, 11))
    assert entry.prompt_usage == PromptUsage(10, 4)


def test_the_journal_holds_only_open_requests() -> None:
    journal = Journal()
    entry = JournalEntry(request())
    journal.open(entry)
    assert list(journal) == [entry]
    journal.close(ID)
    journal.close(ID)
    assert len(journal) == 0


@given(st.lists(st.integers(min_value=1, max_value=4), max_size=12), st.data())
def test_whatever_is_replayed_the_client_gets_each_token_once(sizes: list[int], data: st.DataObject) -> None:
    """After a break the pipeline replays from any earlier delta on; judged and applied, nothing doubles or is lost."""
    stream, first = [], 0
    for size in sizes:
        stream.append(delta(first, "x" * size, *range(first, first + size)))
        first += size
    choice = ChoiceRecord(request(), 0, 0)
    position = 0
    while position < len(stream):
        position = data.draw(st.integers(min_value=0, max_value=position), label="replay from") if stream else 0
        stop = data.draw(st.integers(min_value=position + 1, max_value=len(stream)), label="up to")
        for item in stream[position:stop]:
            if choice.judge(item) is DeltaRelation.FRESH:
                choice.apply(item)
        position = max(stop, _covered(stream, len(choice.token_ids)))
    assert list(choice.token_ids) == list(range(first))
    assert choice.delivered_characters == first


def _covered(stream: list[Delta], tokens: int) -> int:
    return sum(item.first_token_index + len(item.token_ids) <= tokens for item in stream)
