"""Whether `transformers` can run a model, by its config.json alone.

As a program, `python -m services.worker.engine.transformers_models.support DIRECTORY`, it writes the answer as JSON for
programs that may not import the library.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ConfigurationError
from services.worker.engine.model.config import ModelConfig, no_rotation
from services.worker.engine.transformers_models.library import import_transformers

if TYPE_CHECKING:
    from collections.abc import Mapping

# Checkpoints whose decoder sees what comes after a token in prompts, too.
_NOT_CAUSAL = frozenset({"paligemma", "colpali"})
_KINDS = frozenset({"full_attention", "sliding_attention", "attention"})
# Fields of the answer that the program writes.
SHAPE_FIELDS = (
    "family", "vocabulary_size", "hidden_size", "layers", "query_heads", "kv_heads", "head_dim", "max_context",
    "tied_embeddings",
)  # fmt: skip


def read_transformers_config(directory: Path, raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """Return the engine's description of the config.json `raw` of `directory`.

    Raises:
        ConfigurationError: the library is missing, does not know the family, or it is no decoder.
    """
    family = str(raw.get("model_type"))
    library = import_transformers(family)
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method")
        raise ConfigurationError(f"quantization_config: weights quantised by {method!r} are not supported")
    try:
        whole = library.AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(
            f"model family {family!r} is neither one of Pando's own nor known to transformers "
            f"{library.__version__}: {error}"
        ) from error
    if whole.is_encoder_decoder or family in _NOT_CAUSAL:
        raise ConfigurationError(f"model family {family!r} is no decoder that generates text from left to right")
    described = text_config(library, whole)
    if type(described) not in library.AutoModelForCausalLM._model_mapping:
        raise ConfigurationError(f"model family {family!r} is no decoder that generates text")
    kinds = set(getattr(described, "layer_types", None) or ()) - _KINDS
    if kinds:
        raise ConfigurationError(
            f"model family {family!r} cannot be served through transformers: {', '.join(sorted(kinds))} of layer_types"
        )
    try:
        return _config(family, described, raw, generation)
    except AttributeError as error:
        raise ConfigurationError(f"model family {family!r} has no attention as decoders have: {error}") from error


def text_config(library: Any, whole: Any) -> Any:  # a PretrainedConfig
    """Return the config of the decoder: of a checkpoint with other models beside it that of the text model."""
    described = whole.get_text_config(decoder=True)
    return described if type(described) in library.AutoModelForCausalLM._model_mapping else whole


def _config(family: str, described: Any, raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    # `described` is a PretrainedConfig, which translates families' own names of these.
    query_heads, hidden_size = _largest(described, "num_attention_heads"), described.hidden_size
    assert query_heads is not None, "decoders have heads"
    eos = generation.get("eos_token_id", described.eos_token_id)
    context = getattr(described, "max_position_embeddings", None)
    if context is None:
        raise ConfigurationError("config.json has no 'max_position_embeddings', nor another name of it")
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    head_dim = _largest(described, "head_dim") or hidden_size // query_heads
    return ModelConfig(
        family=family,
        vocabulary_size=described.vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_largest(described, "intermediate_size") or 4 * hidden_size,
        layers=described.num_hidden_layers,
        query_heads=query_heads,
        kv_heads=_largest(described, "num_key_value_heads") or query_heads,
        head_dim=head_dim,
        max_context=min(context, _context_of_one_rotation(described) or context),
        norm_epsilon=0.0,
        rotary=no_rotation(head_dim),
        tied_embeddings=bool(described.tie_word_embeddings),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        dtype=dtype,
    )


def _largest(described: Any, name: str) -> int | None:  # see _config
    """Return a number of the config, the largest one where layers differ in it; None: the config has none."""
    try:
        found = getattr(described, name, None)
    except RuntimeError:  # the library's, of fields that each layer has one of
        found = [getattr(layer, name) for layer in described.per_layer_config]
    return max(found) if isinstance(found, list) else found


def _context_of_one_rotation(described: Any) -> int | None:  # see _config
    """Return the context length up to which rotations do not depend on the rest of the batch.

    LongRoPE has other frequencies beyond the original context, and `transformers` chooses for a whole batch.
    """
    parameters = getattr(described, "rope_parameters", None) or {}
    original = parameters.get("original_max_position_embeddings")
    return int(original) if parameters.get("rope_type") == "longrope" and original else None


def main(directory: str) -> None:
    """Write the model's configuration, or {"error": …}."""
    path = Path(directory)
    try:
        raw = json.loads((path / "config.json").read_text(encoding="utf-8"))
        config = read_transformers_config(path, raw, {})
        answer: dict[str, object] = {name: getattr(config, name) for name in SHAPE_FIELDS}
    except ConfigurationError as error:
        answer = {"error": str(error)}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
