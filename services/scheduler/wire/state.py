"""The scheduler's state for operators and tools: the cache's nodes, events and accounting, requests and sessions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import InvalidRequestError
from common.wire.identity import view_to_wire
from protos.gen.pando.v1 import scheduler_pb2, sessions_pb2
from services.scheduler.cache.types import CacheEventKind, NodeState, Visibility
from services.scheduler.sleep_desk import SleepMode
from services.scheduler.weights_desk import UpdateMode

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.types import View
    from services.scheduler.cache.interface import PrefixCache
    from services.scheduler.cache.tiers.storage_tier import StorageTier
    from services.scheduler.cache.types import Accounting, CacheEvent, NodeSnapshot, OwnerSnapshot
    from services.scheduler.cache_meter import CacheMeter
    from services.scheduler.core.costs import CostEstimate
    from services.scheduler.core.load_back import LoadBack
    from services.scheduler.core.sequence import Sequence
    from services.scheduler.core.session import Session
    from services.scheduler.heartbeats import RankHealth

_VISIBILITIES = {each: scheduler_pb2.Visibility.Value(f"VISIBILITY_{each.name}") for each in Visibility}
_STATES = {state: scheduler_pb2.NodeState.Value(f"NODE_STATE_{state.name}") for state in NodeState}
_EVENT_KINDS = {kind: scheduler_pb2.CacheEventKind.Value(f"CACHE_EVENT_KIND_{kind.name}") for kind in CacheEventKind}

_SLEEP_MODES = {scheduler_pb2.SleepMode.Value(f"SLEEP_MODE_{mode.name}"): mode for mode in SleepMode}
_UPDATE_MODES = {scheduler_pb2.WeightsUpdateMode.Value(f"WEIGHTS_UPDATE_MODE_{mode.name}"): mode for mode in UpdateMode}


@dataclass(frozen=True, slots=True)
class Disclosure:
    """Visibility of identities and prompts to a caller: names and ids only for the operator, otherwise fingerprints."""

    is_admin: bool
    # Fingerprint of a view, or of a tenant by its name.
    fingerprint: Callable[[View | str], str]
    with_ids: bool = False


def node_to_wire(node: NodeSnapshot, shown: Disclosure) -> scheduler_pb2.TreeNode:
    """Encode a node."""
    message = scheduler_pb2.TreeNode(
        node_id=node.node_id,
        parent_id=node.parent_id,
        edge_tokens=node.edge_tokens,
        depth_tokens=node.depth_tokens,
        visibility=_VISIBILITIES[node.visibility],
        lock_ref=node.lock_ref,
        last_access=node.last_access,
        device_pages=node.pages.tolist(),
        host_pages=node.host_pages.tolist() if node.host_pages is not None else (),
        host_ref=node.host_ref,
        state=_STATES[node.state],
        hits=node.hits,
        users=node.users,
        previous_hits=node.previous_hits,
        previous_users=node.previous_users,
        epoch=node.epoch,
        creators=node.creators,
        quarantined=node.quarantined,
        quarantined_tenants=node.quarantined_tenants,
        generation=node.generation,
        priority=node.priority,
        pinned=node.pinned,
        no_promote=node.no_promote,
        promoted_by=node.promoted_by,
        promoted_epoch=node.promoted_epoch,
        promoted_tenants=node.promoted_tenants,
        required_subjects=node.required_subjects,
    )
    if node.owner is not None:
        message.owner_fingerprint = shown.fingerprint(node.owner)
        if shown.is_admin:
            message.owner_view.CopyFrom(view_to_wire(node.owner))
    if node.tenant is not None:
        message.owner_fingerprint = shown.fingerprint(node.tenant)
        if shown.is_admin:
            message.owner_tenant = node.tenant
    if shown.is_admin and shown.with_ids:
        message.token_ids.extend(node.token_ids.tolist())
    return message


def event_to_wire(
    event: CacheEvent, shown: Disclosure, age_s: float | None = None
) -> scheduler_pb2.WatchCacheEventsResponse:
    """Encode a change of the tree; a past decision has an age."""
    return scheduler_pb2.WatchCacheEventsResponse(
        sequence=event.sequence,
        kind=_EVENT_KINDS[event.kind],
        node=node_to_wire(event.node, shown) if event.node else None,
        age_ms=round(age_s * 1000) if age_s is not None else None,
    )


def cache_to_wire(
    cache: PrefixCache, meter: CacheMeter | None, verdicts: dict[str, int]
) -> scheduler_pb2.CacheAccounting:
    """Encode the cache's content, event counts, hits and operation costs."""
    usage = cache.usage
    message = scheduler_pb2.CacheAccounting(
        epoch=cache.epoch,
        sequence=cache.events.sequence,
        nodes=usage.nodes,
        views=usage.views,
        public_pages=usage.public_pages,
        tenant_pages=usage.tenant_pages,
        private_pages=usage.private_pages,
        merged_pages=usage.merged_pages,
        events={kind.value: number for kind in CacheEventKind if (number := cache.events.count(kind))},
        verdicts=verdicts,
    )
    if meter is not None:
        for (tier, visibility), tokens in meter.hit_tokens.items():
            message.hit_tokens[f"{tier}/{visibility}"] = tokens
        for name, cost in meter.times:
            message.operations[name].calls = cost.calls
            message.operations[name].cpu_seconds = cost.seconds
    return message


def rank_to_wire(number: int, health: RankHealth) -> scheduler_pb2.RankState:
    """Encode what a rank's heartbeats say."""
    message = scheduler_pb2.RankState(rank=number, silent_heartbeats=health.silent_heartbeats)
    if health.last is not None:
        message.engine_age_ms = round(health.last.engine_age_s * 1000)
        if health.last.open_plans is not None:
            message.open_plans = health.last.open_plans
    return message


