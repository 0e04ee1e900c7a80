"""Requests that embed their prompt, among those that generate, and on a model that can do nothing else."""

from __future__ import annotations

import pytest

from common.types import ErrorCode, FinishReason, Pooling, Resume
from tests.fakes.simulated_worker import embedding_of, expected_output
from tests.services.scheduler.core.harness import STOP_ID, Harness, make_request

PROMPT = [11 + i for i in range(30)]


def embed(harness: Harness, name: str, prompt: list[int], pooling: Pooling = Pooling.MEAN, user: str = "alice") -> None:
    assert harness.core.submit(make_request(name, prompt, user=user, pooling=pooling), 0.0).rejected is None


@pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.MEAN])
def test_a_prompt_is_embedded_in_chunks_while_other_rows_generate(pooling: Pooling) -> None:
    harness = Harness(max_step_tokens=8)
    assert harness.core.submit(make_request("text", PROMPT[:5], max_tokens=9), 0.0).rejected is None
    embed(harness, "vector", PROMPT, pooling)
    harness.run()
    assert harness.finishes["vector", 0].embedding == embedding_of(PROMPT)
    assert harness.finishes["vector", 0].reason is FinishReason.STOP
    assert harness.outputs["text", 0] == expected_output(PROMPT[:5], 14, (STOP_ID,))
    chunks = [chunk for plan in harness.plans for chunk in plan.prefills if chunk.length > 5 or chunk.start]
    assert len(chunks) > 3


def test_last_pooling_uses_a_cached_prefix_and_leaves_one() -> None:
    harness = Harness()
    embed(harness, "first", PROMPT, Pooling.LAST)
    harness.run()
    embed(harness, "second", PROMPT, Pooling.LAST)
    harness.core.submit(make_request("text", PROMPT), 0.0)
    harness.run()
    assert harness.cached["first", 0] == 0
    assert harness.cached["second", 0] == harness.cached["text", 0] == 28
    assert harness.finishes["second", 0].embedding == embedding_of(PROMPT)


def test_mean_pooling_neither_reads_nor_writes_the_cache() -> None:
    harness = Harness()
    harness.core.submit(make_request("text", PROMPT, max_tokens=1), 0.0)
    harness.run()
    embed(harness, "mean", PROMPT, Pooling.MEAN)
    harness.run()
    assert harness.cached["mean", 0] == 0
    assert harness.finishes["mean", 0].embedding == embedding_of(PROMPT)
    other = [7 + token for token in PROMPT]
    embed(harness, "other", other, Pooling.MEAN)
    harness.run()
    harness.core.submit(make_request("again", other), 0.0)
    harness.run()
    assert harness.cached["again", 0] == 0


def test_a_prompt_may_fill_the_whole_context() -> None:
    harness = Harness(max_context=32)
    longest = [5] * 32
    embed(harness, "longest", longest)
    harness.run()
    assert harness.finishes["longest", 0].embedding == embedding_of(longest)
    rejected = harness.core.submit(make_request("longer", [5] * 33, pooling=Pooling.MEAN), 0.0).rejected
    assert rejected is not None
    assert rejected.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED


def test_a_lost_worker_and_an_abort_leave_nothing_behind() -> None:
    harness = Harness()
    embed(harness, "stays", PROMPT)
    embed(harness, "goes", PROMPT[:20])
    harness.plan()
    harness.lose_workers()
    assert harness.core.abort(make_request("goes", [1]).request_id)
    harness.run()
    assert harness.finishes["stays", 0].embedding == embedding_of(PROMPT)
    assert harness.finishes["goes", 0].reason is FinishReason.ABORT
    assert harness.core.rows.running == 0
    harness.core.memory.cache.flush()
    assert harness.core.memory.allocator.free_pages == harness.config.device_pages


def encoder(max_rows: int = 4) -> Harness:
    return Harness(pages=0, cache="chunk", is_encoder=True, max_context=16, max_rows=max_rows)


