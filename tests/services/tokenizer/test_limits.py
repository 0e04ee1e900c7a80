from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from common.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError
from common.prompt_logprobs import PromptLogprobs
from common.requests import ChatMessage, ChatPrompt, ImageFile, ImageLimits, Prompt, TokenPrompt
from common.types import Resume
from services.tokenizer.limits import check_prompt, check_request
from tests.services.tokenizer.generate_requests import LIMITS, request

NAN = float("nan")
INF = float("inf")


@pytest.mark.parametrize(
    ("param", "changes"),
    [
        ("n", {"n": 0}),
        ("n", {"n": 129}),
        ("n", {"n": 2, "resume": Resume((1,), 1)}),
        ("timeout", {"timeout_ms": 0}),
        ("temperature", {"temperature": -0.1}),
        ("temperature", {"temperature": 2.1}),
        ("temperature", {"temperature": NAN}),
        ("top_p", {"top_p": -0.5}),
        ("top_p", {"top_p": 1.5}),
        ("top_p", {"top_p": NAN}),
        ("top_k", {"top_k": 0}),
        ("min_p", {"min_p": -0.1}),
        ("min_p", {"min_p": 1.1}),
        ("repetition_penalty", {"repetition_penalty": 0.0}),
        ("repetition_penalty", {"repetition_penalty": -1.0}),
        ("repetition_penalty", {"repetition_penalty": INF}),
        ("repetition_penalty", {"repetition_penalty": NAN}),
        ("presence_penalty", {"presence_penalty": 2.5}),
        ("frequency_penalty", {"frequency_penalty": -2.5}),
        ("frequency_penalty", {"frequency_penalty": NAN}),
        ("logit_bias", {"logit_bias": {50: 1.0}}),
        ("logit_bias", {"logit_bias": {1: 101.0}}),
        ("logit_bias", {"logit_bias": {1: NAN}}),
        ("logit_bias", {"logit_bias": dict.fromkeys(range(1025), 0.0)}),
        ("top_logprobs", {"top_logprobs": 21}),
        ("prompt_logprobs", {"prompt_logprobs": PromptLogprobs(0, 21)}),
        ("token_ids_logprob", {"prompt_logprobs": PromptLogprobs(0, 0, (50,))}),
        ("token_ids_logprob", {"logprob_token_ids": (50,)}),
        ("allowed_token_ids", {"allowed_token_ids": (50,)}),
        ("min_tokens", {"max_tokens": 4, "min_tokens": 5}),
        ("stop", {"stop_strings": ("",)}),
        ("stop", {"stop_strings": ("x",) * 65}),
        ("stop", {"stop_strings": ("x" * 4097,)}),
        ("resume", {"resume": Resume((50,), 1)}),
        ("resume", {"max_tokens": 2, "resume": Resume((1, 2), 1)}),
    ],
)
def test_values_out_of_range_are_refused_by_name(param: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        check_request(request(**changes), LIMITS)
    assert raised.value.param == param


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.0, "top_p": 1.0, "top_k": 1, "min_p": 0.0, "repetition_penalty": 0.1},
        {"temperature": 2.0, "min_p": 1.0, "presence_penalty": -2.0, "frequency_penalty": 2.0, "top_logprobs": 20},
        {"logit_bias": {0: -100.0, 49: 100.0}, "stop_token_ids": (0, 49, 50, 2**32 - 1), "stop_strings": ("a", "\n")},
        {"n": 128, "max_tokens": 1, "min_tokens": 1, "top_logprobs": 0, "timeout_ms": 1},
        {"max_tokens": 3, "resume": Resume((1, 2), 4)},
    ],
)
def test_values_at_the_edges_are_accepted(changes: dict[str, Any]) -> None:
    check_request(request(**changes), LIMITS)


def test_another_model_is_not_found() -> None:
    with pytest.raises(ModelNotFoundError, match="`gpt-4` does not exist"):
        check_request(request(model="gpt-4"), LIMITS)


def ids(length: int, value: int = 1) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.full(length, value, dtype=np.int32)


@pytest.mark.parametrize(("length", "max_tokens"), [(1, None), (99, None), (99, 1), (1, 99), (50, 50)])
def test_a_prompt_that_fits_is_accepted(length: int, max_tokens: int | None) -> None:
    check_prompt(ids(length), request(max_tokens=max_tokens), LIMITS)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="empty") as raised:
        check_prompt(ids(0), request(), LIMITS)
    assert raised.value.param == "prompt"


@pytest.mark.parametrize("wrong", [-1, 50, 2**31 - 1])
def test_ids_outside_the_vocabulary_are_refused(wrong: int) -> None:
    prompt = ids(3)
    prompt[1] = wrong
    with pytest.raises(InvalidRequestError, match=f"{wrong} is outside"):
        check_prompt(prompt, request(), LIMITS)


def test_a_prompt_as_long_as_the_context_is_refused_in_the_words_clients_know() -> None:
    with pytest.raises(ContextLengthError) as raised:
        check_prompt(ids(100), request(prompt=ChatPrompt((ChatMessage("user", "x"),))), LIMITS)
    assert raised.value.message == (
        "This model's maximum context length is 100 tokens. However, your messages resulted in 100 tokens. "
        "Please reduce the length of the messages."
    )
    assert raised.value.param == "messages"


