"""The section of the configuration that every worker rank reads."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr

from common.section import Section


class WorkerSettings(Section):
    """One rank of the model."""

    address: str = "127.0.0.1:50053"
    """gRPC address to listen on: host:port or unix:path."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU if there is one."""
    device_index: int = Field(default=0, ge=0)
    """Which GPU of this host."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of the engine; 0: as many as this process has cores."""
    backend: Literal["auto", "torch", "compiled", "gpu"] = "auto"
    """Operators: compiled ones on CPUs where they can be built, Triton and FlashInfer on GPUs, or plain torch."""
    grammar_timeout_s: float = Field(default=30.0, gt=0)
    """A grammar (JSON schema, regular expression, …) that takes longer to compile is refused."""
    grammar_slice_s: float = Field(default=1.0, gt=0)
    """A compilation that takes longer makes room for other users' grammars: one such goes on beside them, and further
    ones start again when that has ended."""
    grammar_open_per_subject: int = Field(default=16, ge=1)
    """Grammars of one user (subject) that are being compiled or wait for it; further ones are refused with 429."""
    grammar_seconds_per_minute: float = Field(default=30.0, gt=0)
    """Compile time of one user's grammars; after more, new grammars are refused with 429 until the rest of it has
    been refilled, at this rate. Grammars that are compiled already are served nonetheless."""
    grammar_cache_megabytes: int = Field(default=512, ge=1)
    """MiB of compiled grammars that are kept, of all users. Each view has its own, so that the time to the
    first token does not show who else has used the same."""
    grammar_cache_megabytes_per_subject: int = Field(default=64, ge=1)
    """MiB of compiled grammars of one user; beyond, the oldest of these is dropped."""
    storage: SecretStr | None = None
    """Where KV pages outlive this process and are shared with others: a directory, or a Redis or Valkey server as
    redis://, rediss:// or unix:// URL; absent: nowhere. Pages are encrypted, with keys of scheduler.storage_keyring."""
    storage_gigabytes: float = Field(default=16.0, gt=0)
    """GiB that the files of a storage directory may take; a server has a limit of its own (maxmemory)."""
    storage_timeout_s: float = Field(default=2.0, gt=0)
    """A call to the storage that takes longer counts as failed."""
    storage_threads: int = Field(default=4, ge=1, le=64)
    """Calls to the storage at the same time; half of them may write."""
    keep_warm_ms: float = Field(default=0.0, ge=0)
    """An idle GPU gets a little work of no use after so long, again and again, so that its clocks stay up and the next
    request finds it fast; costs power. 0: never. On a CPU nothing is done."""
    profile_directory: Path | None = None
    """Where `pando profile` leaves traces of what this rank computes; absent: it records none. Anyone who reaches the
    worker may start a recording, which slows it down while it lasts."""
    profile_max_seconds: float = Field(default=60.0, gt=0, le=3600)
    """A recording ends by itself after so long,"""
    profile_max_passes: int = Field(default=1000, ge=1)
    """or after so many forward passes: each takes some hundred kilobytes of memory until it is written."""
    profile_max_megabytes: int = Field(default=1024, ge=1)
    """No recording begins while the traces in the directory take so much."""
    fake_vocabulary_size: int = Field(default=49_152, ge=16)
    """Vocabulary of a model loaded with load_format=fake."""
    fake_step_ms: float = Field(default=0.0, ge=0)
    """How long a forward pass of a fake model takes."""
    fake_eos_probability: float = Field(default=0.0, ge=0, le=1)
    """How likely a fake model ends its answer with each token; 0: it never does."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the Prometheus endpoint, in plaintext and without credentials; absent: none."""
    metrics_host: str = "127.0.0.1"
    """Interface of the Prometheus endpoint. For a scraper on another host, name one that only it can reach."""
