"""Requests of other kinds than OpenAI's streams: adapters, images, grammars, whole answers, batches, and more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import transformers
from peft import LoraConfig, get_peft_model

from tests.chaos.load import SCHEMA, Case, Shape
from tests.e2e.byte_models import save_byte_model
from tests.e2e.seeing_model import content_of, save_seeing_model
from tests.services.tokenizer.images.pictures import picture
from tests.services.worker.engine.adapters.peft_adapters import ATTENTION

if TYPE_CHECKING:
    from pathlib import Path

MODEL, ADAPTER = "tiny", "style"
TOKENS = 160
CONTEXT = 4096
LINES = 3


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A model with random weights; one that reads images has an adapter, too."""

    model: Path
    adapter: Path | None = None
    name: str = MODEL

    @classmethod
    def save_of_text(cls, directory: Path) -> TinyModel:
        """Write a model that reads texts only to `directory`."""
        return cls(save_byte_model(directory / "model", "qwen3", max_position_embeddings=CONTEXT))

    @classmethod
    def save(cls, directory: Path) -> TinyModel:
        """Write a model that reads images, and its adapter, to `directory`."""
        model, adapter = save_seeing_model(directory / "model"), directory / ADAPTER
        base = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
        torch.manual_seed(1)
        adapted = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=list(ATTENTION)))
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn_like(parameter) * 0.15)
        adapted.save_pretrained(str(adapter), save_embedding_layers=False)
        return cls(model, adapter)


def mixed_cases() -> list[Case]:
    """Return requests of all kinds to the tiny model, greedy ones and one with a seed."""
    chat, completions = "/v1/chat/completions", "/v1/completions"
    asked = [{"role": "user", "content": "Tell me a story."}]
    seen = [{"role": "user", "content": content_of("What is this?", picture(40, 56, seed=1))}]
    sampled = {"ignore_eos": True, "max_tokens": TOKENS, "temperature": 0}
    streamed = {**sampled, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    grammar = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    whole = {"model": MODEL, **sampled}
    response = {"model": MODEL, "input": "A song", "max_output_tokens": TOKENS, "temperature": 0, "stream": True}
    lines = [{**whole, "prompt": f"Line {number}", "max_tokens": 20 + 20 * number} for number in range(LINES)]
    return [
        Case("adapter", chat, {"model": f"{MODEL}:{ADAPTER}", **streamed, "messages": asked, "logprobs": True}),
        Case("image", chat, {"model": MODEL, **streamed, "messages": seen}),
        Case("grammar", chat, {"model": MODEL, **streamed, "messages": asked, "response_format": grammar,
                               "ignore_eos": False}),
        Case("whole image", chat, {**whole, "messages": seen, "model": f"{MODEL}:{ADAPTER}"}, True),
        Case("three choices", chat, {**whole, "messages": asked, "n": 3, "temperature": 0.8, "seed": 5}, True),
        Case("embeddings", "/v1/embeddings", {"model": MODEL, "input": ["The sea", "A lighthouse"]}),
        Case("messages", "/v1/messages", {"model": MODEL, "messages": asked, "max_tokens": TOKENS, "stream": True,
                                          "temperature": 0}, shape=Shape.MESSAGES),
        Case("whole message", "/v1/messages", {"model": MODEL, "messages": asked, "max_tokens": TOKENS,
                                               "temperature": 0}, True, shape=Shape.MESSAGES),
        Case("response", "/v1/responses", {**response, "store": False}),
        Case("background", "/v1/responses", {**response, "background": True}),
        Case("native", "/generate", {"text": "The wind", "session_id": "talk", "sampling_params": {
            "max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}}, True),
        Case("batch", completions, {"lines": lines}, shape=Shape.BATCH),
    ]  # fmt: skip
