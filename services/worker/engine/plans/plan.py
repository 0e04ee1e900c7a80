"""Taking a step plan into the rows: every claim it makes about them is checked first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from common.types import Pooling
from services.worker.engine.execution.interface import InvalidPlanError
from services.worker.engine.plans.passes import NO_CHUNKS, Chunks
from services.worker.engine.plans.rows import RowPhase, RowStates

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from common.steps import (
        AdapterLoad,
        MicroBatch,
        PageGrants,
        PageReplacement,
        PrefillChunk,
        RowOpen,
        StateSave,
        StepPlan,
    )
    from common.transfers import Transfer
    from common.types import RowSlot


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """Bounds of a plan: ids in [0, vocabulary_size), pages of each tier from 0 on, tokens per pass."""

    vocabulary_size: int
    device_pages: int
    max_step_tokens: int
    host_pages: int = 0
    # Rows do not generate, have no pages, and are computed in one piece.
    is_encoder: bool = False
    # The model's classification head: all rows have this pooling.
    head: Pooling | None = None
    # Rows do not generate.
    only_pools: bool = False
    # Pages of the layers that see so many tokens only; 0: these have no pool of their own.
    window_pages: int = 0
    window_tokens: int = 0
    # Snapshots of recurrent states, of which rows have some if `RowStates.has_states`.
    snapshots: int = 0
    # The same on the host.
    host_snapshots: int = 0
    # Slots of adapters.
    adapters: int = 0


def apply_bookkeeping(plan: StepPlan, rows: RowStates, limits: PlanLimits) -> Chunks:
    """Carry out closes, opens, replacements and grants, set how far rows may jump, and return the first pass's chunks.

    Raises:
        InvalidPlanError: the plan contradicts the rows; they are undefined then.
    """
    _check_passes(plan)
    for row in plan.closes:
        _require_open(rows, row, "close")
        rows.close(row)
    for load in plan.adapters:
        _check_adapter(load, rows, limits)
    for opened in plan.opens:
        _check_open(opened, rows, limits)
        rows.open(opened)
    for replacement in plan.replacements:
        _check_replacement(replacement, rows, limits)
        rows.replace_pages(replacement.row, replacement.first, replacement.pages, replacement.window_pages)
    if plan.grants.rows.size:
        _check_grants(plan.grants, rows, limits)
        rows.grant_pages(plan.grants)
    chunks = _take_chunks(plan.prefills, rows)
    _set_drafts(plan, rows, limits)
    _check_size(chunks, rows, limits, plan.micro_batch)
    if limits.is_encoder:
        _check_wholeness(chunks)
    else:
        _check_coverage(chunks, rows, plan)
    _limit_jumps(plan, rows)
    for save in plan.saves:
        _check_save(save, rows, limits)
    for transfer in plan.transfers:
        _check_transfer(transfer, limits)
    return chunks


def _check_passes(plan: StepPlan) -> None:
    if plan.steps < 1:
        raise InvalidPlanError(f"a plan has at least one step, not {plan.steps}")
    part = plan.micro_batch
    if not 0 <= part.index < part.count:
        raise InvalidPlanError(f"micro-batch {part.index}, of {part.count}")


def _require_open(rows: RowStates, row: RowSlot, what: str) -> None:
    if not 0 <= row < rows.max_rows or rows.phase[row] == RowPhase.FREE:
        raise InvalidPlanError(f"{what} of row {row}, which is not open")


def _check_open(opened: RowOpen, rows: RowStates, limits: PlanLimits) -> None:
    row, length = opened.row, opened.token_ids.size
    if not 0 <= row < rows.max_rows:
        raise InvalidPlanError(f"open of row {row}: slots are 0 to {rows.max_rows - 1}")
    if rows.phase[row] != RowPhase.FREE:
        raise InvalidPlanError(f"open of row {row}, which is open already")
    if not 1 <= opened.prompt_tokens <= length:
        raise InvalidPlanError(f"open of row {row}: {opened.prompt_tokens} prompt tokens among {length} ids")
    if not 0 <= opened.computed_tokens < length:
        raise InvalidPlanError(f"open of row {row}: {opened.computed_tokens} computed tokens of {length}")
    _check_pooling(opened, limits)
    # A row that generates needs room for a token.
    if not length + (opened.pooling is None) <= opened.max_total_tokens <= rows.max_context:
        raise InvalidPlanError(
            f"open of row {row}: at most {opened.max_total_tokens} tokens in total, with {length} ids there "
            f"and a context of {rows.max_context}"
        )
    if opened.token_ids.min() < 0 or opened.token_ids.max() >= limits.vocabulary_size:
        raise InvalidPlanError(f"open of row {row}: a token id outside the vocabulary of {limits.vocabulary_size}")
    if opened.pages.size * rows.page_size < opened.computed_tokens:
        raise InvalidPlanError(f"open of row {row}: its pages do not hold {opened.computed_tokens} computed tokens")
    _check_pages(opened.pages, limits, f"open of row {row}")
    unseen = _unseen_pages(opened.computed_tokens, rows, limits)
    _check_window(opened.pages, opened.window_pages, unseen, limits, f"open of row {row}")
    _check_scoring(opened, limits)
    _check_snapshot(opened, rows, limits)
    if opened.adapter is not None and not 0 <= opened.adapter < limits.adapters:
        raise InvalidPlanError(f"open of row {row}: a slot of adapters outside [0, {limits.adapters})")


def _check_snapshot(opened: RowOpen, rows: RowStates, limits: PlanLimits) -> None:
    what, snapshot = f"open of row {opened.row}", opened.snapshot
    if snapshot is not None and not 0 <= snapshot < limits.snapshots:
        raise InvalidPlanError(f"{what}: a snapshot outside [0, {limits.snapshots})")
    if rows.has_states and (snapshot is None) != (opened.computed_tokens == 0):
        which = "without" if snapshot is None else "with"
        raise InvalidPlanError(f"{what}: {opened.computed_tokens} computed tokens {which} a snapshot of their states")


def _check_adapter(load: AdapterLoad, rows: RowStates, limits: PlanLimits) -> None:
    if not 0 <= load.slot < limits.adapters:
        raise InvalidPlanError(f"load of an adapter: a slot outside [0, {limits.adapters})")
    running = (rows.phase == RowPhase.PREFILL) | (rows.phase == RowPhase.DECODE)
    if (running & (rows.adapters == load.slot)).any():
        raise InvalidPlanError(f"load of an adapter: a row uses what is in slot {load.slot}")


def _check_save(save: StateSave, rows: RowStates, limits: PlanLimits) -> None:
    _require_open(rows, save.row, "save of states")
    if not 0 <= save.snapshot < limits.snapshots:
        raise InvalidPlanError(f"save of states of row {save.row}: a snapshot outside [0, {limits.snapshots})")


def _check_scoring(opened: RowOpen, limits: PlanLimits) -> None:
    row, wanted = opened.row, opened.prompt_logprobs
    if wanted is None:
        return
    if wanted.start < opened.computed_tokens:
        raise InvalidPlanError(
            f"open of row {row}: log probabilities from {wanted.start} on, {opened.computed_tokens} tokens are computed"
        )
    if any(not 0 <= token_id < limits.vocabulary_size for token_id in wanted.token_ids):
        raise InvalidPlanError(f"open of row {row}: log probabilities of an id outside the vocabulary")


def _check_pooling(opened: RowOpen, limits: PlanLimits) -> None:
    pooling, what = opened.pooling, f"open of row {opened.row}"
    if pooling is None and limits.is_encoder:
        raise InvalidPlanError(f"{what}: an encoder cannot generate")
    if pooling is None and limits.only_pools:
        raise InvalidPlanError(f"{what}: this model cannot generate")
    if pooling is not None and pooling is not limits.head and not (limits.head is None and pooling.embeds):
        raise InvalidPlanError(f"{what}: the model does not support {pooling.value}")
    if pooling not in (None, Pooling.LAST, Pooling.CLASSIFY) and opened.computed_tokens:
        raise InvalidPlanError(f"{what}: {opened.computed_tokens} tokens are computed, whose hidden states are lost")


def _check_window(
    pages: NDArray[np.int32], window_pages: NDArray[np.int32], most_missing: int, limits: PlanLimits, what: str
) -> None:
    """Check the window pool's pages for the last of `pages`; those before are at most `most_missing`."""
    missing = pages.size - window_pages.size
    if not limits.window_pages:
        if window_pages.size:
            raise InvalidPlanError(f"{what}: pages of a window pool, which there is not")
        return
    if not 0 <= missing <= most_missing:
        raise InvalidPlanError(
            f"{what}: {window_pages.size} pages of the window pool for {pages.size} pages, all but the first "
            f"{most_missing} of which need one"
        )
    if window_pages.size and (window_pages.min() < 0 or window_pages.max() >= limits.window_pages):
        raise InvalidPlanError(f"{what}: a page of the window pool outside [0, {limits.window_pages})")


