"""A directory with a model of a family that only `transformers` knows."""

from __future__ import annotations

import itertools
import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from common.errors import ConfigurationError
from services.worker.engine.checkpoints.weight_digest import WeightDigest
from services.worker.engine.model.config import ModelConfig
from services.worker.engine.model.rotary import no_rotation
from services.worker.engine.transformers_models.library import import_transformers

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TransformersCheckpoint:
    """The location of a model and its config.json."""

    directory: Path
    config: ModelConfig
    is_dummy: bool
    digest: WeightDigest

    def identity(self) -> str:
        """Return a digest of the model that has been loaded, its config.json and the library that computes it."""
        return self.digest.hexdigest()

    def load(self, dtype: torch.dtype, attention: str) -> Any:  # a PreTrainedModel
        """Return the model on the CPU, with the attention function that is registered as `attention`.

        Raises:
            ConfigurationError: `transformers` cannot load it.
        """
        library = import_transformers(self.config.family)
        try:
            # Parameters made in inference mode could not be initialised as the library does it.
            with torch.inference_mode(False), torch.no_grad():
                model = self._make(library, dtype, attention).eval()
        except KeyError as error:
            raise ConfigurationError(
                f"model family {self.config.family!r} cannot be served through transformers: its attention cannot be "
                f"replaced (no {error})"
            ) from error
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            raise ConfigurationError(f"transformers cannot load {self.directory}: {error}") from error
        self.digest.note("library", str(library.__version__))
        for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
            self.digest.add(name, tensor)
        return model

    def _make(self, library: Any, dtype: torch.dtype, attention: str) -> Any:  # see load
        if self.is_dummy:
            torch.manual_seed(0)
            described = library.AutoConfig.from_pretrained(self.directory, local_files_only=True)
            factory = library.AutoModelForCausalLM.from_config
            return factory(described, dtype=dtype, attn_implementation=attention)
        factory = library.AutoModelForCausalLM.from_pretrained
        return factory(self.directory, dtype=dtype, attn_implementation=attention, local_files_only=True)


def open_transformers_checkpoint(
    directory: Path, raw: Mapping[str, Any], generation: Mapping[str, Any], *, is_dummy: bool
) -> TransformersCheckpoint:
    """Read the config.json `raw` of `directory` with `transformers`; dummy weights are random.

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
    if whole.is_encoder_decoder or type(whole) not in library.AutoModelForCausalLM._model_mapping:
        raise ConfigurationError(f"model family {family!r} is no decoder that generates text")
    described = whole.get_text_config()
    log.warning(
        "No implementation of %r here: it runs through transformers with Pando's attention, slower than the families "
        "that have one", family,
    )  # fmt: skip
    digest = WeightDigest()
    # `ModelConfig` has little of what the library computes by.
    digest.note("config.json", json.dumps(raw, sort_keys=True))
    return TransformersCheckpoint(directory, _config(family, described, raw, generation), is_dummy, digest)


def _config(family: str, described: Any, raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    # `described` is a PretrainedConfig, which translates families' own names of these.
    query_heads, hidden_size = described.num_attention_heads, described.hidden_size
    eos = generation.get("eos_token_id", described.eos_token_id)
    context = getattr(described, "max_position_embeddings", None)
    if context is None:
        raise ConfigurationError("config.json has no 'max_position_embeddings', nor another name of it")
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    head_dim = getattr(described, "head_dim", None) or hidden_size // query_heads
    return ModelConfig(
        family=family,
        vocabulary_size=described.vocab_size,
        hidden_size=hidden_size,
        intermediate_size=getattr(described, "intermediate_size", None) or 4 * hidden_size,
        layers=described.num_hidden_layers,
        query_heads=query_heads,
        kv_heads=getattr(described, "num_key_value_heads", None) or query_heads,
        head_dim=head_dim,
        max_context=min(context, _context_of_one_rotation(described) or context),
        norm_epsilon=0.0,
        rotary=no_rotation(head_dim),
        tied_embeddings=bool(described.tie_word_embeddings),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        dtype=dtype,
    )


def _context_of_one_rotation(described: Any) -> int | None:  # see _config
    """Return the context length up to which rotations do not depend on the rest of the batch.

    LongRoPE has other frequencies beyond the original context, and `transformers` chooses for a whole batch.
    """
    parameters = getattr(described, "rope_parameters", None) or {}
    original = parameters.get("original_max_position_embeddings")
    return int(original) if parameters.get("rope_type") == "longrope" and original else None
