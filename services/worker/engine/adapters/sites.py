"""The products of a decoder that adapters change, and a rank's share of an adapter's factors for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from common.errors import ConfigurationError
from services.worker.engine.checkpoints.tensor_names import split_expert, stored_tensor
from services.worker.engine.checkpoints.tensor_shapes import tensor_shape
from services.worker.engine.families.registry import families_by_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from services.worker.engine.adapters.files import AdapterFile, LowRank
    from services.worker.engine.model.config import ModelConfig

EMBEDDING = "model.embed_tokens"
# Modules of several matrices above each other, by one of these.
_FUSED = {
    "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}  # fmt: skip
_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True, slots=True, eq=False)
class SitePart:
    """A matrix of a product, or some of its rows."""

    module: str
    """The matrix's name without `.weight`, as the engine calls it."""
    rows: slice | torch.Tensor
    """The matrix's rows that this rank has, in the product's order."""


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A product with matrices above each other, of which this rank may have only some rows or columns."""

    parts: tuple[SitePart, ...]
    columns: slice = field(default_factory=lambda: slice(None))
    label: str = ""

    @property
    def name(self) -> str:
        """A name that no other site has."""
        return " ".join((*(part.module for part in self.parts), self.label))


@dataclass(frozen=True, slots=True)
class PartFactors:
    """Outputs [first, first + len(b)) of a site: they get `b` [outputs, rank] times the shrunk inputs `ranks`."""

    first: int
    ranks: slice
    b: torch.Tensor


@dataclass(frozen=True, slots=True)
class SiteFactors:
    """An adapter's factors for a site on this rank: `a` [ranks of all parts, in] shrinks inputs for its parts."""

    a: torch.Tensor
    parts: tuple[PartFactors, ...]


@dataclass(frozen=True, slots=True)
class EmbeddingFactors:
    """An adapter's factors for the embedding: `a` [vocabulary, rank], `b` [hidden, rank]."""

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """One rank's part of an adapter, laid out for its products."""

    digest: str
    rank: int
    sites: Mapping[str, SiteFactors]
    embedding: EmbeddingFactors | None

    @property
    def bytes(self) -> int:
        """Memory of all factors."""
        tensors = [each for site in self.sites.values() for each in (site.a, *(part.b for part in site.parts))]
        if self.embedding is not None:
            tensors += [self.embedding.a, self.embedding.b]
        return sum(tensor.nbytes for tensor in tensors)


def adapter_bytes(sites: Iterable[Site], config: ModelConfig, rank: int, element_bytes: int) -> int:
    """Return the memory of this rank's share of an adapter of `rank` that changes all of `sites`."""
    numbers = 0
    for site in sites:
        inputs = len(range(tensor_shape(f"{site.parts[0].module}.weight", config)[1])[site.columns])
        numbers += sum(inputs + _outputs(part, config) for part in site.parts)
    return rank * numbers * element_bytes


