"""Llama and Mistral, and families that publish themselves as Llama (SmolLM, Yi)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from services.worker.engine.model.family import Family, GgufFamily
from services.worker.engine.model.gguf_fields import read_gguf_decoder
from services.worker.engine.model.json_fields import SLIDING, read_decoder, read_windows, refuse

if TYPE_CHECKING:
    from services.worker.engine.model.config import ModelConfig
    from services.worker.engine.model.family import JsonConfig


def _read_llama(config: JsonConfig) -> ModelConfig:
    refuse(config, "attn_logit_softcapping")
    return replace(read_decoder(config), windows=read_windows(config, (SLIDING,) * config["num_hidden_layers"]))


def _read_mistral(config: JsonConfig) -> ModelConfig:
    refuse(config, "attn_logit_softcapping")
    windows = read_windows(config, (SLIDING,) * config["num_hidden_layers"], is_used=True)
    return replace(read_decoder(config), windows=windows)


FAMILIES = (
    # GGUF files call Mistral `llama`, too.
    Family("llama", _read_llama, gguf=GgufFamily("llama", read_gguf_decoder, interleaves_rotary=True)),
    Family("mistral", _read_mistral),
)
