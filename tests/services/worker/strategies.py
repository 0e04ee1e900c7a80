"""Hypothesis strategies for the step protocol."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from common.steps import (
    EngineCapacity,
    EngineSpec,
    JumpLimit,
    PageGrants,
    PageReplacement,
    PrefillChunk,
    RowOpen,
    RowStop,
    StepPlan,
    StepResult,
    WindowPool,
)
from common.transfers import Transfer, TransferAck, TransferDirection
from common.types import FinishReason, Pooling, TokenIds
from tests.common.strategies import COUNT, NAMES, TOKEN, logprobs, sampling

ROW = st.integers(0, 2**31 - 1)
POSITIVE = st.integers(1, 2**31 - 1)


def arrays(least: int = 0) -> st.SearchStrategy[TokenIds]:
    return st.lists(TOKEN, min_size=least, max_size=8).map(lambda values: np.array(values, np.int32))


def tuples(elements: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(elements, max_size=3).map(tuple)


opens = st.builds(
    RowOpen,
    row=ROW,
    request_id=NAMES,
    token_ids=arrays(1),
    prompt_tokens=COUNT,
    computed_tokens=COUNT,
    pages=arrays(),
    sampling=sampling,
    max_total_tokens=COUNT,
    stop_token_ids=tuples(TOKEN),
    min_new_tokens=COUNT,
    postponed_token_ids=tuples(TOKEN),
    window_pages=arrays(),
    pooling=st.none() | st.sampled_from(Pooling),
)
grants = st.lists(st.tuples(ROW, TOKEN, TOKEN), max_size=8).map(
    lambda entries: PageGrants(*np.array(entries, np.int32).reshape(-1, 3).T)
)
plans = st.builds(
    StepPlan,
    step_id=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 2**64 - 1),
    closes=tuples(ROW),
    opens=tuples(opens),
    grants=grants,
    prefills=tuples(st.builds(PrefillChunk, row=ROW, start=COUNT, length=COUNT)),
    steps=COUNT,
    replacements=tuples(st.builds(PageReplacement, row=ROW, first=COUNT, pages=arrays(), window_pages=arrays())),
    transfers=tuples(
        st.builds(
            Transfer,
            transfer_id=st.integers(0, 2**64 - 1),
            direction=st.sampled_from(TransferDirection),
            device_pages=arrays(),
            host_pages=arrays(),
            object_keys=tuples(st.binary(max_size=8)),
            cipher_key=st.binary(max_size=32),
        )
    ),
    jumps=tuples(st.builds(JumpLimit, row=ROW, max_tokens=COUNT)),
)
stops = st.builds(
    RowStop,
    row=ROW,
    reason=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR]),
    matched_token_id=st.none() | TOKEN,
)
results = arrays().flatmap(
    lambda rows: st.builds(
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
        acks=tuples(st.builds(TransferAck, transfer_id=st.integers(0, 2**64 - 1), done_pages=COUNT, duration_us=COUNT)),
        embeddings=tuples(st.tuples(ROW, st.binary(max_size=8))),
        forced_rows=st.just(rows[1:].copy()),
        forced_token_ids=st.just(rows[:0:-1].copy()),
    )
)
specs = st.builds(
    EngineSpec,
    model=NAMES,
    load_format=NAMES,
    dtype=NAMES,
    kv_dtype=NAMES,
    rank=st.integers(0, 7),
    world_size=st.integers(8, 16),
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
)
capacities = st.builds(
    EngineCapacity,
    device_pages=COUNT,
    page_size=COUNT,
    max_context=COUNT,
    vocabulary_size=COUNT,
    eos_token_ids=tuples(TOKEN),
    kv_bytes_per_token=COUNT,
    fingerprint=NAMES,
    device=NAMES,
    layers=COUNT,
    host_pages=COUNT,
    is_encoder=st.booleans(),
    jumps_forward=st.booleans(),
    window_pool=st.none()
    | st.builds(WindowPool, pages=COUNT, window_tokens=COUNT, layers=COUNT, kv_bytes_per_token=COUNT),
    prefill_tokens_per_s=st.floats(0, 2.0**30, width=32),
    load_bytes_per_s=st.floats(0, 2.0**40, width=32),
)
