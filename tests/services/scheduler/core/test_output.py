"""Output that is divided among several detokenizers."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from common.types import Finish, FinishReason, TokenLogprob
from services.scheduler.core.output import Output, divide

if TYPE_CHECKING:
    from services.scheduler.core.sequence import Sequence

OWNERS = ("first", "second", "third")
HANDLES = st.integers(0, 9)


class FakeSequence:
    """As much of a sequence as output needs."""

    def __init__(self, handle: int) -> None:
        self.handle = handle


def sequences(handles: list[int]) -> tuple[Sequence, ...]:
    return cast("tuple[Sequence, ...]", tuple(FakeSequence(handle) for handle in handles))


@st.composite
def outputs(draw: st.DrawFn) -> Output:
    tokens = draw(st.lists(st.tuples(HANDLES, st.integers(0, 1000)), max_size=30))
    indices = draw(st.sets(st.integers(0, len(tokens) - 1))) if tokens else set()
    return Output(
        opens=sequences(draw(st.lists(HANDLES, unique=True))),
        starts=sequences(draw(st.lists(HANDLES, unique=True))),
        handles=np.array([handle for handle, _ in tokens], np.int32),
        token_ids=np.array([token_id for _, token_id in tokens], np.int32),
        logprobs=tuple((index, TokenLogprob(-float(index), (), ())) for index in sorted(indices)),
        finishes=tuple((handle, Finish(FinishReason.STOP)) for handle in draw(st.lists(HANDLES, unique=True))),
        origins=draw(st.just(b"") | st.binary(min_size=len(tokens), max_size=len(tokens))),
    )


def content(output: Output, handle: int) -> list[object]:
    """Return all that one choice gets, in order; log probabilities beside their tokens."""
    logprobs = dict(output.logprobs)
    return [
        [sequence.handle for sequence in output.opens].count(handle),
        [sequence.handle for sequence in output.starts].count(handle),
        [
            (int(token_id), logprobs.get(index), output.origins[index] if output.origins else 0)
            for index, (its, token_id) in enumerate(zip(output.handles, output.token_ids, strict=True))
            if its == handle
        ],
        [finish for its, finish in output.finishes if its == handle],
    ]


@given(outputs(), st.dictionaries(HANDLES, st.sampled_from(OWNERS)))
def test_each_choice_gets_its_whole_output_from_its_owner_only(output: Output, owners: dict[int, str]) -> None:
    parts = dict(divide(output, owners, OWNERS[:2]))
    nothing = content(Output((), (), np.empty(0, np.int32), np.empty(0, np.int32), (), ()), 0)
    for handle in range(10):
        for owner in OWNERS[:2]:
            expected = content(output, handle) if owners.get(handle) == owner else nothing
            assert (content(parts[owner], handle) if owner in parts else nothing) == expected
    assert set(parts) <= set(OWNERS[:2])
    for part in parts.values():
        assert len(part.handles) or part.opens or part.starts or part.finishes
