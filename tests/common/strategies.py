"""Hypothesis strategies for the domain types, in one place."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
from hypothesis import strategies as st

from common.deltas import (
    CACHE_LEVELS,
    CACHE_TIERS,
    CachedPart,
    Delta,
    LogprobText,
    PromptLogprobsText,
    PromptUsage,
    TokenText,
)
from common.grammars import NO_SCOPE, Grammar, GrammarKind, GrammarScope
from common.prompt_logprobs import PromptLogprobs
from common.requests import ChatMessage, ChatPrompt, GenerateRequest, ImageFile, PooledText, TokenPrompt, Truncation
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
    RequestOptions,
    Resume,
    RowImage,
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

Value = TypeVar("Value")


def complete(kind: type[Value], /, **parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Value]:
    """Build values of a dataclass or named tuple. Each field needs a strategy: a new one is not left at its default."""
    declared = {field.name for field in fields(kind)} if is_dataclass(kind) else set(getattr(kind, "_fields", ()))
    assert parts.keys() == declared, f"{kind.__name__}: no strategy for {declared - parts.keys()}"
    return st.builds(kind, **parts)


def plain(value: Any) -> Any:
    """Turn dataclasses into dicts and arrays into lists: equal ones agree in fields that `==` leaves out, too."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.tolist())
    if isinstance(value, tuple | list):
        return tuple(plain(part) for part in value)
    return {field.name: plain(getattr(value, field.name)) for field in fields(value)} if is_dataclass(value) else value


