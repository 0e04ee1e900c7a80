"""The messages exchanged with tokenizers (requests, aborts, admissions) and detokenizers (output, ended choices)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import PandoError
from common.tracing import is_sampled
from common.types import Admission, RequestId
from common.wire.answers import admission_to_wire, cached_parts_to_wire, finish_to_wire, logprob_to_wire, span_to_wire
from common.wire.requests import (
    load_to_wire,
    resume_to_wire,
    schedule_request_from_wire,
    trace_to_wire,
    wish_from_wire,
)
from protos.gen.pando.v1 import detokenizer_pb2, scheduler_pb2
from services.scheduler.core.output import EndedChoice
from services.scheduler.submissions import Batch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.types import LoadReport, ScheduleRequest
    from services.scheduler.core.output import Output
    from services.scheduler.core.sequence import Sequence


def batch_from_wire(message: scheduler_pb2.SchedulerSubmitRequest) -> Batch:
    """Decode a tokenizer's message; requests that are invalid become their refusals."""
    return Batch(
        tuple(_request_from_wire(schedule) for schedule in message.schedules),
        tuple(RequestId(abort.request_id) for abort in message.aborts),
        message.others_serve if message.HasField("others_serve") else None,
        wish_from_wire(message.role_wish) if message.HasField("role_wish") else None,
    )


def _request_from_wire(message: scheduler_pb2.ScheduleRequest) -> ScheduleRequest | Admission:
    try:
        return schedule_request_from_wire(message)
    except PandoError as error:
        return Admission(RequestId(message.request_id), len(message.token_ids), error.to_failure())


def admissions_to_wire(admissions: Iterable[Admission], load: LoadReport) -> scheduler_pb2.SchedulerSubmitResponse:
    """Encode admissions for a tokenizer, with the load after them."""
    return scheduler_pb2.SchedulerSubmitResponse(
        admissions=[admission_to_wire(admission) for admission in admissions],
        load=load_to_wire(load),
    )


def output_to_wire(output: Output) -> detokenizer_pb2.PushRequest:
    """Encode one push to the detokenizer."""
    message = detokenizer_pb2.PushRequest(
        opens=[_choice_to_wire(sequence) for sequence in output.opens],
        handles=output.handles.tolist(),
        token_ids=output.token_ids.tolist(),
        origins=output.origins,
    )
    for sequence in output.starts:
        start = message.starts.add(handle=sequence.handle, cached_tokens=sequence.cached_tokens or 0)
        start.cached.extend(cached_parts_to_wire(sequence.cached))
    for index, logprob in output.logprobs:
        message.logprobs.add(index=index, logprob=logprob_to_wire(logprob))
    for part in output.prompt_logprobs:
        span = span_to_wire(part.span)
        message.prompt_logprobs.add(handle=part.handle, span=span, lead_token_id=part.lead, is_last=part.is_last)
    for handle, finish in output.finishes:
        message.finishes.add(handle=handle, finish=finish_to_wire(finish))
    return message


def _choice_to_wire(sequence: Sequence) -> detokenizer_pb2.ChoiceOpen:
    request = sequence.request
    options, stop = request.options, request.options.stop
    return detokenizer_pb2.ChoiceOpen(
        handle=sequence.handle,
        request_id=request.request_id,
        choice_index=sequence.choice_index,
        subscriber_id=request.reply_to.subscriber_id,
        stop_strings=stop.stop_strings,
        include_stop_text=stop.include_stop_text,
        stop_patterns=stop.stop_patterns,
        skip_special_tokens=options.skip_special_tokens,
        min_tokens=stop.min_tokens,
        prompt_tokens=sequence.prompt_tokens,
        resume=resume_to_wire(options.resume),
        trace=trace_to_wire(options.trace) if is_sampled(options.trace) else None,
    )


def ended_from_wire(message: detokenizer_pb2.PushResponse) -> list[EndedChoice]:
    """Decode the choices that the detokenizer has ended."""
    stopped = [EndedChoice(hit.handle, hit.completion_tokens) for hit in message.stop_hits]
    return stopped + [EndedChoice(handle) for handle in message.gone_handles]
