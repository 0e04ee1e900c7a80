"""A loaded encoder, and the passes of its rows."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from common.errors import ConfigurationError
from common.heads import read_head
from common.steps import EngineCapacity, SleepLevel
from services.worker.engine.backends import DTYPES, RunnerOptions, count_threads, select_device
from services.worker.engine.checkpoints.safetensors_directory import SafetensorsTensors, read_json
from services.worker.engine.encoder.config import ModernConfig, encoder_config
from services.worker.engine.encoder.heads import read_encoder_head
from services.worker.engine.encoder.model import Encoder, import_flash_attention
from services.worker.engine.encoder.modern import ModernEncoder, read_modern_weights
from services.worker.engine.encoder.weights import read_weights
from services.worker.engine.execution.out_of_memory import compute_in_parts, row_halves
from services.worker.engine.execution.pass_output import PassOutput, join
from services.worker.engine.execution.pooler import Pooler
from services.worker.engine.host_memory import keep_freed_memory
from services.worker.engine.kernels.torch.kernels import TorchKernels
from services.worker.engine.plans.passes import gather
from services.worker.engine.sleeping import HostBuffers, ParkedTensors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from common.steps import EngineSpec, RowOpen
    from services.worker.engine.encoder.config import EncoderConfig
    from services.worker.engine.execution.interface import Checkpoint
    from services.worker.engine.execution.pooler import PoolerHead
    from services.worker.engine.kernels.interface import Kernels
    from services.worker.engine.plans.passes import ForwardPass
    from services.worker.engine.plans.rows import RowStates

log = logging.getLogger(__name__)


class EncoderRunner:
    """An encoder's weights. It has neither KV nor pages, so nothing moves between tiers."""

    host_pool = None
    transfers = None

    def __init__(
        self,
        encoder: Encoder | ModernEncoder,
        capacity: EngineCapacity,
        device: torch.device,
        head: PoolerHead | None = None,
        *,
        takes_turns: bool = False,
        read_again: Callable[[Callable[[float, str], None]], EncoderRunner],
    ) -> None:
        """Take over the loaded model; `read_again` reads weights that were dropped.

        `takes_turns`: as in `RunnerOptions`.
        """
        self.capacity = capacity
        self.head = head
        self.device = device
        self._read_again = read_again
        self._host_buffers = HostBuffers(keeps=takes_turns)
        # None: dropped while this rank sleeps.
        self._encoder: Encoder | ModernEncoder | None = encoder
        self._parked: ParkedTensors | None = None

    @classmethod
    def load(
        cls, directory: Path, spec: EngineSpec, report: Callable[[float, str], None], options: RunnerOptions
    ) -> EncoderRunner:
        """Load the encoder in `directory`; `report` is called with the progress in [0, 1] and its stage.

        Raises:
            ConfigurationError: it cannot be run as asked.
        """
        report(0.0, "reading the model's configuration")
        if spec.world_size > 1:
            raise ConfigurationError(f"an encoder runs on one rank, not on {spec.world_size}")
        if spec.load_format not in ("auto", "safetensors"):
            raise ConfigurationError(f"load_format={spec.load_format} has no encoders; they are read from safetensors")
        if spec.quantization != "auto":
            raise ConfigurationError(f"quantization={spec.quantization}: encoders compute with weights as they are")
        if spec.rope_parameters:
            raise ConfigurationError("model.rope_parameters is for models that generate, and this is an encoder")
        if spec.classifier_from_token:
            raise ConfigurationError("classifier_from_token is for models that generate, and this is an encoder")
        described = read_json(directory / "config.json")
        config, head = encoder_config(described), read_head(described)
        device = select_device(options)
        if device.type == "cpu":
            torch.set_num_threads(count_threads(options, spec))
            keep_freed_memory()
        import_flash_attention(device)
        tensors = SafetensorsTensors(directory)
        kernels = TorchKernels(select_encoder_dtype(spec.dtype, config, device), device)
        with torch.inference_mode():
            encoder = _read_encoder(tensors, config, kernels, device, lambda share: report(share, "loading weights"))
            pooler_head = None if head is None else read_encoder_head(tensors, config, head, device)
        capacity = _capacity(spec, config, f"{tensors.identity()} {kernels.activation_dtype}", device)
        capacity = replace(capacity, head=head.pooling if head else None)
        log.info(
            "model.loaded model=%s device=%s kind=encoder dtype=%s context=%d threads=%d",
            spec.model, device, kernels.activation_dtype, capacity.max_context, torch.get_num_threads(),
        )  # fmt: skip
        report(1.0, "ready")
        read_again = partial(cls.load, directory, spec, options=options)
        return cls(encoder, capacity, device, pooler_head, takes_turns=options.takes_turns, read_again=read_again)

    @property
    def encoder(self) -> Encoder | ModernEncoder:
        """The model, of a rank that is awake."""
        assert self._encoder is not None, "a rank that sleeps runs no passes"
        return self._encoder

    @torch.inference_mode()
    def sleep(self, level: SleepLevel, *, keeps_host_pages: bool) -> None:
        """Give back the weights; see `ModelRunner.sleep`."""
        if level is SleepLevel.DROPPED:
            self._encoder = self.head = self._parked = None
            self._host_buffers.clear()
        elif self._parked is None and self._encoder is not None:
            self._parked = ParkedTensors((self._encoder, self.head), self._host_buffers)

    @torch.inference_mode()
    def wake_weights(self, report: Callable[[float, str], None]) -> None:
        """Undo `sleep`.

        Raises:
            ConfigurationError: the weights were dropped, and their files have changed since.
        """
        if self._parked is not None:
            self._parked.restore()
            self._parked = None
        elif self._encoder is None:
            read = self._read_again(report)
            if read.capacity != self.capacity:
                raise ConfigurationError("the files of the weights have changed while the model slept")
            self._encoder, self.head = read.encoder, read.head

    def wake_cache(self) -> None:
        """Do nothing: an encoder keeps no KV."""

    def close(self) -> None:
        self._encoder = self._parked = None


