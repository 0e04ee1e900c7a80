"""Hypothesis strategies for the step protocol."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import strategies as st

from common.prompt_logprobs import PromptLogprobSpan
from common.steps import (
    AdapterLoad,
    Draft,
    EngineCapacity,
    EngineSpec,
    JumpLimit,
    MicroBatch,
    PageGrants,
    PageReplacement,
    PrefillChunk,
    RecurrentStates,
    RowOpen,
    RowStop,
    StateSave,
    StepPlan,
    StepResult,
    WindowPool,
)
from common.transfers import PeerPages, Transfer, TransferAck, TransferDirection
from common.types import FinishReason, Pooling, RowImage, TokenIds
from tests.common.strategies import COUNT, FLOAT, NAMES, TOKEN, complete, logprobs, prompt_logprobs, sampling, traces

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROW = st.integers(0, 2**31 - 1)
POSITIVE = st.integers(1, 2**31 - 1)


def arrays(least: int = 0, most: int = 8) -> st.SearchStrategy[TokenIds]:
    return st.lists(TOKEN, min_size=least, max_size=most).map(lambda values: np.array(values, np.int32))


def tuples(elements: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(elements, max_size=3).map(tuple)


def floats(*shape: int) -> st.SearchStrategy[NDArray[np.float32]]:
    size = math.prod(shape)
    return st.lists(FLOAT, min_size=size, max_size=size).map(lambda values: np.array(values, np.float32).reshape(shape))


images = st.integers(0, 3).flatmap(
    lambda rows: complete(
        RowImage,
        digest=st.binary(max_size=32),
        offset=COUNT,
        length=COUNT,
        grid=tuples(COUNT),
        pixels=st.none() | floats(rows, 2),
        output=st.none() | st.integers(0, 2**64 - 1),
    )
)
opens = complete(
    RowOpen,
    row=ROW,
    request_id=NAMES,
    token_ids=st.lists(TOKEN | TOKEN.map(lambda token: -1 - token), min_size=1, max_size=8).map(
        lambda values: np.array(values, np.int32)
    ),
    prompt_tokens=COUNT,
    computed_tokens=COUNT,
    pages=arrays(),
    sampling=sampling,
    max_total_tokens=COUNT,
    stop_token_ids=tuples(TOKEN),
    min_new_tokens=COUNT,
    second_text_start=st.none() | COUNT,
    postponed_token_ids=tuples(TOKEN),
    window_pages=arrays(),
    pooling=st.none() | st.sampled_from(Pooling),
    prompt_logprobs=st.none() | prompt_logprobs,
    snapshot=st.none() | COUNT,
    adapter=st.none() | COUNT,
    trace=st.none() | traces,
    images=tuples(images),
    # Belongs to the worker, and does not travel.
    position_offset=st.just(0),
)
grants = st.integers(0, 8).flatmap(
    lambda size: complete(
        PageGrants, rows=arrays(size, size), pages=arrays(size, size), window_pages=arrays(size, size)
    )
)
plans = complete(
    StepPlan,
    step_id=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 2**64 - 1),
    closes=tuples(ROW),
    opens=tuples(opens),
    grants=grants,
    prefills=tuples(complete(PrefillChunk, row=ROW, start=COUNT, length=COUNT)),
    steps=COUNT,
    replacements=tuples(complete(PageReplacement, row=ROW, first=COUNT, pages=arrays(), window_pages=arrays())),
    transfers=tuples(
        complete(
            Transfer,
            transfer_id=st.integers(0, 2**64 - 1),
            direction=st.sampled_from(TransferDirection),
            device_pages=arrays(),
            host_pages=arrays(),
            device_snapshots=arrays(),
            host_snapshots=arrays(),
            object_keys=tuples(st.binary(max_size=8)),
            cipher_key=st.binary(max_size=32),
            peer=st.none()
            | complete(
                PeerPages,
                workers=tuples(NAMES),
                lease=st.binary(max_size=16),
                device_pages=arrays(),
                device_snapshots=arrays(),
            ),
        )
    ),
    jumps=tuples(complete(JumpLimit, row=ROW, max_tokens=COUNT)),
    drafts=tuples(complete(Draft, row=ROW, token_ids=arrays())),
    saves=tuples(complete(StateSave, row=ROW, tokens=COUNT, snapshot=COUNT)),
    adapters=tuples(complete(AdapterLoad, slot=COUNT, digest=NAMES)),
    can_abandon=st.booleans(),
    can_shorten=st.booleans(),
    micro_batch=complete(MicroBatch, index=COUNT, count=st.integers(1, 16)),
    dropped_outputs=tuples(st.integers(0, 2**64 - 1)),
)


def span_of(tokens: int, top: int, asked: int) -> st.SearchStrategy[PromptLogprobSpan]:
    return complete(
        PromptLogprobSpan,
        first=COUNT,
        token_ids=arrays(tokens, tokens),
        logprobs=floats(tokens),
        ranks=arrays(tokens, tokens),
        top_ids=arrays(tokens * top, tokens * top).map(lambda ids: ids.reshape(tokens, top)),
        top_logprobs=floats(tokens, top),
        asked=floats(tokens, asked),
    )


spans = st.tuples(st.integers(1, 3), st.integers(0, 2), st.integers(0, 2)).flatmap(lambda sizes: span_of(*sizes))
stops = complete(
    RowStop,
    row=ROW,
    reason=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR]),
    matched_token_id=st.none() | TOKEN,
)
results = arrays().flatmap(
    lambda rows: complete(
        StepResult,
        step_id=st.integers(0, 2**64 - 1),
        substep=COUNT,
        last=st.booleans(),
        rows=st.just(rows),
        token_ids=st.just(rows[::-1].copy()),
        stops=tuples(stops),
        logprobs=tuples(st.tuples(ROW, logprobs)),
        compute_us=COUNT,
        host_us=COUNT,
        error=st.none() | st.text(),
        out_of_memory=st.booleans(),
        acks=tuples(
            complete(
                TransferAck,
                transfer_id=st.integers(0, 2**64 - 1),
                done_pages=COUNT,
                duration_us=COUNT,
                done_snapshots=COUNT,
            )
        ),
        embeddings=tuples(st.tuples(ROW, st.binary(max_size=8))),
        prompt_logprobs=tuples(st.tuples(ROW, spans)),
        partial=st.booleans(),
        accepted_rows=st.just(rows[1:].copy()),
        accepted_token_ids=st.just(rows[1:].copy()),
        forced_rows=st.just(rows[1:].copy()),
        forced_token_ids=st.just(rows[:0:-1].copy()),
        abandoned=st.booleans(),
    )
)
specs = complete(
    EngineSpec,
    model=NAMES,
    load_format=NAMES,
    dtype=NAMES,
    kv_dtype=NAMES,
    rank=st.integers(0, 7),
    world_size=st.sampled_from([8, 12, 16]),
    stages=st.sampled_from([1, 2, 4]),
    rendezvous=NAMES | st.just(""),
    page_size=POSITIVE,
    max_rows=POSITIVE,
    max_context=COUNT,
    max_step_tokens=POSITIVE,
    device_pages=st.none() | POSITIVE,
    memory_fraction=st.floats(0.015625, 1, width=32),
    host_pages=st.none() | COUNT,
    host_bytes=st.integers(0, 2**64 - 1),
    window_ratio=st.floats(0, 1, width=32),
    window_pages=st.none() | COUNT,
    quantization=NAMES,
    classifier_from_token=tuples(NAMES),
    snapshots=st.none() | COUNT,
    host_snapshots=st.none() | COUNT,
    rope_parameters=NAMES,
    vision=st.booleans(),
    only_encodes=st.booleans(),
    expert_parallel=st.booleans(),
    kept_embeddings=COUNT,
    deterministic=st.booleans(),
    data_parallel_size=st.sampled_from([8, 9]),
    data_parallel_rank=st.integers(0, 7),
    data_parallel_rendezvous=NAMES | st.just(""),
    adapter_slots=COUNT,
    adapter_experts=st.booleans(),
    weight_version=NAMES,
    base_model=NAMES,
    chosen_device_pages=st.booleans(),
    chosen_host_pages=st.booleans(),
    reload_weights=st.booleans(),
)
capacities = complete(
    EngineCapacity,
    device_pages=COUNT,
    page_size=COUNT,
    max_context=COUNT,
    vocabulary_size=COUNT,
    eos_token_ids=tuples(TOKEN),
    kv_bytes_per_token=COUNT,
    fingerprint=NAMES,
    kv_identity=NAMES,
    device=NAMES,
    layers=COUNT,
    host_pages=COUNT,
    has_storage=st.booleans(),
    is_encoder=st.booleans(),
    jumps_forward=st.booleans(),
    verifies_drafts=st.booleans(),
    abandons_passes=st.booleans(),
    head=st.none() | st.sampled_from(Pooling),
    only_pools=st.booleans(),
    sees_images=st.booleans(),
    embedding_bytes=COUNT,
    image_block=COUNT,
    encoder_identity=st.text(max_size=8),
    window_pool=st.none()
    | complete(WindowPool, pages=COUNT, window_tokens=COUNT, layers=COUNT, kv_bytes_per_token=COUNT),
    recurrent_states=st.none()
    | complete(RecurrentStates, snapshots=COUNT, row_bytes=st.integers(0, 2**64 - 1), host_snapshots=COUNT),
    prefill_tokens_per_s=st.floats(0, 2.0**30, width=32),
    load_bytes_per_s=st.floats(0, 2.0**40, width=32),
    products=NAMES,
)
