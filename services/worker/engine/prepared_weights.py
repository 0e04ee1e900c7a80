"""Weights that are read beside those that serve, whose place they are to take."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from common.errors import ConfigurationError
from common.host import available_memory
from services.worker.engine.backends import ranks_on_host
from services.worker.engine.checkpoints.replacing import states_of, weights_of
from services.worker.engine.loader import DecoderLoader

if TYPE_CHECKING:
    from common.steps import EngineSpec
    from services.worker.engine.backends import RunnerOptions
    from services.worker.engine.execution.interface import ProgressReport
    from services.worker.engine.model_runner import ModelRunner

log = logging.getLogger(__name__)

# Free memory that weights read beside others must leave, as a multiple of theirs: reading takes buffers.
_SPARE = 1.2


class PreparedDecoder:
    """Weights that were read while another model of the same shape serves, whose place they are to take."""

    def __init__(self, loader: DecoderLoader) -> None:
        """Take over a loader that has read its weights."""
        self._loader = loader

    def load(self, spec: EngineSpec, report: ProgressReport) -> ModelRunner:
        """Do what is left of `load_decoder`; `spec` may name other numbers of pages than when they were read."""
        return self._loader.load_prepared(spec, report)


def prepare_decoder(spec: EngineSpec, options: RunnerOptions, serving: ModelRunner) -> PreparedDecoder | None:
    """Read the weights of `spec` beside those of `serving`, of which they have the shape, in any thread.

    Returns None if memory does not suffice for both, or if the model runs through `transformers`.

    Raises:
        ConfigurationError: they cannot be read, or their files have changed meanwhile.
    """
    needed, free = serving.weight_bytes, _free_for_weights(spec, serving.device)
    if needed * _SPARE > free:
        log.info("weights.in_place needed_mib=%d free_mib=%d", needed >> 20, free >> 20)
        return None
    loader = DecoderLoader.beside(serving, spec, options, lambda _fraction, _stage: None)
    if not loader.can_prepare:
        return None
    files = None if spec.load_format == "dummy" else weights_of(spec)
    before = files and states_of(files)
    loader.prepare()
    if files is not None and states_of(files) != before:
        message = "its files have changed while they were read; retry when they are whole"
        raise ConfigurationError(f"{spec.model}: {message}")
    return PreparedDecoder(loader)


def _free_for_weights(spec: EngineSpec, device: torch.device) -> int:
    if device.type == "cpu":
        return available_memory() // ranks_on_host(spec)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused
