"""A directory with a model of a family that only `transformers` knows."""

from __future__ import annotations

import itertools
import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from common.errors import ConfigurationError
from services.worker.engine.checkpoints.weight_digest import WeightDigest
from services.worker.engine.transformers_models.library import import_transformers
from services.worker.engine.transformers_models.support import read_transformers_config, text_config

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from services.worker.engine.model.config import ModelConfig

# What checkpoints call their text model where there are others beside it, and what it is called alone.
_TEXT_NAMES = {
    r"^language_model\.model\.": "model.",
    r"^model\.language_model\.": "model.",
    r"^model\.text_model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}

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
        except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
            raise ConfigurationError(f"transformers cannot load {self.directory}: {error}") from error
        self.digest.note("library", str(library.__version__))
        for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
            # Threads hash it: a detached tensor keeps its memory when the model is moved to a device.
            self.digest.add(name, tensor.detach())
        return model

    def _make(self, library: Any, dtype: torch.dtype, attention: str) -> Any:  # see load
        # Weights that the files lack, such as a vocabulary's of a classifier, are the same at every start.
        torch.manual_seed(0)
        whole = library.AutoConfig.from_pretrained(self.directory, local_files_only=True)
        described = text_config(library, whole)
        if self.is_dummy:
            factory = library.AutoModelForCausalLM.from_config
            return factory(described, dtype=dtype, attn_implementation=attention)
        factory = library.AutoModelForCausalLM.from_pretrained
        options = {"dtype": dtype, "attn_implementation": attention, "local_files_only": True}
        if described is whole:
            return factory(self.directory, **options)
        model, loaded = factory(
            self.directory, config=described, key_mapping=_TEXT_NAMES, output_loading_info=True, **options
        )
        if loaded["missing_keys"]:
            missing = ", ".join(sorted(loaded["missing_keys"])[:3])
            raise ConfigurationError(f"{self.directory}: the text model's weights are not found: {missing}, ...")
        return model


def open_transformers_checkpoint(
    directory: Path, raw: Mapping[str, Any], generation: Mapping[str, Any], *, is_dummy: bool
) -> TransformersCheckpoint:
    """Read the config.json `raw` of `directory` with `transformers`; dummy weights are random.

    Raises:
        ConfigurationError: the library is missing, does not know the family, or it is no decoder.
    """
    config = read_transformers_config(directory, raw, generation)
    family = config.family
    log.warning(
        "No implementation of %r here: it runs through transformers with Pando's attention, slower than the families "
        "that have one", family,
    )  # fmt: skip
    digest = WeightDigest()
    # `ModelConfig` has little of what the library computes by.
    digest.note("config.json", json.dumps(raw, sort_keys=True))
    return TransformersCheckpoint(directory, config, is_dummy, digest)
