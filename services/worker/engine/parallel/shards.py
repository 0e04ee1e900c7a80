"""Which part of a model each tensor-parallel rank holds. Parts may differ in size; nothing is padded."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from common.errors import ConfigurationError
from services.worker.engine.quantization.formats import column_unit, expert_column_unit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.steps import EngineSpec
    from services.worker.engine.model.config import ModelConfig

# Matrix kernels work on whole vectors of 16 floats, so borders inside the feed-forward layer fall between those; with
# some formats of quantised weights between larger units.
_FEED_FORWARD_UNIT = 16


@dataclass(frozen=True, slots=True)
class Span:
    """The half-open range [start, stop)."""

    start: int
    stop: int

    def __len__(self) -> int:
        """Return the number of elements that it covers."""
        return self.stop - self.start

    def scaled(self, factor: int) -> slice:
        """Return the range as a slice, in units `factor` times smaller."""
        return slice(self.start * factor, self.stop * factor)


@dataclass(frozen=True, slots=True)
class ModelShard:
    """One rank's part: attention heads, feed-forward columns and vocabulary rows."""

    rank: int
    world_size: int
    query_heads: Span
    kv_heads: Span
    intermediate: Span
    vocabulary: Span
    expert_columns: Span | None = None
    """Columns of each expert in `experts`, if the model has experts."""
    experts: Span | None = None
    """Experts of which this rank holds these columns: all, or with expert parallelism some as a whole."""
    shared_columns: Span | None = None
    """Columns of the layer beside experts, if the model has one."""
    state_heads: Span | None = None
    """Key heads of recurrent layers, with their value heads, if the model has such layers."""
    ranks_by_kv_head: int = 1
    """Ranks that hold the same KV head."""

    @property
    def has_work(self) -> bool:
        """Whether there is something of everything."""
        spans = (
            self.query_heads, self.intermediate, self.vocabulary, self.expert_columns, self.experts,
            self.shared_columns, self.state_heads,
        )  # fmt: skip
        return all(len(span) for span in spans if span is not None)

    @property
    def is_first(self) -> bool:
        """Whether this rank adds terms that must be added only once, such as biases of summed outputs."""
        return self.rank == 0


