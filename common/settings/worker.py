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
    """Index of the GPU on this host."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of the engine; 0: as many as this process has cores."""
    backend: Literal["auto", "torch", "compiled", "gpu"] = "auto"
    """Operators: torch (plain torch), compiled (for CPUs) or gpu (Triton and FlashInfer). auto: gpu on GPUs; on CPUs
    compiled if they can be built, otherwise torch."""
    grammar_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds after which the compilation of a grammar (JSON schema, regular expression, …) is aborted and the request
    refused."""
    grammar_slice_s: float = Field(default=1.0, gt=0)
    """Seconds after which a compilation yields to other users' grammars: one such long compilation continues in
    parallel, further ones restart when it has ended."""
    grammar_open_per_subject: int = Field(default=16, ge=1)
    """Grammars of one user (subject) that may be waiting or in compilation; further ones are refused with 429."""
    grammar_seconds_per_minute: float = Field(default=30.0, gt=0)
    """Compile time per minute of one user's grammars, a refilling budget; while it is used up, new grammars are refused
    with 429. Grammars that are already compiled are served nonetheless."""
    grammar_cache_megabytes: int = Field(default=512, ge=1)
    """MiB of compiled grammars in the cache, over all users. Each view has its own entries, so that the time to the
    first token does not reveal who else uses the same grammar."""
    grammar_cache_megabytes_per_subject: int = Field(default=64, ge=1)
    """MiB of one user's compiled grammars in the cache; above it, the oldest of them are dropped."""
    storage: SecretStr | None = None
    """Storage tier for KV pages, which persists across restarts and can be shared by processes: a directory, or a Redis
    or Valkey server as redis://, rediss:// or unix:// URL; absent: none. Pages are encrypted with keys of
    scheduler.storage_keyring."""
    storage_gigabytes: float = Field(default=16.0, gt=0)
    """GiB that the files of a storage directory may take; a server has its own limit (maxmemory)."""
    storage_timeout_s: float = Field(default=2.0, gt=0)
    """Seconds after which a call to the storage counts as failed."""
    storage_threads: int = Field(default=4, ge=1, le=64)
    """Concurrent calls to the storage; at most half of them write."""
    keep_warm_ms: float = Field(default=0.0, ge=0)
    """Interval in milliseconds at which an idle GPU runs a short dummy computation, so that its clocks stay high and
    the next request is fast; costs power. 0: never. No effect on CPUs."""
    profile_directory: Path | None = None
    """Directory for the traces that `pando profile` records of this rank; absent: recording is disabled. Anyone who can
    connect to the worker may start a recording, which slows it down meanwhile."""
    profile_max_seconds: float = Field(default=60.0, gt=0, le=3600)
    """Longest duration of a recording in seconds."""
    profile_max_passes: int = Field(default=1000, ge=1)
    """Most forward passes in a recording; each takes some hundred kilobytes of memory until it is written."""
    profile_max_megabytes: int = Field(default=1024, ge=1)
    """Size of the traces in the directory above which no recording starts."""
    fake_vocabulary_size: int = Field(default=49_152, ge=16)
    """Vocabulary of a model loaded with load_format=fake."""
    fake_step_ms: float = Field(default=0.0, ge=0)
    """Duration of a fake model's forward pass in milliseconds."""
    fake_eos_probability: float = Field(default=0.0, ge=0, le=1)
    """Probability with which a fake model ends its answer at each token; 0: never."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the Prometheus endpoint, in plaintext and without credentials; absent: none."""
    metrics_host: str = "127.0.0.1"
    """Interface of the Prometheus endpoint. For a scraper on another host, use one that only the scraper can reach."""