def _unseen_pages(computed: int, rows: RowStates, limits: PlanLimits) -> int:
    """Return how many of a row's first pages no token from position `computed` on sees in layers with a window."""
    return max(computed - limits.window_tokens + 1, 0) // rows.page_size


def _check_replacement(replacement: PageReplacement, rows: RowStates, limits: PlanLimits) -> None:
    row = replacement.row
    _require_open(rows, row, "page replacement")
    if not 0 <= replacement.first <= rows.page_counts[row] - replacement.pages.size:
        raise InvalidPlanError(
            f"page replacement of row {row}: entries from {replacement.first}, {replacement.pages.size} of them, "
            f"in a table of {rows.page_counts[row]}"
        )
    _check_pages(replacement.pages, limits, f"page replacement of row {row}")
    # The scheduler may not know yet that a row has stopped itself.
    stopped = rows.phase[row] == RowPhase.STOPPED
    unseen = replacement.pages.size if stopped else _unseen_pages(int(rows.computed[row]), rows, limits)
    most_missing = max(unseen - replacement.first, 0)
    _check_window(replacement.pages, replacement.window_pages, most_missing, limits, f"page replacement of row {row}")


def _check_grants(grants: PageGrants, rows: RowStates, limits: PlanLimits) -> None:
    if grants.rows.size != grants.pages.size:
        raise InvalidPlanError(f"page grants: {grants.rows.size} rows and {grants.pages.size} pages")
    for row in np.unique(grants.rows).tolist():
        _require_open(rows, row, "page grant")
    _check_pages(grants.pages, limits, "page grants")
    _check_window(grants.pages, grants.window_pages, 0, limits, "page grants")


