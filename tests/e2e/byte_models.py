"""Tiny models with random weights and a tokenizer of bytes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from common.tokenization.vocabulary import byte_alphabet
from tests.services.worker.engine.families import FAMILIES, save_model

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

VOCABULARY, END = 260, 256
LAYERS = 4
# Logits that are as close as this count as equal: sums in another order may exchange their tokens.
TIE = 1e-3
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def save_byte_model(directory: Path, family: str, **changes: Any) -> Path:
    """Write a model of four layers of one of `FAMILIES`, its config changed by `changes`, and its tokenizer."""
    name, options = FAMILIES[family]
    own = {"vocab_size": VOCABULARY, "eos_token_id": END, "num_hidden_layers": LAYERS}
    save_model(directory, name, {**options, **own, **changes})
    letters = {letter: byte for byte, letter in byte_alphabet().items()}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<end>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def continued(directory: Path, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """Return the tokens with which `transformers` continues each prompt, greedily and beyond the end."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory).eval()
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = list(prompt)
            for _ in range(tokens):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            answers.append(ids[len(prompt) :])
    return answers


def departures(directory: Path, answers: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[int]:
    """Return the places of the answers, each after its prompt, with a token that `transformers` would not have chosen.

    It reads prompt and answer in one pass, so that also long answers are checked soon.
    """
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory).eval()
    departing = []
    with torch.inference_mode():
        for place, (prompt, answer) in enumerate(answers):
            # [tokens of the answer, vocabulary]
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
            given = logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
            if (logits.amax(dim=1) - given > TIE).any():
                departing.append(place)
    return departing