views = complete(View, subject=complete(Subject, tenant=NAMES, name=NAMES), salt=st.just("") | NAMES)
sampling = complete(
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
    | complete(
        Grammar,
        kind=st.sampled_from(GrammarKind),
        text=st.text(),
        param=NAMES,
        scope=st.just(NO_SCOPE) | complete(GrammarScope, tenant=NAMES, subject=NAMES, salt=st.just("") | NAMES),
    ),
)
stops = complete(
    StopConditions,
    max_tokens=st.none() | COUNT,
    min_tokens=COUNT,
    stop_token_ids=st.lists(TOKEN, max_size=3).map(tuple),
    stop_strings=st.lists(st.text(min_size=1), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    include_stop_text=st.booleans(),
    stop_patterns=st.lists(st.text(min_size=1), max_size=3).map(tuple),
)
failures = complete(
    RequestFailure,
    code=st.sampled_from(ErrorCode),
    message=st.text(),
    param=st.none() | NAMES,
    retryable=st.booleans(),
    retry_after_ms=st.none() | COUNT,
    engine_failures=COUNT,
)


def finished(reason: st.SearchStrategy[FinishReason], **parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Finish]:
    nothing = dict.fromkeys(("matched_token_id", "matched_text", "error", "embedding"), st.none())
    return complete(
        Finish,
        reason=reason,
        accepted_prediction_tokens=COUNT,
        rejected_prediction_tokens=COUNT,
        **{**nothing, **parts},
    )


finishes = st.one_of(
    finished(st.just(FinishReason.STOP), matched_token_id=st.none() | TOKEN),
    finished(st.just(FinishReason.STOP), matched_text=st.text()),
    finished(st.just(FinishReason.STOP), embedding=st.binary(max_size=16)),
    finished(st.sampled_from([FinishReason.LENGTH, FinishReason.ABORT])),
    finished(st.just(FinishReason.ERROR), error=failures),
)
logprobs = st.integers(0, 5).flatmap(
    lambda count: complete(
        TokenLogprob,
        logprob=FLOAT,
        top_token_ids=st.lists(TOKEN, min_size=count, max_size=count).map(tuple),
        top_logprobs=st.lists(FLOAT, min_size=count, max_size=count).map(tuple),
        asked=st.lists(FLOAT, max_size=2).map(tuple),
    )
)
admissions = complete(
    Admission,
    request_id=NAMES.map(RequestId),
    prompt_tokens=COUNT,
    rejected=st.none() | failures,
    prompt_ids=st.lists(TOKEN, max_size=3).map(tuple),
    conversation_ids=st.lists(TOKEN, max_size=3).map(tuple),
    lacks_images=st.booleans(),
    keeps_images=st.booleans(),
    lacks_session=st.booleans(),
)
resumes = complete(Resume, token_ids=st.lists(TOKEN, max_size=5).map(tuple), delivered_characters=COUNT)
prompt_logprobs = complete(
    PromptLogprobs, start=COUNT, top=st.integers(0, 20), token_ids=st.lists(TOKEN, max_size=3).map(tuple)
)
traces = complete(TraceContext, traceparent=NAMES, tracestate=st.none() | NAMES, parent_id=st.none())
turns = complete(
    SessionTurn,
    name=NAMES,
    after=st.none() | NAMES,
    offset=st.none() | st.integers(-1000, 1000).filter(bool),
    drop_previous_output=st.booleans(),
    replace=st.booleans(),
    conversation_ids=st.lists(TOKEN, max_size=3).map(tuple),
    only_in_session=st.booleans(),
)
reply_tos = complete(ReplyTo, subscriber_id=NAMES.map(SubscriberId), detokenizer=st.none() | NAMES)
single_options = complete(
    RequestOptions,
    sampling=sampling,
    stop=stops,
    n=st.integers(1, 128),
    priority=st.integers(-(2**31), 2**31 - 1),
    cache_mode=st.sampled_from(CacheMode),
    skip_special_tokens=st.booleans(),
    resume=st.none() | resumes,
    timeout_ms=st.none() | COUNT,
    engine_failures=COUNT,
    trace=st.none() | traces,
    session=st.none() | NAMES,
    turn=st.none(),
    is_batch=st.booleans(),
    tenant_is_throttled=st.booleans(),
    subject_is_throttled=st.booleans(),
    max_context_tokens=st.none() | COUNT,
    pooling=st.none() | st.sampled_from(Pooling),
    prompt_logprobs=st.none() | prompt_logprobs,
    adapter=st.just("") | NAMES,
)
# Only a session has turns.
options = single_options | st.builds(
    lambda options, session, turn: replace(options, session=session, turn=turn), single_options, NAMES, turns
)
prompt_images = complete(
    RowImage,
    digest=st.binary(max_size=32),
    offset=COUNT,
    length=COUNT,
    grid=st.lists(COUNT, max_size=3).map(tuple),
    # None: the scheduler keeps them.
    pixels=st.none() | st.lists(FLOAT, max_size=4).map(lambda values: np.array(values, np.float32).reshape(1, -1)),
    # Chosen by schedulers.
    output=st.none(),
)
schedule_requests = complete(
    ScheduleRequest,
    request_id=NAMES.map(RequestId),
    view=views,
    reply_to=reply_tos,
    # Those of images are below 0.
    token_ids=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=20).map(
        lambda ids: np.array(ids, np.int32)
    ),
    options=options,
    # Not sent to schedulers.
    routing_key=st.none(),
    second_text_start=st.none() | COUNT,
    prefill_group=st.just("") | NAMES,
    prefill_group_name=st.just("") | NAMES,
    prediction_ids=st.lists(TOKEN, max_size=3).map(tuple),
    images=st.lists(prompt_images, max_size=2).map(tuple),
)
image_files = complete(
    ImageFile,
    data=st.binary(max_size=8),
    detail=st.sampled_from(["auto", "low", "high"]),
    frames=st.lists(st.binary(max_size=8), max_size=3).map(tuple),
    frames_per_second=st.none() | st.floats(0.1, 1000),
    is_video_file=st.booleans(),
    # Sent in place of a file only.
    key=st.just(b""),
)
chat_messages = complete(
    ChatMessage,
    role=NAMES,
    content=st.none() | st.text(max_size=5),
    name=st.none() | NAMES,
    tool_call_id=st.none() | NAMES,
    tool_calls_json=st.none() | NAMES,
    reasoning_content=st.none() | st.text(max_size=5),
    parts=st.lists(st.text(max_size=5) | image_files, max_size=3).map(tuple),
)
chats = complete(
    ChatPrompt,
    messages=st.lists(chat_messages, max_size=3).map(tuple),
    tools_json=st.lists(NAMES, max_size=2).map(tuple),
    add_generation_prompt=st.booleans(),
    continue_final_message=st.booleans(),
    template_variables_json=st.none() | st.text(max_size=5),
    assistant_prefix=st.none() | st.text(max_size=5),
)
pooled_texts = complete(
    PooledText,
    text=st.text(max_size=5),
    second=st.none() | st.text(max_size=5),
    instruction=st.none() | st.text(max_size=5),
    max_second_tokens=st.none() | COUNT,
    truncation=st.none() | complete(Truncation, max_tokens=COUNT, drop_beginning=st.booleans()),
)
generate_requests = complete(
    GenerateRequest,
    request_id=NAMES.map(RequestId),
    view=views,
    model=NAMES,
    prompt=st.text() | chats | complete(TokenPrompt, ids=st.lists(TOKEN, max_size=5).map(tuple)) | pooled_texts,
    options=options,
    prompt_name=st.none() | NAMES,
    add_special_tokens=st.none() | st.booleans(),
    truncate_prompt_tokens=st.none() | COUNT,
    bad_words=st.lists(NAMES, max_size=3).map(tuple),
    prediction=st.text(max_size=5),
    routing_key=st.none() | NAMES,
    returns_prompt_ids=st.booleans(),
    images=st.lists(image_files, max_size=2).map(tuple),
    operation=st.just(""),
)
token_texts = complete(TokenText, token_id=TOKEN, logprob=FLOAT, text=st.binary(max_size=5))
logprob_texts = complete(
    LogprobText,
    token=token_texts,
    top=st.lists(token_texts, max_size=2).map(tuple),
    asked=st.lists(FLOAT, max_size=2).map(tuple),
    rank=st.none() | COUNT,
)
cached_parts = st.lists(
    complete(CachedPart, tier=st.sampled_from(CACHE_TIERS), level=st.sampled_from(CACHE_LEVELS), tokens=COUNT),
    max_size=3,
).map(tuple)
deltas = complete(
    Delta,
    request_id=NAMES.map(RequestId),
    choice_index=COUNT,
    first_token_index=COUNT,
    token_ids=st.lists(TOKEN, max_size=5).map(tuple),
    text=st.text(),
    logprobs=st.lists(logprob_texts, max_size=2).map(tuple),
    prompt_usage=st.none() | complete(PromptUsage, prompt_tokens=COUNT, cached_tokens=COUNT, cached=cached_parts),
    finish=st.none() | finishes,
    prompt_logprobs=st.none()
    | complete(
        PromptLogprobsText,
        first=COUNT,
        entries=st.lists(logprob_texts, max_size=2),
        lead=st.none() | token_texts,
        is_last=st.booleans(),
    ),
    weight_version=NAMES | st.just(""),
    forced_tokens=COUNT,
    drafted_tokens=COUNT,
)
