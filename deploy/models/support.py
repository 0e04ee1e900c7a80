"""Whether and how the worker serves a model, decided by the worker's own code from the model's configuration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from common.child_process import import_variables
from common.errors import ConfigurationError
from common.heads import read_head
from services.worker.engine.encoder.config import encoder_config
from services.worker.engine.model.config import ModelConfig, no_rotation
from services.worker.engine.model.config_gguf import check_architecture
from services.worker.engine.model.config_json import Implementation, config_from_json, implementation_of

if TYPE_CHECKING:
    from collections.abc import Mapping

# A program, because no code of the command may import torch or transformers.
_SUPPORT_MODULE: Final = "services.worker.engine.transformers_models.support"
_TIMEOUT_S: Final = 120.0


class Service(Enum):
    """Ways to serve a model."""

    OWN = "own implementation"
    ENCODER = "own implementation of encoders"
    TRANSFORMERS = "through transformers"
    REFUSED = "not served"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Support:
    """The service of a model, a reason where it needs one, and the shape if the worker's code can read it."""

    service: Service
    reason: str = ""
    config: ModelConfig | None = None


def support_of(config: Mapping[str, Any], generation: Mapping[str, Any]) -> Support:
    """Find the implementation that serves the model of a config.json; takes seconds for families without an own one."""
    try:
        match implementation_of(config):
            case Implementation.ENCODER:
                encoder_config(config)
                read_head(config)
                return Support(Service.ENCODER)
            case Implementation.OWN:
                return Support(Service.OWN, config=config_from_json(config, generation))
            case Implementation.TRANSFORMERS:
                return _through_transformers(config)
    except ConfigurationError as error:
        return Support(Service.REFUSED, str(error))


def support_of_gguf(architecture: str) -> Support:
    """Find the implementation that serves a GGUF file of an architecture."""
    try:
        check_architecture(architecture)
    except ConfigurationError as error:
        return Support(Service.REFUSED, str(error))
    return Support(Service.OWN)


def _through_transformers(config: Mapping[str, Any]) -> Support:
    with tempfile.TemporaryDirectory(prefix="pando-inspect-") as directory:
        (Path(directory) / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
        try:
            ended = subprocess.run(
                [sys.executable, "-m", _SUPPORT_MODULE, directory],
                capture_output=True, text=True, timeout=_TIMEOUT_S, check=True,
                env={**os.environ, **import_variables(os.environ)},
            )  # fmt: skip
            answer: dict[str, Any] = json.loads(ended.stdout)
        except (OSError, subprocess.SubprocessError, ValueError):
            return Support(
                Service.UNKNOWN,
                "no own implementation here; the worker, which knows whether transformers runs it, is missing",
            )
    if "error" in answer:
        return Support(Service.REFUSED, str(answer["error"]))
    reason = "slower, and over several ranks only as transformers plans it, if it passes the check at start-up"
    return Support(Service.TRANSFORMERS, reason, transformers_shape(answer))


def transformers_shape(answer: Mapping[str, Any]) -> ModelConfig:
    """Return the shape that the worker's program has written."""
    return ModelConfig(
        **answer, intermediate_size=0, norm_epsilon=0.0, rotary=no_rotation(answer["head_dim"]), dtype="bfloat16"
    )
