"""Layouts of a model over ranks and groups, and deployments of them."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from common.settings import GatewaySettings, ModelSettings, SchedulerSettings, Settings, WorkerSettings
from common.settings.scheduler import DataParallelSettings, HostTierSettings
from common.types import GroupRole
from deploy.supervisor.layout import PlannedGroup, Replicas
from tests.e2e.conftest import serve

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tests.e2e.served import Served

# Longer prompts of groups with roles are computed in the group for that.
PREFILL_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How a model is laid out over ranks and groups; `is_exact`: it computes all sums in the order of a single rank."""

    family: str
    ranks: int = 1
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[PlannedGroup, ...] = (PlannedGroup(),)
    is_exact: bool = False


ONE = {"dense": "qwen3", "mixture": "qwen3 moe", "hybrid": "qwen3.5"}
DIVIDED = (PlannedGroup(GroupRole.PREFILL), PlannedGroup(GroupRole.DECODE))
WIDE_PREFILL = (PlannedGroup(GroupRole.PREFILL, 2), PlannedGroup(GroupRole.DECODE, 1))
WIDE_DECODE = (PlannedGroup(GroupRole.PREFILL, 1), PlannedGroup(GroupRole.DECODE, 2))
EXPERTS = {"expert_parallel": True}
GROUPS_OF_TWO = {"data_parallel": DataParallelSettings(size=2)}
ARRANGEMENTS = {
    "dense, prefill and decode apart": Arrangement("dense", groups=DIVIDED, is_exact=True),
    "dense, prefill with two ranks": Arrangement("dense", groups=WIDE_PREFILL),
    "dense, decode with two ranks": Arrangement("dense", groups=WIDE_DECODE),
    "dense, two stages": Arrangement("dense", scheduler={"pipeline_parallel": 2}, is_exact=True),
    "dense, two stages, prefill and decode apart": Arrangement(
        "dense", scheduler={"pipeline_parallel": 2}, groups=DIVIDED, is_exact=True
    ),
    "dense, tensor parallel": Arrangement("dense", ranks=2),
    "dense, tensor parallel in two stages": Arrangement("dense", 2, {"pipeline_parallel": 2}),
    "mixture, prefill and decode apart": Arrangement("mixture", groups=DIVIDED, is_exact=True),
    "mixture, two stages": Arrangement("mixture", scheduler={"pipeline_parallel": 2}, is_exact=True),
    "mixture, tensor parallel": Arrangement("mixture", ranks=2),
    "mixture, prefill with two ranks": Arrangement("mixture", groups=WIDE_PREFILL),
    "mixture, expert parallel": Arrangement("mixture", ranks=2, scheduler=EXPERTS),
    "mixture, expert parallel, prefill and decode apart": Arrangement("mixture", 2, EXPERTS, DIVIDED),
    "mixture, data parallel": Arrangement("mixture", scheduler=GROUPS_OF_TWO, groups=(PlannedGroup(), PlannedGroup())),
    "mixture, data parallel, prefill and decode apart": Arrangement("mixture", 1, GROUPS_OF_TWO, DIVIDED),
    "hybrid, prefill and decode apart": Arrangement("hybrid", groups=DIVIDED),
    "hybrid, prefill with two ranks": Arrangement("hybrid", groups=WIDE_PREFILL),
    "mixture, expert parallel in two stages": Arrangement("mixture", 2, {**EXPERTS, "pipeline_parallel": 2}),
}


@contextmanager
def served_as(arrangement: Arrangement, checkpoint: Path, root: Path) -> Iterator[Served]:
    scheduler: dict[str, Any] = {**arrangement.scheduler, "max_rows": 8, "max_step_tokens": 96}
    if len(arrangement.groups) > 1:
        scheduler |= {"host_tier": HostTierSettings(pages=512), "prefill_min_tokens": PREFILL_TOKENS}
    settings = Settings(
        model=ModelSettings(reference=str(checkpoint), dtype="float32", kv_dtype="float32"),
        gateway=GatewaySettings(port=0, anonymous="vouched"),
        scheduler=SchedulerSettings(**scheduler),
        worker=WorkerSettings(threads=1),
    )
    yield from serve(settings, root, arrangement.ranks, Replicas(groups=arrangement.groups))
