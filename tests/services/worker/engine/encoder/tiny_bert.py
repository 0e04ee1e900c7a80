"""Tiny encoders with random weights, as `transformers` writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 131
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
    "type_vocab_size": 2,
    # Large weights, so that attention is sharp.
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {}),
    "bert tanh": ("Bert", {"hidden_act": "gelu_new"}),
    "bert relu": ("Bert", {"hidden_act": "relu", "layer_norm_eps": 1e-5}),
    "roberta": ("Roberta", {"pad_token_id": 1, "type_vocab_size": 1}),
    "modernbert": (
        "ModernBert",
        {
            "local_attention": 16,
            "num_hidden_layers": 4,
            "eos_token_id": 1,
            "bos_token_id": 1,
            "cls_token_id": 1,
            "sep_token_id": 1,
            "initializer_range": 0.1,
        },
    ),
    "xlm-roberta": ("XLMRoberta", {"pad_token_id": 1, "type_vocab_size": 1, "hidden_act": "silu"}),
}


def save_encoder(directory: Path, name: str = "bert", *, head: str = "Model", seed: int = 0, **changes: Any) -> Path:
    """Write a tiny encoder to `directory`, which is returned; with a head, its tensors have its family's prefix."""
    import transformers

    family, options = ENCODERS[name]
    config = getattr(transformers, f"{family}Config")(**{**_SHAPE, **options, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}{head}")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases and norm weights, which start out as zeros and ones
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    return directory


def reference_states(directory: Path, token_ids: list[int]) -> torch.Tensor:
    """Return what `transformers` computes in fp32 for every token, [tokens, hidden]."""
    import transformers

    model = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    ids = torch.tensor([token_ids])
    with torch.inference_mode():
        states: torch.Tensor = model(ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
    return states
