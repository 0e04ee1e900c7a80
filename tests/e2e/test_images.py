"""Images through all services: a tiny model that sees them answers as `transformers` does, and its cache is private."""

from __future__ import annotations

import base64
import json
import re
import signal
from dataclasses import replace
from threading import Timer
from typing import TYPE_CHECKING, Any

import pytest
import torch
from PIL import Image

from common.settings import GatewaySettings, ModelSettings, Settings, TokenizerSettings
from common.settings.tokenizer import ImageDecodingSettings
from deploy.cli import main
from tests.e2e.conftest import serve
from tests.e2e.seeing_model import (
    PAD,
    chat_prompt,
    content_of,
    continued,
    image_part,
    prompt_of,
    save_seeing_model,
    video_file_part,
    video_part,
    video_prompt,
)
from tests.services.tokenizer.images.clips import clip_file, clip_pictures, decoded, sound_file
from tests.services.tokenizer.images.pictures import file_of, picture
from tests.services.worker.engine.vision.models import expected
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.served import Served

TOKENS = 8
SMALL = picture(40, 56, seed=1)
WIDE = picture(200, 60, seed=2)
WIDE_TOKENS = chat_prompt(WIDE).images[0].length
MAX_IMAGES = 4
# Of the most likely tokens.
TOP = 3


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seeing_model(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def seeing(directory: Path, run_root: Path) -> Iterator[Served]:
    settings = Settings(
        model=ModelSettings(reference=str(directory), dtype="float32", images="on"),
        gateway=GatewaySettings(port=0, anonymous="vouched"),
        tokenizer=TokenizerSettings(images=ImageDecodingSettings(max_images=MAX_IMAGES, processes=1)),
    )
    yield from serve(settings, run_root)


def body_of(served: Served, user: str, *messages: dict[str, Any], tokens: int = TOKENS) -> dict[str, Any]:
    return {
        "model": served.model, "messages": list(messages), "max_tokens": tokens, "temperature": 0, "user": user,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip


def ask(served: Served, user: str, *messages: dict[str, Any], tokens: int = TOKENS) -> dict[str, Any]:
    with served.http() as http:
        response = http.post("/v1/chat/completions", json=body_of(served, user, *messages, tokens=tokens))
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def message(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": content_of(*parts)}


def cached(answer: dict[str, Any]) -> int:
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def refused(served: Served, body: dict[str, Any], path: str = "/v1/chat/completions") -> str:
    with served.http() as http:
        response = http.post(path, json=body)
    assert response.status_code == 400, response.text
    text: str = response.json()["error"]["message"]
    return text


@pytest.mark.parametrize(
    "parts", [(SMALL, "What is it?"), ("Two: ", WIDE, " and ", SMALL, "Compare.")], ids=["one", "two"]
)
def test_answers_to_images_are_those_of_transformers(seeing: Served, directory: Path, parts: tuple[Any, ...]) -> None:
    answer = ask(seeing, "ada", message(*parts))
    prompt = chat_prompt(*parts)
    assert answer["choices"][0]["token_ids"] == continued(directory, prompt, TOKENS)
    assert answer["usage"]["prompt_tokens"] == len(prompt.ids)


def test_log_probabilities_after_images_are_those_of_transformers(seeing: Served, directory: Path) -> None:
    parts = "Two: ", WIDE, " and ", SMALL, "Which is wider?"
    tokens, logits = expected(directory, chat_prompt(*parts), TOKENS, PAD)
    reference = torch.log_softmax(logits, dim=-1)
    # The second time, the images are found in the cache.
    for is_cached in (False, True):
        body = body_of(seeing, "lena", message(*parts)) | {"logprobs": True, "top_logprobs": TOP}
        with seeing.http() as http:
            answer = http.post("/v1/chat/completions", json=body).json()
        assert (cached(answer) > WIDE_TOKENS) == is_cached
        (choice,) = answer["choices"]
        assert choice["token_ids"] == tokens
        entries = choice["logprobs"]["content"]
        assert len(entries) == TOKENS
        for entry, token, row in zip(entries, tokens, reference, strict=True):
            assert entry["logprob"] == pytest.approx(float(row[token]), abs=2e-3, rel=1e-3)
            likeliest = [top["logprob"] for top in entry["top_logprobs"]]
            assert likeliest == pytest.approx(row.topk(TOP).values.tolist(), abs=2e-3, rel=1e-3)


def test_a_later_turn_finds_the_image_and_another_user_finds_nothing(seeing: Served) -> None:
    first = message(WIDE, "Describe it at some length.")
    turns = (first, {"role": "assistant", "content": "A picture."}, message("What else?"))
    assert cached(ask(seeing, "bea", first)) == 0
    prompt = chat_prompt(WIDE)
    second = ask(seeing, "bea", *turns)
    # The whole image, but for the page in which it ends.
    assert cached(second) >= len(prompt.ids) - 16
    other = ask(seeing, "carl", *turns)
    assert cached(other) == 0
    assert other["choices"][0]["token_ids"] == second["choices"][0]["token_ids"]


def test_another_picture_under_the_same_text_is_not_found(seeing: Served) -> None:
    text = "Which picture is it?"
    assert cached(ask(seeing, "dora", message(SMALL, text))) == 0
    again, other = (
        ask(seeing, "dora", message(SMALL, text)),
        ask(seeing, "dora", message(picture(40, 56, seed=9), text)),
    )
    assert cached(again) > 16
    assert cached(other) < 16


def test_a_video_is_seen_as_transformers_sees_it_and_found_by_its_frames_and_times(
    seeing: Served, directory: Path
) -> None:
    frames, text = [picture(40, 56, seed=seed) for seed in range(4)], "What happens?"
    # Two frames a second are a step each second, and of these 4 coordinates.
    prompt, video = video_prompt(text, frames, 4), message(text, video_part(frames, 2))
    first, again = ask(seeing, "vera", video), ask(seeing, "vera", video)
    assert first["choices"][0]["token_ids"] == continued(directory, prompt, TOKENS, 4.0)
    assert first["usage"]["prompt_tokens"] == len(prompt.ids)
    assert (cached(first), cached(again) > prompt.images[0].length) == (0, True)
    begin = prompt.images[0].offset
    for other in (video_part(frames[::-1], 2), video_part(frames, 4)):
        assert cached(ask(seeing, "vera", message(text, other))) <= begin


@pytest.mark.parametrize(
    ("codec", "media_type"), [("mpeg4", "video/mp4"), pytest.param("vp9", "video/webm", marks=pytest.mark.extended)]
)
def test_a_file_of_a_video_is_seen_as_its_frames(seeing: Served, directory: Path, codec: str, media_type: str) -> None:
    file, text = clip_file(clip_pictures(8, 40, 56), codec, rate=4), "What happens?"
    # Two of four frames a second.
    frames = [Image.fromarray(decoded(file)[place]) for place in (0, 2, 4, 6)]
    prompt, video = video_prompt(text, frames, 4), message(text, video_file_part(file, media_type))
    first, again = ask(seeing, f"zoe {codec}", video), ask(seeing, f"zoe {codec}", video)
    assert first["choices"][0]["token_ids"] == continued(directory, prompt, TOKENS, 4.0)
    assert first["usage"]["prompt_tokens"] == len(prompt.ids)
    assert (cached(first), cached(again) > prompt.images[0].length) == (0, True)
    with seeing.http() as http:
        uploaded = http.post("/v1/files", data={"purpose": "vision"}, files={"file": ("clip", file)})
        uploaded.raise_for_status()
    part = {"type": "video_file", "video_file": {"file_id": uploaded.json()["id"]}}
    stored = ask(seeing, f"zoe {codec}", message(text, part))
    assert cached(stored) == cached(again), "the same pixels"
    faster = ask(seeing, f"zoe {codec}", message(text, video_file_part(file, media_type, fps=4)))
    assert faster["usage"]["prompt_tokens"] == len(prompt.ids) + prompt.images[0].length


def test_files_of_videos_that_cannot_be_used_are_refused_by_name_and_others_are_served(seeing: Served) -> None:
    file = clip_file(clip_pictures(30, 40, 56))
    for words, bad in {
        "is cut off": file[:-50],
        "only sound": sound_file(),
        "fewer than 2 frames": clip_file(clip_pictures(1, 40, 56)),
        "damaged": file[:200] + bytes(len(file) - 200),
        "is AVI": b"RIFF0000AVI LIST",
        "is empty": b"",
    }.items():
        assert words in refused(seeing, body_of(seeing, "wim", message("?", video_file_part(bad, "video/mp4"))))
    assert ask(seeing, "wim", message("?", video_file_part(file, "video/mp4")))["choices"]


def test_generate_takes_the_model_s_own_placeholders(seeing: Served, directory: Path) -> None:
    coded = base64.b64encode(file_of(SMALL)).decode()
    body = {"text": "See <|image_pad|>: ", "image_data": coded}
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    with seeing.http() as http:
        answer = http.post("/generate", json={**body, "sampling_params": sampling}).json()
    assert answer["output_ids"] == continued(directory, prompt_of("See ", SMALL, ": "), TOKENS)
    assert "2 placeholders" in refused(seeing, {**body, "text": "<|image_pad|><|image_pad|>"}, "/generate")


def test_turns_of_a_session_go_on_after_an_image(seeing: Served, directory: Path) -> None:
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    with seeing.http() as http:
        session = http.post("/open_session", json={"capacity_of_str_len": 2000}).json()
        first = http.post(
            "/generate",
            json={
                "text": "See <|image_pad|>: ", "image_data": base64.b64encode(file_of(SMALL)).decode(), "rid": "one",
                "sampling_params": sampling, "session_params": {"id": session},
            },
        ).json()  # fmt: skip
        body = {"text": "more", "sampling_params": sampling, "session_params": {"id": session, "rid": "one"}}
        second = http.post("/generate", json=body).json()
        assert http.post("/close_session", json={"session_id": session}).status_code == 200
    prompt = prompt_of("See ", SMALL, ": ")
    assert first["output_ids"] == continued(directory, prompt, TOKENS)
    whole = replace(prompt, ids=(*prompt.ids, *first["output_ids"], *b"more"))
    assert second["output_ids"] == continued(directory, whole, TOKENS)
    assert second["meta_info"]["cached_tokens"] >= len(prompt.ids) - 16


def test_images_in_history_and_in_tool_results_with_several_choices_and_a_grammar(seeing: Served) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        message(SMALL, "Look around."),
        {"role": "assistant", "content": "I do.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": content_of(WIDE, "seen")},
        message("Which one?"),
    ]
    body = body_of(seeing, "kim", *messages, tokens=16) | {"n": 3, "temperature": 1, "guided_regex": "(cat|dog){2}"}
    with seeing.http() as http:
        response = http.post("/v1/chat/completions", json={**body, "ignore_eos": False})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice in answer["choices"]:
        assert re.fullmatch("(cat|dog){2}", choice["message"]["content"])
    images = sum(image.length for image in prompt_of(SMALL, WIDE).images)
    assert answer["usage"]["prompt_tokens"] > images


def test_tokens_of_images_are_counted_as_they_are_computed(seeing: Served) -> None:
    with seeing.http() as http:
        counted = http.post("/tokenize", json={"model": seeing.model, "messages": [message(SMALL, "Count me.")]}).json()
        card = http.get("/v1/models").json()["data"][0]
    assert counted["count"] == len(chat_prompt(SMALL, "Count me.").ids)
    assert card["images"] == {
        "max_images": MAX_IMAGES, "max_file_bytes": 20 * 1024 * 1024, "max_pixels": 50_000_000, "max_frames": 768,
        "video_files": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ((b"<svg xmlns='http://www.w3.org/2000/svg'/>",), "SVG"),
        ((file_of(SMALL)[:400],), "damaged"),
        ((file_of(SMALL, "GIF", save_all=True, append_images=[WIDE]),), "animated"),
        ((file_of(Image.new("1", (20_000, 20_000))),), "20000 x 20000 pixels"),
        ((file_of(picture(1000, 3)),), "too narrow"),
        ((SMALL,) * 100, "100 images"),
        ((SMALL, file_of(WIDE)[:300]), "Image 2 of 2"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_used_are_refused_by_name(seeing: Served, files: tuple[Any, ...], words: str) -> None:
    assert words in refused(seeing, body_of(seeing, "eve", message(*files, "What is it?")))


def test_users_cannot_write_placeholders(seeing: Served) -> None:
    answer = ask(seeing, "fay", message(SMALL, "<|image_pad|>"))
    assert answer["usage"]["prompt_tokens"] == len(chat_prompt(SMALL).ids) + len("<|image_pad|>")


@pytest.mark.parametrize("dies", [pytest.param("encoding", marks=pytest.mark.extended), "answering", "known"])
def test_an_answer_goes_on_after_its_worker_has_died(seeing: Served, dies: str) -> None:
    # A known image comes without its file and its pixels, and its KV and embeddings are lost with the worker.
    question, tokens = message(WIDE, "Tell a long story about it."), 200
    whole = ask(seeing, "gus", question, tokens=tokens)["choices"][0]["token_ids"]
    restarts = seeing.deployment.restarts_of("worker")
    found: list[int] = []
    body = body_of(seeing, f"hal {dies}", question, tokens=tokens) | {"stream": True}
    if dies == "known":
        ask(seeing, f"hal {dies}", message(WIDE, "What is it?"), tokens=1)
    if dies == "encoding":
        # It dies with the image that it was sent; if that has not arrived by then, the next worker gets it alone.
        seeing.deployment.kill("worker", signal.SIGSTOP)
        Timer(1.0, seeing.deployment.kill, ["worker"]).start()
    with seeing.http() as http, http.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                if choice.get("token_ids") and not found and dies != "encoding":
                    seeing.deployment.kill("worker")
                found += choice.get("token_ids") or []
    assert found == whole
    wait_until(lambda: seeing.deployment.restarts_of("worker") > restarts)
    wait_until(seeing.is_ready, timeout_s=120.0)


@pytest.mark.parametrize("dies", ["tokenizer", "scheduler"])
def test_known_images_are_seen_after_what_kept_them_has_died(seeing: Served, directory: Path, dies: str) -> None:
    parts = (SMALL, WIDE, "Compare.")
    tokens = continued(directory, chat_prompt(*parts), TOKENS)
    user, restarts = f"liv {dies}", seeing.deployment.restarts_of(dies)
    ask(seeing, user, message(SMALL, WIDE, "What is it?"), tokens=1)
    seeing.deployment.kill(dies)
    wait_until(lambda: seeing.deployment.restarts_of(dies) > restarts)
    wait_until(seeing.is_ready, timeout_s=120.0)
    for _ in range(2):
        assert ask(seeing, user, message(*parts))["choices"][0]["token_ids"] == tokens


def test_the_command_line_sends_images(seeing: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(file_of(SMALL))
    flags = ["--url", seeing.url, "--image", str(file), "--prompt", "What is it?", "--max-tokens", "4"]
    assert main(["chat", *flags, "--temperature", "0"]) == 0
    assert f"{len(chat_prompt(SMALL, 'What is it?').ids)} " in capsys.readouterr().err


def test_everything_is_given_back(seeing: Served) -> None:
    with seeing.leaving_nothing_behind():
        ask(seeing, "ida", message(SMALL, "Bye."))


@pytest.mark.extended
def test_without_its_images_the_model_reads_text_only(directory: Path, run_root: Path) -> None:
    settings = Settings(
        model=ModelSettings(reference=str(directory), dtype="float32", images="off"),
        gateway=GatewaySettings(port=0, anonymous="vouched"),
    )
    for served in serve(settings, run_root):
        assert ask(served, "jo", {"role": "user", "content": "Hello"})["usage"]["completion_tokens"] == TOKENS
        body = body_of(served, "jo", {"role": "user", "content": [image_part(SMALL)]})
        assert "takes no images" in refused(served, body)