def test_prompt_and_completion_beyond_the_context_are_refused_with_both_numbers() -> None:
    with pytest.raises(ContextLengthError) as raised:
        check_prompt(ids(60), request(max_tokens=41), LIMITS)
    assert raised.value.message == (
        "This model's maximum context length is 100 tokens. However, you requested 101 tokens (60 in the prompt, "
        "41 in the completion). Please reduce the length of the prompt or completion."
    )


def test_too_many_log_probabilities_of_a_prompt_are_refused() -> None:
    large = replace(LIMITS, max_context_tokens=10_000)
    check_prompt(ids(5_000), request(prompt_logprobs=PromptLogprobs(0, 20)), large)
    check_prompt(ids(9_000), request(prompt_logprobs=PromptLogprobs(8_000, 20)), large)
    with pytest.raises(InvalidRequestError, match="188979 log probabilities") as raised:
        check_prompt(ids(9_000), request(prompt_logprobs=PromptLogprobs(0, 20)), large)
    assert raised.value.param == "prompt_logprobs"


def test_log_probabilities_from_after_the_prompt_are_refused() -> None:
    check_prompt(ids(60), request(prompt_logprobs=PromptLogprobs(60)), LIMITS)
    with pytest.raises(InvalidRequestError, match="from token 61 on, of a prompt of 60") as raised:
        check_prompt(ids(60), request(prompt_logprobs=PromptLogprobs(61)), LIMITS)
    assert raised.value.param == "logprob_start_len"


PICTURE = ImageFile(b"12345678")
WITH_IMAGES = replace(LIMITS, images=ImageLimits(max_images=2, max_file_bytes=8, max_pixels=100))


def shown(*parts: str | ImageFile) -> ChatPrompt:
    return ChatPrompt((ChatMessage("user", parts=parts), ChatMessage("user", parts=parts)))


@pytest.mark.parametrize(
    ("prompt", "images", "message"),
    [
        (shown("a", PICTURE, PICTURE), (), "4 images; at most 2"),
        ("a", (PICTURE,) * 3, "3 images; at most 2"),
        (shown(ImageFile(b"123456789")), (), "9 bytes; at most 8"),
        ("a", (ImageFile(b""),), "empty"),
        ("a", (ImageFile(b"1", "medium"),), "'medium'"),
        (TokenPrompt((1, 2)), (PICTURE,), "need a text"),
    ],
)
def test_images_beyond_the_limits_are_refused(prompt: Prompt, images: tuple[ImageFile, ...], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refused:
        check_request(request(prompt=prompt, images=images), WITH_IMAGES)
    assert refused.value.param == ("messages" if isinstance(prompt, ChatPrompt) else "prompt")


@pytest.mark.parametrize(("prompt", "images"), [(shown("a", PICTURE), ()), ("a", (PICTURE,) * 2)])
def test_a_model_without_vision_refuses_images_by_its_name(prompt: Prompt, images: tuple[ImageFile, ...]) -> None:
    check_request(request(prompt=prompt, images=images), WITH_IMAGES)
    with pytest.raises(InvalidRequestError, match="`tiny` does not take images"):
        check_request(request(prompt=prompt, images=images), LIMITS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frames": (b"1",) * 4}, "4 frames; at most 3"),
        ({"frames": (b"1", b"")}, "empty"),
        ({"frames": (b"12345", b"1234")}, "has 9 bytes; at most 8"),
        ({"frames_per_second": 1e-9}, "frames per second"),
        ({"data": b"1", "frames": (), "is_video_file": True}, "Pando's extra 'video', is not installed"),
        ({"frames_per_second": NAN}, "frames per second"),
    ],
)
def test_videos_beyond_the_limits_are_refused(changes: dict[str, Any], message: str) -> None:
    watching = replace(WITH_IMAGES, images=ImageLimits(2, 8, 100, max_frames=3))
    video = ImageFile(b"", frames=(b"1", b"2"), frames_per_second=2)
    check_request(request(prompt="a", images=(video,)), watching)
    with pytest.raises(InvalidRequestError, match=message):
        check_request(request(prompt="a", images=(replace(video, **changes),)), watching)
    with pytest.raises(InvalidRequestError, match="`tiny` does not take videos"):
        check_request(request(prompt="a", images=(video,)), WITH_IMAGES)


def test_a_prompt_with_images_is_not_truncated() -> None:
    check_request(request(prompt="a", images=(PICTURE,)), WITH_IMAGES)
    with pytest.raises(InvalidRequestError, match="cut in two") as refused:
        check_request(request(prompt="a", images=(PICTURE,), truncate_prompt_tokens=4), WITH_IMAGES)
    assert refused.value.param == "truncate_prompt_tokens"


def test_ids_below_0_are_of_images_only() -> None:
    check_prompt(np.array([1, -5, 2], np.int32), request(), LIMITS, has_images=True)
    with pytest.raises(InvalidRequestError, match="-5"):
        check_prompt(np.array([1, -5, 2], np.int32), request(), LIMITS)
