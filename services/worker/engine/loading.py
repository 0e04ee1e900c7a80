"""From what a rank is configured with to the runner of its model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.encoders import is_encoder_directory
from common.models import ModelKind, resolve
from services.worker.engine.encoder.runner import EncoderRunner
from services.worker.engine.model_runner import ModelRunner

if TYPE_CHECKING:
    from common.steps import EngineSpec
    from services.worker.engine.backends import RunnerOptions
    from services.worker.engine.engine import ProgressReport


def load_runner(spec: EngineSpec, report: ProgressReport, options: RunnerOptions) -> ModelRunner | EncoderRunner:
    """Load the model that `spec` names, a decoder or an encoder.

    Raises:
        ConfigurationError: it cannot be found or run as asked.
    """
    files = resolve(spec.model)
    if files.kind is ModelKind.DIRECTORY and is_encoder_directory(files.path):
        return EncoderRunner.load(files.path, spec, report, options)
    return ModelRunner.load(spec, report, options)