def shard_adapter(
    file: AdapterFile, sites: Sequence[Site], config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> AdapterWeights:
    """Check an adapter against the model of `config`, and return this rank's share for `sites`, in `dtype`.

    Raises:
        ConfigurationError: a module is not of this model, cannot be adapted in it, or has other shapes.
    """
    finder = _Finder(file, config)
    by_site: dict[str, SiteFactors] = {}
    for site in sites:
        found = [(part, factors) for part in site.parts if (factors := finder.find(part.module)) is not None]
        if found:
            by_site[site.name] = _factors(site, dict(found), config, dtype, device)
    embedding = None
    for module, each in file.embeddings.items():
        if module != EMBEDDING:
            raise ConfigurationError(f"adapter: {module!r} is no embedding of this model")
        _check(module, each, (config.hidden_size, config.vocabulary_size))
        embedding = EmbeddingFactors(
            each.a.t().to(device, dtype).contiguous(), (each.b.float() * each.scale).to(device, dtype)
        )
    left = sorted(file.modules.keys() - finder.used)
    if left:
        if config.moe is not None and ".experts" in left[0] and not any(".experts." in site.name for site in sites):
            raise ConfigurationError(
                f"adapter: the module {left[0]!r} changes experts; on a GPU that takes scheduler.adapters.experts=true"
            )
        more = f", and {len(left) - 1} more" if len(left) > 1 else ""
        raise ConfigurationError(
            f"adapter: the module {left[0]!r}{more} cannot be adapted in this model ({config.family}); attention, "
            "feed-forward layers, experts, embedding and head can, where they are plain products"
        )
    return AdapterWeights(file.digest, file.rank, by_site, embedding)


def _factors(
    site: Site, found: Mapping[SitePart, LowRank], config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> SiteFactors:
    shrinking, parts, first, ranks = [], [], 0, 0
    for part in site.parts:
        if (factors := found.get(part)) is not None:
            taken = slice(ranks, ranks + factors.rank)
            scaled = factors.b[part.rows].float() * factors.scale
            parts.append(PartFactors(first, taken, scaled.to(device, dtype).contiguous()))
            shrinking.append(factors.a[:, site.columns])
            ranks = taken.stop
        first += _outputs(part, config)
    return SiteFactors(torch.cat(shrinking).to(device, dtype).contiguous(), tuple(parts))


def _outputs(part: SitePart, config: ModelConfig) -> int:
    height = tensor_shape(f"{part.module}.weight", config)[0]
    return len(range(height)[part.rows]) if isinstance(part.rows, slice) else len(part.rows)


class _Finder:
    """Finds a module's factors under the names that files may have for it."""

    def __init__(self, file: AdapterFile, config: ModelConfig) -> None:
        self.used: set[str] = set()
        self._modules = file.modules
        self._config = config
        self._names = families_by_name()[config.family].tensors

    def find(self, module: str) -> LowRank | None:
        """Return the factors of the engine's matrix `module`.

        Raises:
            ConfigurationError: they have other shapes than the matrix.
        """
        shape = tensor_shape(f"{module}.weight", self._config)
        stored = stored_tensor(f"{module}.weight", self._names)
        names = [module]
        if stored.part is None and stored.expert is None:
            names.append(stored.name.removesuffix(".weight"))
        for name in names:
            if name in self._modules:
                return self._taken(name, self._modules[name], shape)
        return self._in_fused(module, shape) or self._in_stack(module, shape)

    def _taken(self, name: str, factors: LowRank, shape: tuple[int, ...]) -> LowRank:
        self.used.add(name)
        _check(name, factors, shape)
        return factors

    def _in_fused(self, module: str, shape: tuple[int, ...]) -> LowRank | None:
        """Return a part of the factors of a module that contains this one and others (Phi-3, GLM)."""
        stem, _, part = module.rpartition(".")
        whole = _FUSED.get(part, "")
        factors = self._modules.get(f"{stem}.{whole}")
        if factors is None:
            return None
        heights = {each: tensor_shape(f"{stem}.{each}.weight", self._config)[0] for each in _PARTS[whole]}
        self._taken(f"{stem}.{whole}", factors, (sum(heights.values()), shape[1]))
        before = _PARTS[whole][: _PARTS[whole].index(part)]
        first = sum(heights[each] for each in before)
        return factors.rows(slice(first, first + shape[0]))

    def _in_stack(self, module: str, shape: tuple[int, ...]) -> LowRank | None:
        """Return an expert's part of the factors of stacked matrices of all experts (PEFT's target_parameters)."""
        _, expert = split_expert(f"{module}.weight")
        moe = self._config.moe
        if expert is None or moe is None:
            return None
        stem, _, rest = module.partition(".experts.")
        part = rest.rpartition(".")[2]
        is_down = part == "down_proj"
        wanted = shape if is_down else (2 * shape[0], shape[1])
        for name in (f"{stem}.experts", f"{stem}.experts.base_layer"):
            factors = self._modules.get(name)
            if factors is None or (factors.b.shape[0], factors.a.shape[1]) != wanted:
                continue
            own = factors.of_expert(expert, moe.experts)
            if own is None:
                raise ConfigurationError(f"adapter: module {name!r} has no rank of its own for each expert")
            self.used.add(name)
            if is_down:
                return own
            stored = stored_tensor(f"{module}.weight", self._names).part
            if stored is not None and stored.step > 1:
                return own.rows(slice(stored.first, None, stored.step))
            first = shape[0] if part == "up_proj" else 0
            return own.rows(slice(first, first + shape[0]))
        return None


def _check(module: str, factors: LowRank, shape: tuple[int, ...]) -> None:
    found = factors.b.shape[0], factors.a.shape[1]
    if found != shape[:2]:
        raise ConfigurationError(
            f"adapter: module {module!r} is made for a matrix {list(found)}, but this model's is {list(shape[:2])}"
        )
