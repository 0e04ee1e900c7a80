"""The adapters that a rank holds: laid out in host memory, and those in slots of the device."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from common.errors import ConfigurationError
from services.worker.engine.adapters.files import read_adapter
from services.worker.engine.adapters.sites import AdapterWeights, EmbeddingFactors, SiteFactors, shard_adapter
from services.worker.engine.execution.interface import InvalidPlanError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from common.steps import AdapterLoad
    from services.worker.engine.adapters.active import AdapterProducts
    from services.worker.engine.execution.interface import AdapterSize
    from services.worker.engine.model.config import ModelConfig


class AdapterShelf:
    """Owns a rank's adapters, by their digests.

    `load` and `reset` belong to the engine's thread; all other methods may run in any thread while passes run.
    """

    def __init__(self, active: AdapterProducts, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Start empty; `active` has the slots, and the sites of the model of `config`, which computes in `dtype`."""
        self._active = active
        self._config = config
        self._dtype = dtype
        self._device = device
        self._lock = threading.Lock()
        self._weights: dict[str, AdapterWeights] = {}

    def take_over(self, other: AdapterShelf) -> None:
        """Have the adapters of `other`, which served the same model; what it is still to keep is kept here, too."""
        self._lock, self._weights = other._lock, other._weights

    @property
    def slots(self) -> int:
        """Number of slots on the device."""
        return self._active.slots

    @property
    def kept(self) -> dict[str, AdapterSize]:
        """The adapters in host memory, by their digests."""
        with self._lock:
            return {**self._weights}

    def read(self, directory: Path, expected: str = "") -> AdapterWeights:
        """Read an adapter; `expected` is the digest that it must have.

        Raises:
            ConfigurationError: it cannot be read, does not fit the model, or is another than expected.
        """
        file = read_adapter(directory)
        if expected and file.digest != expected:
            raise ConfigurationError(f"adapter {directory}: the files have changed since it was loaded")
        host = torch.device("cpu")
        with torch.inference_mode():
            weights = shard_adapter(file, self._active.sites, self._config, self._dtype, host)
        most = self._active.most_ranks
        if most is not None and weights.rank > most:
            raise ConfigurationError(f"adapter {directory}: the rank {weights.rank} is above {most}, the most on a GPU")
        return weights

    def keep(self, adapter: AdapterSize) -> None:
        """Have what `read` has returned in host memory, for plans to load."""
        assert isinstance(adapter, AdapterWeights)
        with self._lock:
            self._weights.setdefault(adapter.digest, adapter)

    def drop(self, digest: str) -> None:
        """Forget an adapter that no later plan loads; slots keep theirs until they are filled again."""
        with self._lock:
            self._weights.pop(digest, None)

    def load(self, loads: Iterable[AdapterLoad]) -> None:
        """Fill slots, as a plan says; see `AdapterStore.load`."""
        for load in loads:
            with self._lock:
                weights = self._weights.get(load.digest)
            if weights is None:
                raise InvalidPlanError(f"the adapter {load.digest} was not read")
            self._active.put(load.slot, self._on_device(weights))

    def reset(self) -> None:
        """Empty the slots: a new stream of plans begins."""
        self._active.clear()

    def _on_device(self, weights: AdapterWeights) -> AdapterWeights:
        if self._device.type == "cpu":
            return weights

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(self._device, non_blocking=True)

        sites = {
            name: SiteFactors(
                moved(site.a), tuple(type(part)(part.first, part.ranks, moved(part.b)) for part in site.parts)
            )
            for name, site in weights.sites.items()
        }
        embedding = weights.embedding
        if embedding is not None:
            embedding = EmbeddingFactors(moved(embedding.a), moved(embedding.b))
        return AdapterWeights(weights.digest, weights.rank, sites, embedding)