def test_an_encoder_needs_no_pages_and_computes_each_prompt_in_one_pass() -> None:
    harness = encoder(max_rows=8)
    prompts = {f"r{length}": PROMPT[:length] for length in (7, 9, 16, 1, 2, 15)}
    for name, prompt in prompts.items():
        embed(harness, name, prompt)
    harness.run()
    for name, prompt in prompts.items():
        assert harness.finishes[name, 0].embedding == embedding_of(prompt)
    # In order of arrival, as many as the budget holds.
    assert [[chunk.length for chunk in plan.prefills] for plan in harness.plans if plan.prefills] == [
        [7, 9],
        [16],
        [1, 2],
        [15],
    ]
    assert not any(len(plan.grants.rows) for plan in harness.plans)
    assert harness.core.rows.running == 0


def test_an_encoder_goes_on_after_its_worker_was_lost() -> None:
    harness = encoder()
    embed(harness, "a", PROMPT[:10])
    harness.plan()
    harness.lose_workers()
    harness.run()
    assert harness.finishes["a", 0].embedding == embedding_of(PROMPT[:10])


def test_an_encoder_refuses_to_generate_and_names_the_model_parameter() -> None:
    rejected = encoder().core.submit(make_request("text", [1, 2]), 0.0).rejected
    assert rejected is not None
    assert (rejected.code, rejected.param) == (ErrorCode.INVALID_REQUEST, "model")


def test_an_encoder_refuses_a_prompt_that_is_too_long() -> None:
    rejected = encoder().core.submit(make_request("long", [1] * 17, pooling=Pooling.MEAN), 0.0).rejected
    assert rejected is not None
    assert "at most 16" in rejected.message


def test_meaningless_pooling_options_are_refused_by_field() -> None:
    core = Harness().core
    for request, param in (
        (make_request("first", [1, 2], pooling=Pooling.FIRST), "pooling"),
        (make_request("many", [1, 2], pooling=Pooling.MEAN, n=2), "n"),
        (make_request("resumed", [1, 2], pooling=Pooling.MEAN, resume=Resume((1,), 1)), "n"),
    ):
        rejected = core.submit(request, 0.0).rejected
        assert rejected is not None
        assert rejected.param == param


def test_classification_uses_the_cache_as_the_view_of_its_request_allows() -> None:
    harness = Harness(head=Pooling.CLASSIFY)
    for name, user in (("first", "alice"), ("second", "alice"), ("third", "bob")):
        embed(harness, name, PROMPT, Pooling.CLASSIFY, user)
        harness.run()
    assert [harness.cached[name, 0] for name in ("first", "second", "third")] == [0, 28, 0]
    assert harness.finishes["second", 0].embedding == embedding_of(PROMPT)


def test_classification_of_each_token_neither_reads_nor_writes_the_cache() -> None:
    harness = Harness(head=Pooling.TOKEN_CLASSIFY)
    for name in ("first", "second"):
        embed(harness, name, PROMPT, Pooling.TOKEN_CLASSIFY)
        harness.run()
    assert [harness.cached[name, 0] for name in ("first", "second")] == [0, 0]


@pytest.mark.parametrize(
    ("head", "pooling"),
    [
        (None, Pooling.CLASSIFY),
        (Pooling.CLASSIFY, None),
        (Pooling.CLASSIFY, Pooling.LAST),
        (Pooling.CLASSIFY, Pooling.TOKEN_CLASSIFY),
        (Pooling.TOKEN_CLASSIFY, Pooling.CLASSIFY),
    ],
)
def test_requests_for_which_the_model_has_no_head_are_refused(head: Pooling | None, pooling: Pooling | None) -> None:
    rejected = Harness(head=head).core.submit(make_request("text", [1, 2], pooling=pooling), 0.0).rejected
    assert rejected is not None
    assert (rejected.code, rejected.param) == (ErrorCode.INVALID_REQUEST, "model")
