"""Adapters with random factors, as PEFT writes them, and what PEFT computes with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
VOCABULARY_ENDS = ("embed_tokens", "lm_head")
EVERYTHING = (*ATTENTION, *FEED_FORWARD, *VOCABULARY_ENDS)


def save_adapter(model: Path, adapter: Path, modules: Sequence[str], *, seed: int = 1, **options: Any) -> Path:
    """Write an adapter of `modules` with factors that change every token; `options` go into PEFT's LoraConfig."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(**{"r": 8, "lora_alpha": 16, "target_modules": list(modules), **options})
    adapted = get_peft_model(_base(model), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
    adapted.save_pretrained(str(adapter), save_embedding_layers=False)
    return adapter


def peft_logits(model: Path, adapter: Path | None, token_ids: list[int]) -> torch.Tensor:
    """Return what PEFT computes in float32 for every token, [tokens, vocabulary]; without an adapter, the base."""
    from peft import PeftModel

    base = _base(model)
    adapted = base if adapter is None else PeftModel.from_pretrained(base, adapter).eval()
    with torch.inference_mode():
        logits: torch.Tensor = adapted(torch.tensor([token_ids])).logits[0]
    return logits


def _base(model: Path) -> Any:  # a PreTrainedModel
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