def split_evenly(total: int, parts: int, unit: int = 1) -> tuple[Span, ...]:
    """Cut [0, total) into `parts` spans whose sizes in `unit`s differ by at most one; earlier ones are larger."""
    units = -(-total // unit)
    borders = [0]
    for part in range(parts):
        borders.append(min(total, borders[-1] + unit * (units // parts + (part < units % parts))))
    return tuple(Span(start, stop) for start, stop in itertools.pairwise(borders))


def split_kv_heads(kv_heads: int, rank: int, world_size: int) -> Span:
    """Return the KV heads of a rank: some of its own, or one that it shares with others if there are more ranks."""
    if world_size <= kv_heads:
        return split_evenly(kv_heads, world_size)[rank]
    head = next(i for i, ranks in enumerate(split_evenly(world_size, kv_heads)) if rank < ranks.stop)
    return Span(head, head + 1)


def shard_model(config: ModelConfig, rank: int, world_size: int, *, expert_parallel: bool = False) -> ModelShard:
    """Cut `config`'s model into `world_size` parts and return that of `rank`.

    With `expert_parallel` a rank holds some experts as a whole, otherwise some columns of every expert.

    With at most as many ranks as KV heads, a rank holds whole groups (a KV head and the query heads that share it).
    With more, several ranks hold the same KV head and share its query heads.

    Raises:
        ConfigurationError: there are more ranks than query heads or than feed-forward or vocabulary units, or experts
            cannot be distributed.
    """
    if not 0 <= rank < world_size:
        raise ConfigurationError(f"rank {rank} is not below world_size {world_size}")
    if expert_parallel:
        _check_experts(config, world_size)
    shards = [_shard(config, other, world_size, expert_parallel) for other in range(world_size)]
    if not all(shard.has_work for shard in shards):
        raise ConfigurationError(
            f"tensor parallelism over {world_size} ranks leaves some without work: the model has {config.query_heads} "
            f"query heads and {config.intermediate_size} feed-forward columns"
            + (f", and {config.recurrent.key_heads} key heads in recurrent layers" if config.recurrent else "")
        )
    unit = column_unit(config.stored_format)
    for shard in shards:
        cuts = [(shard.query_heads.scaled(config.output_dim), "attention's output")]
        if config.recurrent is not None and shard.state_heads is not None:
            width = config.recurrent.values_per_key * config.recurrent.value_dim
            cuts.append((shard.state_heads.scaled(width), "the output of recurrent layers"))
        for columns, what in cuts:
            if columns.start % unit or (columns.stop % unit and shard.rank + 1 < world_size):
                raise ConfigurationError(
                    f"FP8 in blocks is cut between {unit} inputs: rank {shard.rank} of {world_size} would have columns "
                    f"{columns.start} to {columns.stop} of {what}; use fewer ranks"
                )
    return shards[rank]


def shard_kinds(
    config: ModelConfig, rank: int, world_size: int, *, expert_parallel: bool = False
) -> list[tuple[ModelConfig, ModelShard]]:
    """Return the model and a rank's part with the heads of layers without a window, and of those with, if they differ.

    Raises:
        ConfigurationError: the model cannot be cut so; see `shard_model`.
    """
    configs = [config]
    if config.local_heads is not None:
        configs = [config.with_heads(is_local=is_local) for is_local in (False, True)]
    return [(each, shard_model(each, rank, world_size, expert_parallel=expert_parallel)) for each in configs]


def shards_of(spec: EngineSpec, config: ModelConfig, tensor_rank: int) -> list[tuple[ModelConfig, ModelShard]]:
    """Return `shard_kinds` for a rank of the group that `spec` configures.

    Raises:
        ConfigurationError: the model cannot be cut so.
    """
    kinds = shard_kinds(config, tensor_rank, spec.tensor_ranks, expert_parallel=spec.expert_parallel)
    if spec.data_parallel_size == 1:
        return kinds
    group, groups = spec.data_parallel_rank, spec.data_parallel_size
    return [(each, share_experts(each, shard, group, groups)) for each, shard in kinds]


def share_experts(config: ModelConfig, shard: ModelShard, group: int, groups: int) -> ModelShard:
    """Return a rank's part of a model of which it holds everything but experts, which it shares with other groups.

    Raises:
        ConfigurationError: there are none to share, or too few.
    """
    if config.moe is None:
        raise ConfigurationError(
            f"scheduler.data_parallel: {config.family} has no experts that groups could share; run groups that each "
            "have the whole model (pando up --roles both=2)"
        )
    if groups > config.moe.experts:
        raise ConfigurationError(
            f"scheduler.data_parallel: {config.family} has {config.moe.experts} experts, too few for {groups} groups"
        )
    return replace(shard, experts=split_evenly(config.moe.experts, groups)[group])


def are_cut_alike(kinds: Sequence[tuple[ModelConfig, ModelShard]]) -> bool:
    """Whether to each KV head of a rank in the layers of the first kind belong as many of every other kind."""
    (first, held), *others = kinds
    return all(
        other.kv_heads % first.kv_heads == 0
        and shard.kv_heads.scaled(1) == held.kv_heads.scaled(other.kv_heads // first.kv_heads)
        for other, shard in others
    )


def _check_experts(config: ModelConfig, ranks: int) -> None:
    if config.moe is None:
        raise ConfigurationError(f"scheduler.expert_parallel: {config.family} has no experts; use tensor parallelism")
    if ranks == 1:
        raise ConfigurationError(
            "scheduler.expert_parallel distributes experts over ranks, and each stage has only one"
        )
    if ranks > config.moe.experts:
        raise ConfigurationError(
            f"scheduler.expert_parallel: {config.family} has {config.moe.experts} experts, too few for {ranks} ranks"
        )


def _shard(config: ModelConfig, rank: int, world_size: int, expert_parallel: bool) -> ModelShard:
    queries, keys = _split_heads(config, rank, world_size)
    sharing = sum(_split_heads(config, other, world_size)[1] == keys for other in range(world_size))
    unit = max(_FEED_FORWARD_UNIT, column_unit(config.stored_format))
    shared = config.moe.shared if config.moe else None
    columns, experts = _split_experts(config, rank, world_size, expert_parallel)
    return ModelShard(
        rank,
        world_size,
        query_heads=queries,
        kv_heads=keys,
        intermediate=split_evenly(config.intermediate_size, world_size, unit)[rank],
        vocabulary=split_evenly(config.vocabulary_size, world_size)[rank],
        expert_columns=columns,
        experts=experts,
        shared_columns=split_evenly(shared.intermediate_size, world_size, unit)[rank] if shared else None,
        state_heads=split_evenly(config.recurrent.key_heads, world_size)[rank] if config.recurrent else None,
        ranks_by_kv_head=sharing,
    )


def _split_experts(
    config: ModelConfig, rank: int, world_size: int, expert_parallel: bool
) -> tuple[Span | None, Span | None]:
    """Return the columns of experts that a rank has, and the experts of which it has them."""
    if config.moe is None:
        return None, None
    columns, experts = config.moe.intermediate_size, config.moe.experts
    if expert_parallel:
        return Span(0, columns), split_evenly(experts, world_size)[rank]
    unit = max(_FEED_FORWARD_UNIT, expert_column_unit(config.stored_format))
    return split_evenly(columns, world_size, unit)[rank], Span(0, experts)


def _split_heads(config: ModelConfig, rank: int, world_size: int) -> tuple[Span, Span]:
    group, keys = config.queries_per_kv, split_kv_heads(config.kv_heads, rank, world_size)
    if world_size <= config.kv_heads:
        return Span(keys.start * group, keys.stop * group), keys
    sharing = split_evenly(world_size, config.kv_heads)[keys.start]
    within = split_evenly(group, len(sharing))[rank - sharing.start]
    return Span(keys.start * group + within.start, keys.start * group + within.stop), keys