class EncoderExecutor:
    """Computes passes with an encoder; see `PassExecutor`."""

    def __init__(self, runner: EncoderRunner) -> None:
        self._runner = runner
        self._pooler = Pooler(runner.head)

    def open(self, opened: RowOpen) -> None:
        self._pooler.open(opened)

    def step(self, rows: RowStates, forward: ForwardPass, checkpoint: Checkpoint | None = None) -> PassOutput:
        """Compute the pass's rows, fewer at a time if memory does not suffice; it is not abandoned."""
        del checkpoint
        made = compute_in_parts(forward, lambda part: self._step(rows, part), is_shared=False, cut=row_halves)
        return join(forward, [sampled for _, sampled in made.parts], made.failed)

    def _step(self, rows: RowStates, forward: ForwardPass) -> PassOutput:
        batch, device = gather(rows, forward), self._runner.device
        lengths = np.diff(batch.query_starts).astype(np.int64)
        # Without decoding rows, the pass's texts are its chunks.
        is_second = batch.positions >= np.repeat(rows.second_text_starts[forward.chunks.rows], lengths)
        hidden = self._runner.encoder.forward(
            torch.from_numpy(batch.token_ids).to(device),
            torch.from_numpy(batch.positions).to(device),
            lengths,
            torch.from_numpy(is_second).to(device) if is_second.any() else None,
        )
        self._pooler.add(batch.pooled_slots, hidden[torch.from_numpy(batch.pooled_indices).to(device)])
        return PassOutput(embeddings=self._pooler.finish(forward.pooled_rows))


def _read_encoder(
    tensors: SafetensorsTensors,
    config: EncoderConfig | ModernConfig,
    kernels: Kernels,
    device: torch.device,
    report: Callable[[float], None],
) -> Encoder | ModernEncoder:
    if isinstance(config, ModernConfig):
        return ModernEncoder(read_modern_weights(tensors, config, kernels, device, report), config)
    return Encoder(read_weights(tensors, config, kernels, device, report), config)


def select_encoder_dtype(name: str, config: EncoderConfig | ModernConfig, device: torch.device) -> torch.dtype:
    """Return the type to compute in: unless asked otherwise the checkpoint's own on GPUs, and float32 on CPUs.

    There rounding to bfloat16 would double the speed, but embeddings are kept and compared with each other for years:
    they must not depend on the processor that computed them.
    """
    if name == "auto":
        name = config.dtype if device.type != "cpu" else "float32"
    if name not in DTYPES:
        raise ConfigurationError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _capacity(
    spec: EngineSpec, config: EncoderConfig | ModernConfig, identity: str, device: torch.device
) -> EngineCapacity:
    fingerprint = hashlib.sha256(f"{identity}\n{asdict(config)}".encode()).hexdigest()
    return EngineCapacity(
        device_pages=0,
        page_size=spec.page_size,
        # A text is computed in one pass.
        max_context=min(config.max_context, spec.max_context or config.max_context, spec.max_step_tokens),
        vocabulary_size=config.vocabulary_size,
        eos_token_ids=(),
        kv_bytes_per_token=0,
        fingerprint=fingerprint,
        device=str(device),
        layers=config.layers,
        is_encoder=True,
        only_pools=True,
    )
