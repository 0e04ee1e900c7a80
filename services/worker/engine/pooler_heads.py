"""Classification heads of decoders, found in the files of their checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import ConfigurationError
from common.models import resolve_model
from common.tokenization import load_text_model
from services.worker.engine.checkpoints.safetensors_directory import SafetensorsTensors
from services.worker.engine.model.score_head import read_score_head
from services.worker.engine.transformers_models.checkpoint import TransformersCheckpoint

if TYPE_CHECKING:
    import torch

    from common.heads import Head
    from services.worker.engine.checkpoints.interface import Checkpoint
    from services.worker.engine.execution.pooler import PoolerHead
    from services.worker.engine.model.config import ModelConfig


def read_pooler_head(
    checkpoint: Checkpoint | TransformersCheckpoint,
    head: Head | None,
    config: ModelConfig,
    model: str,
    device: torch.device,
) -> PoolerHead | None:
    """Read the head that the files of `model` describe, if there is one.

    Raises:
        ConfigurationError: it cannot be read, or its tokens are not the model's.
    """
    if head is None:
        return None
    tensors: SafetensorsTensors | Checkpoint
    if not isinstance(checkpoint, TransformersCheckpoint):
        tensors = checkpoint
    elif checkpoint.is_dummy:
        raise ConfigurationError(
            "load_format=dummy has no classification heads of models that run through transformers"
        )
    else:
        tensors = SafetensorsTensors(checkpoint.directory)
    has_own = tensors.has("lm_head.weight") and not config.tied_embeddings
    return read_score_head(
        tensors,
        head,
        config.hidden_size,
        device,
        token_ids=_ids_of(head.tokens, model),
        vocabulary="lm_head.weight" if has_own else "model.embed_tokens.weight",
    )


def _ids_of(tokens: tuple[str, ...], model: str) -> tuple[int, ...]:
    if not tokens:
        return ()
    tokenizer = load_text_model(resolve_model(model, weights=False)).tokenizer
    found = {token: tokenizer.token_to_id(token) for token in tokens}
    unknown = [token for token, token_id in found.items() if token_id is None]
    if unknown:
        raise ConfigurationError(f"classifier_from_token: {unknown} are no tokens of the model's vocabulary")
    return tuple(token_id for token_id in found.values() if token_id is not None)