def owner_to_wire(owner: OwnerSnapshot, shown: Disclosure) -> scheduler_pb2.OwnerAccounting:
    """Encode the usage of one view, one tenant or the public."""
    message = scheduler_pb2.OwnerAccounting(
        visibility=scheduler_pb2.VISIBILITY_PUBLIC,
        device_pages=owner.device_pages,
        host_pages=owner.host_pages,
        nodes=owner.nodes,
        leases=owner.locks,
        last_epoch=owner.last_epoch,
        active=owner.is_active,
    )
    if owner.view is not None:
        message.visibility = scheduler_pb2.VISIBILITY_PRIVATE
        message.fingerprint = shown.fingerprint(owner.view)
        if shown.is_admin:
            message.view.CopyFrom(view_to_wire(owner.view))
    elif owner.tenant is not None:
        message.visibility = scheduler_pb2.VISIBILITY_TENANT
        message.fingerprint = shown.fingerprint(owner.tenant)
        if shown.is_admin:
            message.tenant = owner.tenant
    return message


def tier_to_wire(tier: str, accounts: Accounting) -> scheduler_pb2.TierAccounting:
    """Encode the page accounting of one tier."""
    return scheduler_pb2.TierAccounting(
        tier=tier,
        capacity_pages=accounts.capacity,
        free_pages=accounts.free,
        soft_free_pages=accounts.soft_free,
        evictable_pages=accounts.evictable,
        protected_pages=accounts.protected,
    )


def storage_to_wire(storage: StorageTier) -> scheduler_pb2.StorageAccounting:
    """Encode the traffic with storage."""
    return scheduler_pb2.StorageAccounting(
        prefetch=storage.config.policy.value,
        stored_pages=storage.stored_pages,
        fetched_pages=storage.fetched_pages,
        misses=storage.misses,
        reading_pages=storage.reading_pages,
        writing_pages=storage.writing_pages,
        stored_snapshots=storage.stored_snapshots,
        fetched_snapshots=storage.fetched_snapshots,
        unused_pages=storage.unused_pages,
    )


def traffic_to_wire(loads: LoadBack) -> scheduler_pb2.HostTierState:
    """Encode the traffic between the tiers, and the cost of loading from the host."""
    message = scheduler_pb2.HostTierState(
        open_transfers=len(loads.host.ledger),
        skipped_load_tokens=loads.skipped_tokens,
        skipped_backup_pages=loads.host.skipped_pages,
        load_cost=_cost_to_wire(loads.costs.estimate()),
        skipped_storage_tokens=loads.unread_tokens,
    )
    for direction, moved in loads.moved.items():
        message.traffic.add(
            direction=direction.value, transfers=moved.transfers, pages=moved.pages, seconds=moved.seconds
        )
    return message


def _cost_to_wire(estimate: CostEstimate) -> scheduler_pb2.LoadCost:
    return scheduler_pb2.LoadCost(
        prefill_tokens_per_s=estimate.prefill_tokens_per_s,
        load_bytes_per_s=estimate.load_bytes_per_s,
        bytes_per_token=estimate.bytes_per_token,
        load_latency_s=estimate.load_latency_s,
        break_even_tokens=estimate.break_even_tokens,
        storage_bytes_per_s=estimate.storage_bytes_per_s,
        storage_break_even_tokens=estimate.storage_break_even_tokens,
    )


def sequence_to_wire(
    sequence: Sequence, computed_tokens: int, generated_tokens: int, pages: int, age_s: float
) -> scheduler_pb2.RequestState:
    """Encode an open choice, without the identity of its owner."""
    return scheduler_pb2.RequestState(
        request_id=sequence.request.request_id,
        choice_index=sequence.choice_index,
        phase=sequence.phase.value,
        prompt_tokens=sequence.prompt_tokens,
        cached_tokens=sequence.cached_tokens or 0,
        computed_tokens=computed_tokens,
        generated_tokens=generated_tokens,
        pages=pages,
        age_ms=int(age_s * 1000),
    )


def session_to_wire(session: Session, shown: Disclosure, now: float) -> sessions_pb2.SessionState:
    """Encode a session's state at `now`, seconds of the scheduler's clock."""
    message = sessions_pb2.SessionState(
        fingerprint=shown.fingerprint(session.view),
        capacity_tokens=session.grant.capacity_tokens,
        pinned_tokens=session.pinned_tokens,
        turns=session.turns,
        open_requests=session.open_requests,
        expires_in_ms=round((session.expires_at - now) * 1000)
        if session.expires_at is not None
        else session.grant.timeout_ms,
    )
    if shown.is_admin:
        message.view.CopyFrom(view_to_wire(session.view))
        message.session = session.name
    return message


def sleep_mode_from_wire(mode: scheduler_pb2.SleepMode.ValueType) -> SleepMode:
    """Decode the treatment of running requests.

    Raises:
        InvalidRequestError: the mode is missing or unknown.
    """
    found = _SLEEP_MODES.get(mode)
    if found is None:
        raise InvalidRequestError(f"mode must be one of {', '.join(m.value for m in SleepMode)}", param="mode")
    return found


def update_mode_from_wire(mode: scheduler_pb2.WeightsUpdateMode.ValueType) -> UpdateMode:
    """Decode the treatment of running requests.

    Raises:
        InvalidRequestError: the mode is missing or unknown.
    """
    found = _UPDATE_MODES.get(mode)
    if found is None:
        raise InvalidRequestError(f"mode must be one of {', '.join(m.value for m in UpdateMode)}", param="mode")
    return found
