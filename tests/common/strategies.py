"""Hypothesis strategies for the domain types, in one place."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from common.grammars import NO_SCOPE, Grammar, GrammarKind, GrammarScope
from common.prompt_logprobs import PromptLogprobs
from common.types import (
    Admission,
    CacheMode,
    ErrorCode,
    Finish,
    FinishReason,
    Pooling,
    ReplyTo,
    RequestFailure,
    RequestId,
    Resume,
    SamplingParams,
    ScheduleRequest,
    SessionTurn,
    StopConditions,
    Subject,
    SubscriberId,
    TokenLogprob,
    TraceContext,
    View,
)

TOKEN = st.integers(0, 2**31 - 1)
COUNT = st.integers(0, 2**31 - 1)
# What `str.isprintable` says of text, without trying and throwing away most of it.
NAMES = st.text(st.characters(exclude_categories=("C", "Z"), include_characters=" "), min_size=1, max_size=20)
FLOAT = st.floats(-100, 100, width=32)

views = st.builds(View, st.builds(Subject, tenant=NAMES, name=NAMES), salt=st.just("") | NAMES)
sampling = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2, width=32),
    top_p=st.floats(0.015625, 1, width=32),
    top_k=st.none() | st.integers(1, 2**31 - 1),
    min_p=st.floats(0, 1, width=32),
    repetition_penalty=st.floats(0.015625, 2, width=32),
    presence_penalty=st.floats(-2, 2, width=32),
    frequency_penalty=st.floats(-2, 2, width=32),
    seed=st.integers(0, 2**64 - 1),
    logit_bias=st.dictionaries(TOKEN, FLOAT, max_size=4),
    top_logprobs=st.none() | st.integers(0, 20),
    logprob_token_ids=st.lists(TOKEN, max_size=3).map(tuple),
    allowed_token_ids=st.lists(TOKEN, max_size=3).map(tuple),
    banned_sequences=st.lists(st.lists(TOKEN, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
    grammar=st.none()
    | st.builds(
        Grammar,
        kind=st.sampled_from(GrammarKind),
        text=st.text(),
        param=NAMES,
        scope=st.just(NO_SCOPE) | st.builds(GrammarScope, tenant=NAMES, subject=NAMES, salt=st.just("") | NAMES),
    ),
)
stops = st.builds(
    StopConditions,
    max_tokens=st.none() | COUNT,
    min_tokens=COUNT,
    stop_token_ids=st.lists(TOKEN, max_size=3).map(tuple),
    stop_strings=st.lists(st.text(min_size=1), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    include_stop_text=st.booleans(),
)
failures = st.builds(
    RequestFailure,
    code=st.sampled_from(ErrorCode),
    message=st.text(),
    param=st.none() | NAMES,
    retryable=st.booleans(),
    retry_after_ms=st.none() | COUNT,
)
finishes = st.one_of(
    st.builds(Finish, reason=st.just(FinishReason.STOP), matched_token_id=st.none() | TOKEN),
    st.builds(Finish, reason=st.just(FinishReason.STOP), matched_text=st.text()),
    st.builds(Finish, reason=st.just(FinishReason.STOP), embedding=st.binary(max_size=16)),
    st.builds(Finish, reason=st.sampled_from([FinishReason.LENGTH, FinishReason.ABORT])),
    st.builds(Finish, reason=st.just(FinishReason.ERROR), error=failures),
)
logprobs = st.integers(0, 5).flatmap(
    lambda count: st.builds(
        TokenLogprob,
        logprob=FLOAT,
        top_token_ids=st.lists(TOKEN, min_size=count, max_size=count).map(tuple),
        top_logprobs=st.lists(FLOAT, min_size=count, max_size=count).map(tuple),
        asked=st.lists(FLOAT, max_size=2).map(tuple),
    )
)
admissions = st.builds(Admission, request_id=NAMES.map(RequestId), prompt_tokens=COUNT, rejected=st.none() | failures)
resumes = st.builds(Resume, token_ids=st.lists(TOKEN, max_size=5).map(tuple), delivered_characters=COUNT)
prompt_logprobs = st.builds(
    PromptLogprobs, start=COUNT, top=st.integers(0, 20), token_ids=st.lists(TOKEN, max_size=3).map(tuple)
)
traces = st.builds(TraceContext, traceparent=NAMES, tracestate=st.none() | NAMES)
turns = st.builds(
    SessionTurn,
    name=NAMES,
    after=st.none() | NAMES,
    offset=st.none() | st.integers(-1000, 1000).filter(bool),
    drop_previous_output=st.booleans(),
    replace=st.booleans(),
)
single_requests = st.builds(
    ScheduleRequest,
    request_id=NAMES.map(RequestId),
    view=views,
    reply_to=st.builds(ReplyTo, subscriber_id=NAMES.map(SubscriberId), detokenizer=st.none() | NAMES),
    token_ids=st.lists(TOKEN, min_size=1, max_size=20).map(lambda ids: np.array(ids, np.int32)),
    sampling=sampling,
    stop=stops,
    n=st.integers(1, 128),
    priority=st.integers(-(2**31), 2**31 - 1),
    cache_mode=st.sampled_from(CacheMode),
    skip_special_tokens=st.booleans(),
    resume=st.none() | resumes,
    timeout_ms=st.none() | COUNT,
    trace=st.none() | traces,
    prompt_logprobs=st.none() | prompt_logprobs,
    session=st.none() | NAMES,
    pooling=st.none() | st.sampled_from(Pooling),
    max_context_tokens=st.none() | COUNT,
)
# Only a session has turns.
schedule_requests = single_requests | st.builds(
    lambda request, session, turn: replace(request, session=session, turn=turn), single_requests, NAMES, turns
)
