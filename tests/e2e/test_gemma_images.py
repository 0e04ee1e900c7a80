"""Gemma 3 with pictures and their crops through all services: answers as those of `transformers`, and prefix hits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from common.settings import GatewaySettings, ModelSettings, SchedulerSettings, Settings
from common.tokenization.vocabulary import byte_alphabet
from common.types import RowImage
from tests.e2e.conftest import serve
from tests.e2e.seeing_model import content_of
from tests.services.tokenizer.images.pictures import picture
from tests.services.worker.engine.vision.models import Prompt, expected, save

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.served import Served

pytestmark = pytest.mark.extended

TOKENS = 8
MARKS = ("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<image_soft_token>", "<end_of_image>")
FIRST_MARK = 256
BEGIN, SOFT, END = (FIRST_MARK + i for i in (2, 3, 4))
# Of the tiny model's pictures.
TILE, SIDE = 9, 46
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Gemma3ImageProcessor", "size": {"height": SIDE, "width": SIDE}, "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 40, "pan_and_scan_max_num_crops": 3, "pan_and_scan_min_ratio_to_activate": 1.5,
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}<start_of_turn>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<start_of_image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
)
SQUARE, LONG = picture(50, 56, seed=1), picture(130, 44, seed=2)


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in byte_alphabet().items()}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    # Successive line breaks are one token, as in Gemma's vocabulary.
    made.add_tokens([AddedToken("\n" * count, normalized=False) for count in range(2, 8)])
    return made


def prompt_of(*messages: tuple[Any, ...] | str) -> Prompt:
    """Return the prompt of a conversation, whose answers are texts, as the processor of `transformers` writes it."""
    text, images, pixels = "", [], []
    whole = "\n\n<start_of_image>" + TILE * "<image_soft_token>" + "<end_of_image>\n\n"
    for message in messages:
        text += "<start_of_turn>" + ("assistant\n" if isinstance(message, str) else "user\n")
        for part in (message,) if isinstance(message, str) else message:
            if isinstance(part, str):
                text += part
                continue
            made = Gemma3ImageProcessorPil(**PROCESSOR)(images=part, return_tensors="np")
            pixels.append(np.asarray(made["pixel_values"], np.float32))
            crops = int(made["num_crops"][0])
            if crops:
                text += f"Here is the original image {whole} and here are some crops to help you see better "
            text += " ".join([whole] * (crops or 1))
        text += "<end_of_turn>\n"
    ids = np.array(tokenizer().encode(text + "<start_of_turn>assistant\n", add_special_tokens=False).ids)
    places, taken = np.flatnonzero(ids == SOFT), 0
    for own in pixels:
        images.append(RowImage(b"", int(places[taken]), len(own) * TILE, (), own))
        taken += len(own) * TILE
    assert taken == len(places)
    return Prompt(tuple(np.where(ids == SOFT, -1, ids).tolist()), tuple(images))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma")
    own = tokenizer()
    save(
        path, "gemma3", own.get_vocab_size(), image_token_index=SOFT, boi_token_index=BEGIN, eoi_token_index=END,
    )  # fmt: skip
    own.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return path


@pytest.fixture(scope="module")
def served(directory: Path, run_root: Path) -> Iterator[Served]:
    """Serve with steps that a picture hardly fits in."""
    settings = Settings(
        model=ModelSettings(reference=str(directory), dtype="float32", images="on"),
        gateway=GatewaySettings(port=0, anonymous="vouched"),
        scheduler=SchedulerSettings(max_rows=8, max_step_tokens=8 + TILE),
    )
    yield from serve(settings, run_root)


def ask(served: Served, user: str, *messages: tuple[Any, ...] | str) -> dict[str, Any]:
    body = {
        "model": served.model, "max_tokens": TOKENS, "temperature": 0, "user": user, "ignore_eos": True,
        "return_token_ids": True,
        "messages": [
            {"role": "assistant", "content": message}
            if isinstance(message, str)
            else {"role": "user", "content": content_of(*message)}
            for message in messages
        ],
    }  # fmt: skip
    with served.http() as http:
        response = http.post("/v1/chat/completions", json=body)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def test_answers_are_those_of_transformers_cold_and_with_a_prefix(served: Served, directory: Path) -> None:
    turns: list[tuple[Any, ...] | str] = []
    cached = []
    # Among them the texts to which line breaks and words beside pictures are added.
    for question in ((SQUARE, "What is it?"), ("Two:\n", LONG, SQUARE, "\nCompare."), ("And", LONG)):
        turns.append(question)
        prompt = prompt_of(*turns)
        answer = ask(served, "ada", *turns)
        tokens, _ = expected(directory, prompt, TOKENS, SOFT)
        assert answer["choices"][0]["token_ids"] == tokens
        assert answer["usage"]["prompt_tokens"] == len(prompt.ids)
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        turns.append("A picture.")
    first, second, third = cached
    assert first == 0
    # All of the earlier turns, but for the page in which they end.
    assert second >= len(prompt_of(*turns[:1]).ids) - 32
    assert third >= len(prompt_of(*turns[:3]).ids) - 32