def _check_transfer(transfer: Transfer, limits: PlanLimits) -> None:
    what = f"transfer {transfer.transfer_id}"
    if not transfer.direction.is_between_tiers:
        raise InvalidPlanError(f"{what}: there is no storage tier, and no peer")
    device, host = transfer.device_pages, transfer.host_pages
    if device.size != host.size or not device.size + transfer.device_snapshots.size:
        raise InvalidPlanError(f"{what}: {device.size} device pages and {host.size} host pages")
    _check_pages(device, limits, what)
    _check_slots(host, limits.host_pages, f"{what}: a host page")
    if np.unique(device).size != device.size or np.unique(host).size != host.size:
        raise InvalidPlanError(f"{what}: a page twice")
    _check_moved_snapshots(transfer.device_snapshots, transfer.host_snapshots, limits, what)


def _check_moved_snapshots(device: NDArray[np.int32], host: NDArray[np.int32], limits: PlanLimits, what: str) -> None:
    if device.size != host.size:
        raise InvalidPlanError(f"{what}: {device.size} snapshots on the device and {host.size} on the host")
    _check_slots(device, limits.snapshots, f"{what}: a snapshot on the device")
    _check_slots(host, limits.host_snapshots, f"{what}: a snapshot on the host")
    if np.unique(device).size != device.size or np.unique(host).size != host.size:
        raise InvalidPlanError(f"{what}: a snapshot twice")


def _check_slots(slots: NDArray[np.int32], end: int, what: str) -> None:
    if slots.size and (slots.min() < 0 or slots.max() >= end):
        raise InvalidPlanError(f"{what} outside [0, {end})")


def _check_pages(pages: NDArray[np.int32], limits: PlanLimits, what: str) -> None:
    # A wrong page would let one request read or overwrite another's memory.
    if pages.size and (pages.min() < 0 or pages.max() >= limits.device_pages):
        raise InvalidPlanError(f"{what}: a page outside [0, {limits.device_pages})")


def _take_chunks(prefills: tuple[PrefillChunk, ...], rows: RowStates) -> Chunks:
    if not prefills:
        return NO_CHUNKS
    for chunk in prefills:
        _check_chunk(chunk, rows)
    table = np.array([(chunk.row, chunk.start, chunk.length) for chunk in prefills], np.int64)
    indices, starts, lengths = (np.ascontiguousarray(column) for column in table.T)
    if np.unique(indices).size != indices.size:
        raise InvalidPlanError("two chunks of one row in one plan")
    pools = np.array([rows.pooling[row] is not None for row in indices], np.bool_)
    return Chunks(indices, starts, lengths, starts + lengths == rows.lengths[indices], pools, np.zeros_like(lengths))


