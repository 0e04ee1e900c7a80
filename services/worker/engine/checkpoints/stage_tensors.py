"""The tensors that a stage of a pipeline reads, so that its rank fetches no other files of a model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.heads import read_head
from common.models import ModelKind, resolve_model
from services.worker.engine.checkpoints.safetensors_directory import read_config, read_json, text_prefixes
from services.worker.engine.model.config_json import Implementation, implementation_of
from services.worker.engine.parallel.stages import layers_of_stages

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import Any

    from common.models.selection import TensorChoice
    from common.steps import EngineSpec
    from services.worker.engine.parallel.shards import Span

_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class StageTensors:
    """Chooses, of the names in an index of safetensors files, those that a stage reads."""

    layers: Span
    is_first: bool
    is_last: bool
    tied_embeddings: bool
    has_classifier: bool
    """Whether every rank reads a classification head, from the head's rows or from tensors beside the text model."""

    def __call__(self, names: Collection[str]) -> set[str]:
        """Return those of `names` that are needed."""
        model, head = text_prefixes(names.__contains__)
        return {name for name in names if self._needs(name, model, head)}

    def _needs(self, name: str, model: str, head: str) -> bool:
        if name.startswith(head):
            return self.is_last or self.has_classifier
        if not name.startswith(model):
            # Encoders of images, which models in stages do without.
            return self.has_classifier
        own = name.removeprefix(model)
        if layer := _LAYER.match(own):
            return self.layers.start <= int(layer[1]) < self.layers.stop
        if own.startswith("embed_tokens."):
            return self.is_first or self.has_classifier or (self.is_last and self.tied_embeddings)
        return self.is_last if own.startswith("norm.") else True


def tensors_of_stage(spec: EngineSpec, rope: Mapping[str, Any]) -> TensorChoice | None:
    """Return the choice of the tensors of the stage of `spec`; None: it needs all files. Fetches no weights.

    `rope`: see `read_config`.

    Raises:
        ConfigurationError: there is no such model, or it cannot be cut into so many stages.
    """
    if spec.stages == 1 or spec.load_format == "dummy":
        return None
    files = resolve_model(spec.model, weights=False)
    if files.kind is not ModelKind.DIRECTORY:
        return None
    described = read_json(files.path / "config.json")
    if implementation_of(described) is not Implementation.OWN:
        return None
    config = read_config(files.path, rope)
    return StageTensors(
        layers_of_stages(config, spec.stages)[spec.stage],
        is_first=spec.stage == 0,
        is_last=spec.is_last_stage,
        tied_embeddings=config.tied_embeddings,
        has_classifier=read_head(described, spec.classifier_from_token) is not None,
    )
