"""The memory that the largest pass of a loaded model takes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from services.worker.engine.measuring.measurements import measure_peak, pages_of, prompts_of, random_prompts

if TYPE_CHECKING:
    from common.steps import EngineSpec
    from services.worker.engine.decoder_memory import DecoderMemory
    from services.worker.engine.model.config import ModelConfig
    from services.worker.engine.model.decoder import Decoder


def measured_pass(model: Decoder, spec: EngineSpec, config: ModelConfig, memory: DecoderMemory, context: int) -> int:
    """Return the peak of bytes in a pass of the configured size; its prompts are no longer than `context` tokens.

    Raises:
        ConfigurationError: memory does not suffice for it.
    """
    lengths = prompts_of(spec.max_step_tokens, context)
    pool = replace(memory.pool(pages_of(lengths, spec.page_size), model.kv_layout), states=memory.states())
    device, samples = pool.layers[0].keys.device, min(spec.max_rows, spec.max_step_tokens)
    batch = random_prompts(lengths, spec.page_size, config.vocabulary_size, device, samples)
    return measure_peak(lambda: model.forward(batch, pool), device)