def _check_chunk(chunk: PrefillChunk, rows: RowStates) -> None:
    row = chunk.row
    _require_open(rows, row, "prefill")
    if rows.phase[row] != RowPhase.PREFILL:
        raise InvalidPlanError(f"prefill of row {row}, whose ids are all computed")
    if chunk.start != rows.computed[row]:
        raise InvalidPlanError(f"prefill of row {row} from {chunk.start}, with {rows.computed[row]} tokens computed")
    if not 1 <= chunk.length <= rows.lengths[row] - chunk.start:
        raise InvalidPlanError(
            f"prefill of row {row}: {chunk.length} tokens from {chunk.start}, with {rows.lengths[row]} ids there"
        )


def _check_size(chunks: Chunks, rows: RowStates, limits: PlanLimits, micro_batch: MicroBatch) -> None:
    decoding = rows.decoding(micro_batch)
    # Besides its own token, a row that has jumped computes those that were forced on it, and others those of its draft.
    lacking = rows.lengths[decoding] - rows.computed[decoding] + rows.draft_lengths[decoding]
    tokens = int(chunks.lengths.sum() + lacking.sum())
    if tokens > max(limits.max_step_tokens, rows.max_rows):
        raise InvalidPlanError(f"a pass of {tokens} tokens, more than the {limits.max_step_tokens} configured")


def _check_wholeness(chunks: Chunks) -> None:
    if not chunks.completes.all() or chunks.starts.any():
        raise InvalidPlanError("a part of a row's ids: an encoder computes all of them in one pass")


def _check_coverage(chunks: Chunks, rows: RowStates, plan: StepPlan) -> None:
    """Check that in every pass of the plan's multi-step decode each participating row has a page to write to."""
    steps, decoding = plan.steps, rows.decoding(plan.micro_batch)
    continuing = chunks.rows[chunks.samples]
    # A decode pass stores the last known id. The very last token of a row is never stored.
    limit = rows.max_total_tokens - 1
    decoded = np.minimum(rows.lengths[decoding] + steps - 1, limit[decoding])
    prefilled = np.minimum(rows.lengths[continuing] + steps - 1, limit[continuing])
    needed = np.concatenate([decoded, prefilled, chunks.starts + chunks.lengths])
    involved = np.concatenate([decoding, continuing, chunks.rows])
    short = needed > rows.page_counts[involved] * rows.page_size
    if short.any():
        i = int(np.argmax(short))
        raise InvalidPlanError(
            f"row {involved[i]} needs room for {needed[i]} tokens in this plan, "
            f"its {rows.page_counts[involved[i]]} pages hold {rows.page_counts[involved[i]] * rows.page_size}"
        )


def _set_drafts(plan: StepPlan, rows: RowStates, limits: PlanLimits) -> None:
    rows.draft_lengths[:] = 0
    if plan.drafts and plan.steps > 1:
        raise InvalidPlanError("drafts in a plan of several steps: how many tokens its first pass gives is not known")
    for draft in plan.drafts:
        row, ids, what = draft.row, draft.token_ids, f"draft of row {draft.row}"
        _require_open(rows, row, "draft")
        if rows.has_states or limits.is_encoder or rows.phase[row] != RowPhase.DECODE:
            raise InvalidPlanError(f"{what}, which cannot verify one now")
        if not ids.size or ids.min() < 0 or ids.max() >= limits.vocabulary_size:
            raise InvalidPlanError(f"{what}: no tokens, or one outside the vocabulary of {limits.vocabulary_size}")
        length = rows.lengths[row] + ids.size
        if rows.draft_lengths[row] or length >= rows.max_total_tokens[row]:
            raise InvalidPlanError(f"{what}: a second one, or no room for a token after it")
        if length > rows.page_counts[row] * rows.page_size:
            raise InvalidPlanError(f"{what}: its {rows.page_counts[row]} pages do not hold {length} tokens")
        rows.set_draft(row, ids)


def _limit_jumps(plan: StepPlan, rows: RowStates) -> None:
    rows.jump_limits[:] = 0
    for jump in plan.jumps:
        row, most = jump.row, jump.max_tokens
        _require_open(rows, row, "jump")
        if most > rows.max_total_tokens[row] or most - 1 > rows.page_counts[row] * rows.page_size:
            raise InvalidPlanError(
                f"jump of row {row} up to {most} tokens: it may have {rows.max_total_tokens[row]} in total, and its "
                f"{rows.page_counts[row]} pages hold {rows.page_counts[row] * rows.page_size}"
            )
        # Each pass after the first one adds a token.
        rows.jump_limits[row] = most - (plan.steps - 1)
