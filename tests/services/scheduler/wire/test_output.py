"""The scheduler's converter of output against the detokenizer's: each end decodes what the other encoded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from protos.gen.pando.v1 import detokenizer_pb2
from services.detokenizer.messages import Answers, ChoiceSpec, PromptLogprobsPart, Push, StopHit
from services.detokenizer.wire import answers_to_wire, push_from_wire
from services.scheduler.core.output import EndedChoice, Output, OutputBuffer
from services.scheduler.core.sequence import PromptPart, Sequence
from services.scheduler.wire.requests import ended_from_wire, output_to_wire
from tests.common.strategies import COUNT, TOKEN, complete, finishes, logprobs, plain, schedule_requests
from tests.examples import examples
from tests.services.worker.strategies import spans

if TYPE_CHECKING:
    from common.types import ScheduleRequest

HANDLE = st.integers(0, 2**32 - 1)


def sequence_of(request: ScheduleRequest, index: int, handle: int, cached_tokens: int | None) -> Sequence:
    return Sequence(
        request, index, handle, request.options.sampling, request.token_ids, 100, 0.0, cached_tokens=cached_tokens
    )


sequences = st.builds(sequence_of, schedule_requests, COUNT, HANDLE, st.none() | COUNT)


@st.composite
def outputs(draw: st.DrawFn) -> Output:
    handles = draw(st.lists(HANDLE, min_size=1, max_size=5))
    token_ids = draw(st.lists(TOKEN, min_size=len(handles), max_size=len(handles)))
    scored = draw(st.sets(st.sampled_from(range(len(handles)))))
    parts = complete(PromptPart, handle=HANDLE, span=spans, lead=st.none() | TOKEN, is_last=st.booleans())
    ended = draw(st.lists(HANDLE, max_size=2, unique=True))
    return draw(
        complete(
            Output,
            opens=st.lists(sequences, max_size=1).map(tuple),
            starts=st.lists(sequences, max_size=1).map(tuple),
            handles=st.just(np.array(handles, np.uint32)),
            token_ids=st.just(np.array(token_ids, np.int32)),
            logprobs=st.tuples(*(st.tuples(st.just(index), logprobs) for index in sorted(scored))),
            finishes=st.tuples(*(st.tuples(st.just(handle), finishes) for handle in ended)),
            prompt_logprobs=st.lists(parts, max_size=2).map(tuple),
            origins=st.just(b"") | st.binary(min_size=len(handles), max_size=len(handles)),
        )
    )


def spec_of(sequence: Sequence) -> ChoiceSpec:
    request, stop = sequence.request, sequence.request.options.stop
    return ChoiceSpec(
        handle=sequence.handle,
        request_id=request.request_id,
        choice_index=sequence.choice_index,
        subscriber_id=request.reply_to.subscriber_id,
        stop_strings=stop.stop_strings,
        include_stop_text=stop.include_stop_text,
        skip_special_tokens=request.options.skip_special_tokens,
        min_tokens=stop.min_tokens,
        prompt_tokens=len(request.token_ids),
        resume=request.options.resume,
        stop_patterns=stop.stop_patterns,
    )


@examples(40)
@given(sequences)
def test_an_opened_choice_survives_the_wire(sequence: Sequence) -> None:
    buffer = OutputBuffer()
    buffer.open(sequence)
    output = buffer.take()
    assert output is not None
    encoded = output_to_wire(output).SerializeToString()
    assert plain(push_from_wire(detokenizer_pb2.PushRequest.FromString(encoded))) == plain(Push([spec_of(sequence)]))


@examples(40)
@given(outputs())
def test_output_survives_the_wire(output: Output) -> None:
    encoded = output_to_wire(output).SerializeToString()
    push = push_from_wire(detokenizer_pb2.PushRequest.FromString(encoded))
    expected = Push(
        opens=[spec_of(sequence) for sequence in output.opens],
        handles=output.handles.tolist(),
        token_ids=output.token_ids.tolist(),
        logprobs=dict(output.logprobs),
        finishes=dict(output.finishes),
        starts={sequence.handle: sequence.cached_tokens or 0 for sequence in output.starts},
        prompt_logprobs=[
            PromptLogprobsPart(part.handle, part.span, part.lead, part.is_last) for part in output.prompt_logprobs
        ],
        cached={sequence.handle: sequence.cached for sequence in output.starts if sequence.cached},
        origins=output.origins,
    )
    assert plain(push) == plain(expected)


@given(st.lists(st.tuples(HANDLE, COUNT), max_size=3), st.lists(HANDLE, max_size=3))
def test_choices_that_the_detokenizer_ended_survive_the_wire(stopped: list[tuple[int, int]], gone: list[int]) -> None:
    encoded = answers_to_wire(Answers([StopHit(*each) for each in stopped], gone)).SerializeToString()
    ended = ended_from_wire(detokenizer_pb2.PushResponse.FromString(encoded))
    assert ended == [EndedChoice(*each) for each in stopped] + [EndedChoice(handle) for handle in gone]
