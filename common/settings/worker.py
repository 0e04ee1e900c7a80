"""The section of the configuration that every worker rank reads, and the sections in it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr

from common.section import Section


class GrammarSettings(Section):
    """Compilation of grammars (JSON schema, regular expression, …)."""

    seconds_per_minute: float = Field(default=30.0, gt=0)
    """Compile time per minute of one user's grammars, a refilling budget; while it is used up, new grammars are refused
    with 429. Grammars that are already compiled are served nonetheless."""


class WorkerStorageSettings(Section):
    """The storage tier for KV pages and recurrent states, which persists across restarts and can be shared."""

    location: SecretStr | None = None
    """A directory; a Redis or Valkey server as redis://, rediss:// or unix:// URL, nodes of a cluster as
    redis+cluster://HOST:PORT,HOST:PORT, or sentinels as redis+sentinel://HOST:PORT,HOST:PORT/SERVICE (rediss+… with
    TLS); or a URL whose scheme an installed package has a back end for, by an entry point in the group pando.storage.
    Absent: no storage tier. Pages are encrypted with keys of scheduler.storage.keyring."""
    gigabytes: float = Field(default=16.0, gt=0)
    """GiB that the files of a storage directory may take; a server has its own limit (maxmemory)."""
    timeout_s: float = Field(default=2.0, gt=0)
    """Seconds after which a call to the storage counts as failed; a call carries up to eight pages, or one snapshot of
    recurrent layers' states."""


class ProfileSettings(Section):
    """Traces that `pando profile` records."""

    directory: Path | None = None
    """Directory for the traces of this rank; absent: recording is disabled. Anyone who can
    connect to the worker may start a recording, which slows it down meanwhile."""


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
    products: Literal["auto", "own", "onednn"] = "auto"
    """Matrix products of compiled operators on CPUs: own (of Pando) or onednn (of torch). They differ in the last bits;
    both use AMX. auto: the faster, which is measured when a model is first loaded, and kept in `$PANDO_CACHE_DIR`."""
    keep_warm_ms: float = Field(default=0.0, ge=0)
    """Interval in milliseconds at which an idle GPU runs a short dummy computation, so that its clocks stay high and
    the next request is fast; costs power. 0: never. No effect on CPUs."""
    peer_transfers: Literal["auto", "nixl"] = "auto"
    """How KV pages come from workers of other groups: auto (by CUDA IPC between GPUs of one host, over gRPC elsewhere)
    or nixl (over NIXL elsewhere, by RDMA or TCP, if both groups have this). NIXL authenticates no process: use it only
    in a network that only workers reach. It requires the extra `nixl`."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the Prometheus endpoint, in plaintext and without credentials; absent: none."""
    grammars: GrammarSettings = GrammarSettings()
    storage: WorkerStorageSettings = WorkerStorageSettings()
    profile: ProfileSettings = ProfileSettings()
