"""A worker without a model that checks what a real one would silently compute wrong.

Its KV memory remembers which token at which position was written to each slot, and every pass verifies the whole
history of each row that it reads. The next token is a hash of all tokens before, so a wrong page, a lost token or a
repeated one changes everything that follows.

Transfers go on until a test completes them, rank by rank and in any order; until the last rank is done, whoever touches
what they write, or writes what they read, is found out.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from common.images import runs_of
from common.prompt_logprobs import PromptLogprobSpan
from common.steps import RowOpen, RowStop, StepPlan, StepResult
from common.transfers import PeerPages, Transfer, TransferAck, TransferDirection, TransferId
from common.types import FinishReason, Pooling, RowSlot
from tests.fakes.simulated_encoder import SimulatedEncoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VOCABULARY = 1000


def next_token(token_ids: list[int], vocabulary: int = VOCABULARY) -> int:
    """The token that follows; a pure function of all before."""
    return zlib.crc32(np.array(token_ids, np.int32).tobytes()) % vocabulary


def is_forced(token: int) -> bool:
    """Whether the grammar of a row that has one leaves no other token than this one in its place."""
    return token % 3 > 0


def expected_output(prompt: list[int], max_total: int, stop_ids: tuple[int, ...] = ()) -> list[int]:
    """What a row must generate, whatever happens to it on the way."""
    ids = list(prompt)
    while len(ids) < max_total:
        ids.append(next_token(ids))
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :]


def embedding_of(token_ids: list[int]) -> bytes:
    """What a prompt's embedding must be, however it was computed."""
    return zlib.crc32(np.array(token_ids, np.int32).tobytes()).to_bytes(4, "little")


def score_of(prompt: list[int], first: int, last: int) -> PromptLogprobSpan:
    """What the log probabilities of prompt[first:last] must be, however they were computed."""
    values = np.array([-next_token(prompt[:position]) for position in range(first, last)], np.float32)
    nothing = np.empty((last - first, 0), np.float32)
    ranks = np.ones(last - first, np.int32)
    return PromptLogprobSpan(
        first, np.array(prompt[first:last], np.int32), values, ranks, nothing.astype(np.int32), nothing, nothing
    )


def start_of(row: _Row) -> int:
    """Where a row stands."""
    return row.computed


@dataclass
class _Row:
    opened: RowOpen
    ids: list[int]
    pages: list[int]
    computed: int
    decoding: bool = False
    stopped: bool = False
    # With recurrent layers: the ids that its state has taken in.
    state: list[int] = field(default_factory=list)
    # With a window pool: its page for each of `pages`, None where it is never read again.
    window_pages: list[int | None] = field(default_factory=list)


# What the slots of one page hold, in order; None where nothing was written.
Content = list[tuple[int, int] | None]


@dataclass
class _Open:
    transfer: Transfer
    # What it reads, as it was when it began.
    content: list[Content]
    ranks: set[int]
    # The same of snapshots.
    states: list[list[int]] = field(default_factory=list)


@dataclass
class SimulatedWorker:
    pages: int
    page_size: int
    host_pages: int = 0
    ranks: int = 1
    # Rows have no pages, and each is computed in one pass.
    is_encoder: bool = False
    # What rows that pool have got, until the pass is reported.
    embeddings: dict[int, bytes] = field(default_factory=dict)
    # Log probabilities of prompts, until the pass is reported.
    scores: list[tuple[RowSlot, PromptLogprobSpan]] = field(default_factory=list)
    rows: dict[int, _Row] = field(default_factory=dict)
    # slot -> (token, position)
    kv: dict[int, tuple[int, int]] = field(default_factory=dict)
    # host page -> content; pages that nothing was copied to are missing.
    host: dict[int, Content] = field(default_factory=dict)
    open: dict[TransferId, _Open] = field(default_factory=dict)
    last_transfer: int = 0
    last_step: int = 0
    # Some layers see so many tokens only and have pages of their own; 0: there are none.
    window: int = 0
    window_pool: int = 0
    window_kv: dict[int, tuple[int, int]] = field(default_factory=dict)
    # With recurrent layers: what each snapshot has taken in; None: there are no such layers.
    snapshots: list[list[int]] | None = None
    # The same on the host; slots that nothing was copied to are missing.
    host_snapshots: dict[int, list[int]] = field(default_factory=dict)
    # How many such slots there are.
    host_snapshot_slots: int = 0
    # Returns the content of a peer's pages, up to the first that cannot be read.
    read_peer: Callable[[PeerPages], list[Content]] = lambda _peer: []
    # The same of its snapshots; they are read once all pages were.
    read_peer_states: Callable[[PeerPages], list[list[int]]] = lambda _peer: []
    # What a pass may compute; None: anything.
    max_step_tokens: int | None = None
    # How long passes take.
    compute_us: int = 1000
    images: SimulatedEncoder = field(default_factory=SimulatedEncoder)
    # Images are runs of so many tokens, each of which is computed in one pass; 0: passes may cut them.
    image_block: int = 0

    def run(self, plan: StepPlan) -> list[StepResult]:
        return list(self.run_lazily(plan))

    def run_lazily(self, plan: StepPlan, is_overtaken: Callable[[], bool] = lambda: False) -> Iterator[StepResult]:
        """Run a plan, each pass when its results are asked for; leave passes out as soon as it is overtaken."""
        assert plan.step_id > self.last_step, "step ids increase"
        assert plan.steps >= 1
        self.last_step = plan.step_id
        self._keep_books(plan)
        for transfer in plan.transfers:
            self._begin(transfer)
        members = range(plan.micro_batch.index, 1 << 20, plan.micro_batch.count)
        for substep in range(plan.steps):
            if plan.can_shorten and is_overtaken():
                yield StepResult(plan.step_id, substep, last=True, abandoned=True)
                return
            sampled = self._prefill(plan) if substep == 0 else {}
            tokens = sum(chunk.length for chunk in plan.prefills) if substep == 0 else 0
            drafts = {int(draft.row): draft.token_ids.tolist() for draft in plan.drafts}
            assert not drafts or plan.steps == 1, "how many tokens drafts give is not known"
            for number, row in self.rows.items():
                if row.decoding and not row.stopped and number not in sampled and number in members:
                    draft = drafts.get(number, [])
                    tokens += len(row.ids) - row.computed + len(draft)
                    sampled[number] = self._verify(row, draft)
            assert drafts.keys() <= sampled.keys(), "a draft for a row that does not decode"
            assert self.max_step_tokens is None or tokens <= self.max_step_tokens, "too much for a pass"
            embeddings, self.embeddings = self.embeddings, {}
            scores, self.scores = self.scores, []
            for one in scores:
                yield StepResult(plan.step_id, substep, last=False, prompt_logprobs=(one,), partial=True)
            stops = [stop for number in sampled if (stop := self._append(number, sampled[number]))]
            self._save(plan)
            accepted, accepted_stops = self._accept(drafts)
            stops += accepted_stops
            forced, forced_stops = self._jump(plan, substep, list(sampled))
            stops += forced_stops
            stops += [RowStop(RowSlot(number), FinishReason.STOP) for number in embeddings]
            yield StepResult(
                step_id=plan.step_id,
                substep=substep,
                last=substep == plan.steps - 1,
                rows=np.array(list(sampled), np.int32),
                token_ids=np.array(list(sampled.values()), np.int32),
                stops=tuple(stops),
                compute_us=self.compute_us,
                embeddings=tuple((RowSlot(number), embedding) for number, embedding in embeddings.items()),
                accepted_rows=np.array([row for row, _ in accepted], np.int32),
                accepted_token_ids=np.array([token for _, token in accepted], np.int32),
                forced_rows=np.array([row for row, _ in forced], np.int32),
                forced_token_ids=np.array([token for _, token in forced], np.int32),
            )

    def _verify(self, row: _Row, draft: list[int]) -> int:
        """Write KV of a row's ids and its draft; return the token after its ids."""
        known = len(row.ids)
        assert not draft or known + len(draft) < row.opened.max_total_tokens, "no room for a token after the draft"
        row.ids += draft
        self._compute(row, row.computed, len(row.ids))
        del row.ids[known:]
        row.computed = known
        return next_token(row.ids)

    def _accept(self, drafts: dict[int, list[int]]) -> tuple[list[tuple[int, int]], list[RowStop]]:
        """Append what is sampled after right tokens of drafts, whose first one has been appended as sampled."""
        accepted, stops = [], []
        for number, draft in drafts.items():
            row = self.rows[number]
            for guess in draft:
                if row.stopped or row.ids[-1] != guess:
                    break
                row.computed = len(row.ids)
                accepted.append((number, next_token(row.ids)))
                if stop := self._append(number, accepted[-1][1]):
                    stops.append(stop)
        return accepted, stops

    def _save(self, plan: StepPlan) -> None:
        for save in plan.saves:
            row = self.rows[save.row]
            assert self.snapshots is not None, "nothing to save"
            assert save.snapshot not in self._moving_snapshots(True), "saves to what is being copied"
            if row.computed == save.tokens:
                self.snapshots[save.snapshot] = row.state.copy()
            elif row.stopped and save.tokens > row.computed:
                # A pass that was launched before the stop was known may have saved something.
                self.snapshots[save.snapshot] = [-1]

    def _jump(self, plan: StepPlan, substep: int, sampled: list[int]) -> tuple[list[tuple[int, int]], list[RowStop]]:
        """Append what is forced on rows, as far as the plan lets them."""
        forced, stops = [], []
        for jump in plan.jumps:
            row = self.rows[jump.row]
            assert row.opened.sampling.may_jump, "nothing is forced on it"
            assert jump.max_tokens <= row.opened.max_total_tokens
            assert jump.max_tokens - 1 <= len(row.pages) * self.page_size
            most = jump.max_tokens - (plan.steps - 1 - substep)
            while jump.row in sampled and not row.stopped and len(row.ids) < most and is_forced(next_token(row.ids)):
                forced.append((int(jump.row), next_token(row.ids)))
                if stop := self._append(jump.row, next_token(row.ids)):
                    stops.append(stop)
        return forced, stops

    def abandon(self, plan: StepPlan, *, under_way: bool) -> StepResult:
        """Abandon a plan's first pass, in which some KV was written already, or before it began."""
        assert plan.step_id > self.last_step, "step ids increase"
        assert plan.can_abandon
        self.last_step = plan.step_id
        self._keep_books(plan if under_way else plan.without_passes())
        for transfer in plan.transfers:
            self._begin(transfer)
        if under_way:
            lengths = {int(chunk.row): chunk.length for chunk in plan.prefills}
            for number, row in self.rows.items():
                for position in range(row.computed, row.computed + lengths.get(number, int(row.decoding))):
                    self.kv[self._slot(row, position)] = (-1, position)
        return StepResult(plan.step_id, 0, last=True, abandoned=True)

    def complete(self, transfer_id: TransferId, rank: int = 0) -> TransferAck:
        """Let one rank be done with a transfer; with the last one, the pages get their new content."""
        opened = self.open[transfer_id]
        opened.ranks.remove(rank)
        peer = opened.transfer.peer
        if peer is not None and not (opened.content or opened.states):
            opened.content = self.read_peer(peer) if len(peer.device_pages) else []
            if len(opened.content) == opened.transfer.pages and len(peer.device_snapshots):
                opened.states = self.read_peer_states(peer)
        if not opened.ranks:
            del self.open[transfer_id]
            self._copy(opened)
        if peer is None:
            return TransferAck(transfer_id, opened.transfer.pages, duration_us=1000)
        return TransferAck(transfer_id, len(opened.content), 1000, len(opened.states))

    def _begin(self, transfer: Transfer) -> None:
        assert transfer.transfer_id > self.last_transfer, "transfer ids are never used twice"
        self.last_transfer = transfer.transfer_id
        device, host = transfer.device_pages.tolist(), transfer.host_pages.tolist()
        if transfer.peer is not None:
            is_device, targets = transfer.direction is TransferDirection.PEER_TO_DEVICE, transfer.arriving.tolist()
            into = transfer.device_snapshots.tolist()
            assert len(transfer.peer.device_pages) == transfer.pages == len(set(targets))
            assert len(transfer.peer.device_snapshots) == len(set(into)) == len(into)
            assert targets or into, "nothing to read"
            assert is_device or not into, "snapshots of peers arrive on the device"
            assert not self._moving_snapshots(True) & set(into), "a race of snapshots"
            assert all(0 <= page < (self.pages if is_device else self.host_pages) for page in targets)
            assert not any(page in self._written(is_device) | self._read(is_device) for page in targets), "a race"
            for slot in into:
                self._set_snapshot(slot, [-2], is_device=True)
            self.open[transfer.transfer_id] = _Open(transfer, [], set(range(self.ranks)))
            for page in targets:
                self._overwrite(page, [None] * self.page_size, is_device)
            return
        assert len(device) == len(host) == len(set(device)) == len(set(host))
        assert len(device) + len(transfer.device_snapshots) > 0
        assert all(0 <= page < self.pages for page in device)
        assert all(0 <= page < self.host_pages for page in host)
        if transfer.direction is TransferDirection.DEVICE_TO_HOST:
            content = [self._device_page(page) for page in device]
            assert not any(page in self._written(True) for page in device), "reads what is being loaded"
            targets, is_device = host, False
        else:
            assert transfer.direction is TransferDirection.HOST_TO_DEVICE
            assert not any(page in self._written(False) for page in host), "reads what is being backed up"
            content = [self.host[page] for page in host]
            targets, is_device = device, True
        assert not any(page in self._written(is_device) | self._read(is_device) for page in targets), "a race"
        states = self._begin_snapshots(transfer, is_load=is_device)
        self.open[transfer.transfer_id] = _Open(transfer, content, set(range(self.ranks)), states)
        for page in targets:
            self._overwrite(page, [None] * self.page_size, is_device)

    def _begin_snapshots(self, transfer: Transfer, *, is_load: bool) -> list[list[int]]:
        """Return the content of the snapshots that a transfer reads; those that it writes are lost."""
        device, host = transfer.device_snapshots.tolist(), transfer.host_snapshots.tolist()
        assert len(device) == len(host) == len(set(device)) == len(set(host))
        if not device:
            return []
        assert self.snapshots is not None, "nothing to copy"
        assert all(0 <= slot < len(self.snapshots) for slot in device)
        assert all(0 <= slot < self.host_snapshot_slots for slot in host)
        sources, targets = (host, device) if is_load else (device, host)
        assert not self._moving_snapshots(not is_load, is_written=True) & set(sources), "reads what is being copied"
        assert not self._moving_snapshots(is_load) & set(targets), "a race of snapshots"
        states = [self.host_snapshots[slot] if is_load else self.snapshots[slot] for slot in sources]
        for slot in targets:
            self._set_snapshot(slot, [-2], is_device=is_load)
        return states

    def _set_snapshot(self, slot: int, state: list[int], *, is_device: bool) -> None:
        if is_device:
            assert self.snapshots is not None
            self.snapshots[slot] = state
        else:
            self.host_snapshots[slot] = state

    def _moving_snapshots(self, is_device: bool, *, is_written: bool = False) -> set[int]:
        """Slots of a tier that open transfers read or write, or with `is_written` only those that they write."""
        slots: set[int] = set()
        for opened in self.open.values():
            transfer = opened.transfer
            if transfer.direction.uses_storage:
                continue
            writes = (transfer.direction is not TransferDirection.DEVICE_TO_HOST) == is_device
            if writes or not is_written:
                slots.update((transfer.device_snapshots if is_device else transfer.host_snapshots).tolist())
        return slots

    def _copy(self, opened: _Open) -> None:
        transfer = opened.transfer
        if transfer.peer is not None:
            is_device = transfer.direction is TransferDirection.PEER_TO_DEVICE
            for page, content in zip(transfer.arriving.tolist(), opened.content, strict=False):
                self._overwrite(page, content, is_device)
            for slot, state in zip(transfer.device_snapshots.tolist(), opened.states, strict=False):
                self._set_snapshot(slot, state, is_device=True)
            return
        is_load = transfer.direction is TransferDirection.HOST_TO_DEVICE
        sources = (transfer.host_pages if is_load else transfer.device_pages).tolist()
        targets = (transfer.device_pages if is_load else transfer.host_pages).tolist()
        now = [self.host[page] if is_load else self._device_page(page) for page in sources]
        assert now == opened.content, "somebody wrote what was being copied"
        for page, content in zip(targets, opened.content, strict=True):
            self._overwrite(page, content, is_load)
        sources = (transfer.host_snapshots if is_load else transfer.device_snapshots).tolist()
        targets = (transfer.device_snapshots if is_load else transfer.host_snapshots).tolist()
        for source, target, state in zip(sources, targets, opened.states, strict=True):
            assert self.snapshots is not None
            assert state == (self.host_snapshots[source] if is_load else self.snapshots[source]), "was overwritten"
            self._set_snapshot(target, state, is_device=is_load)

    def _overwrite(self, page: int, content: Content, is_device: bool) -> None:
        if not is_device:
            self.host[page] = content
            return
        for slot, value in enumerate(content, page * self.page_size):
            self.kv.pop(slot, None)
            if value is not None:
                self.kv[slot] = value

    def _device_page(self, page: int) -> Content:
        return [self.kv.get(slot) for slot in range(page * self.page_size, (page + 1) * self.page_size)]

    def _written(self, is_device: bool) -> set[int]:
        """Pages of a tier that open transfers write."""
        return self._touched(is_device, is_device)

    def _read(self, is_device: bool) -> set[int]:
        """Pages of a tier that open transfers read."""
        return self._touched(is_device, not is_device)

    def _touched(self, is_device: bool, is_load: bool) -> set[int]:
        direction = TransferDirection.HOST_TO_DEVICE if is_load else TransferDirection.DEVICE_TO_HOST
        pages: set[int] = set()
        for opened in self.open.values():
            # What arrives is written to, as by the load or the backup that writes this tier.
            if opened.transfer.peer is not None and is_device == is_load:
                pages.update((opened.transfer.device_pages if is_device else opened.transfer.host_pages).tolist())
            if opened.transfer.direction is direction:
                touched = opened.transfer.device_pages if is_device else opened.transfer.host_pages
                pages.update(touched.tolist())
        return pages

    def _keep_books(self, plan: StepPlan) -> None:
        self.images.begin(plan)
        for closed in plan.closes:
            del self.rows[closed]
        for opened in plan.opens:
            assert opened.row not in self.rows, "slot in use"
            assert 0 <= opened.computed_tokens < len(opened.token_ids)
            pages = opened.pages.tolist()
            row = _Row(opened, opened.token_ids.tolist(), pages, opened.computed_tokens)
            row.window_pages = self._tail(len(pages), opened.window_pages.tolist())
            if self.snapshots is None:
                assert opened.snapshot is None, "there are no snapshots"
            elif opened.computed_tokens:
                assert opened.snapshot is not None, "the state of computed tokens is lost"
                assert opened.snapshot not in self._moving_snapshots(True, is_written=True), (
                    "reads what is being loaded"
                )
                row.state = self.snapshots[opened.snapshot].copy()
                assert row.state == row.ids[: opened.computed_tokens], "another prefix's snapshot"
            self.rows[opened.row] = row
        for replacement in plan.replacements:
            row = self.rows[replacement.row]
            assert replacement.first + len(replacement.pages) <= len(row.pages)
            replaced = slice(replacement.first, replacement.first + len(replacement.pages))
            row.pages[replaced] = replacement.pages.tolist()
            if self.window:
                row.window_pages[replaced] = self._tail(len(replacement.pages), replacement.window_pages.tolist())
        grants = plan.grants
        assert len(grants.rows) == len(grants.pages)
        assert len(grants.window_pages) == (len(grants.pages) if self.window else 0)
        for number, (row, page) in enumerate(zip(grants.rows.tolist(), grants.pages.tolist(), strict=True)):
            self.rows[row].pages.append(page)
            self.rows[row].window_pages.extend(grants.window_pages[number : number + 1].tolist())
        for row in self.rows.values():
            assert len(set(row.pages)) == len(row.pages), "a page twice in one row"
            assert all(0 <= page < self.pages for page in row.pages)

    def _prefill(self, plan: StepPlan) -> dict[int, int]:
        sampled = {}
        self.images.compute([(chunk.row, chunk.start, chunk.start + chunk.length) for chunk in plan.prefills])
        for chunk in plan.prefills:
            row = self.rows[chunk.row]
            assert chunk.length > 0
            assert chunk.start == row.computed, "chunks are contiguous"
            end = chunk.start + chunk.length
            token = self._compute(row, chunk.start, end)
            self._score(chunk.row, row, chunk.start, end)
            if row.opened.pooling is not None:
                self._pool(int(chunk.row), row)
            elif end == len(row.ids):
                row.decoding = True
                sampled[int(chunk.row)] = token
        return sampled

    def _score(self, number: RowSlot, row: _Row, start: int, end: int) -> None:
        wanted = row.opened.prompt_logprobs
        if wanted is None:
            return
        assert wanted.start >= row.opened.computed_tokens, "asks for what is not computed"
        first, last = max(start, wanted.start), min(end, row.opened.prompt_tokens - 1)
        if first < last:
            # In two parts, as a worker may report it.
            span, middle = score_of(row.ids, first + 1, last + 1), (last - first) // 2
            parts = (span.slice(0, middle), span.slice(middle, span.tokens))
            self.scores += [(number, part) for part in parts if part.tokens]

    def _pool(self, number: int, row: _Row) -> None:
        opened = row.opened
        assert opened.pooling in (Pooling.LAST, Pooling.CLASSIFY) or not opened.computed_tokens, (
            "hidden states of a prefix are lost"
        )
        if row.computed == len(row.ids):
            self.embeddings[number] = embedding_of(row.ids)
            row.stopped = True

    def _compute(self, row: _Row, start: int, end: int) -> int:
        """Write KV of [start, end), then read all of [0, end)."""
        assert not row.stopped, "nothing is left to compute"
        if self.is_encoder:
            assert (start, end, row.pages) == (0, len(row.ids), []), "an encoder needs all ids at once, and no pages"
            row.computed = end
            return -1
        assert end <= len(row.pages) * self.page_size, "row runs beyond its pages"
        if self.image_block:
            blocks = runs_of(np.flatnonzero(np.array(row.ids) < 0))
            assert not any(first < border < after for first, after in blocks for border in (start, end)), "a cut image"
        busy, loading = self._read(True), self._written(True)
        for position in range(start, end):
            page = row.pages[position // self.page_size]
            assert page not in busy, "writes what is being backed up"
            assert page not in loading, "writes what is being loaded"
            self.kv[self._slot(row, position)] = (row.ids[position], position)
        for position in range(end):
            slot = self._slot(row, position)
            assert self.kv.get(slot) == (row.ids[position], position), f"wrong KV at position {position}"
        if self.window:
            self._compute_window(row, start, end)
        if self.snapshots is not None:
            assert row.state == row.ids[:start], "a state of other tokens"
            row.state = row.ids[:end]
        row.computed = end
        return next_token(row.ids[:end])

    @staticmethod
    def _tail(count: int, window_pages: list[int]) -> list[int | None]:
        return [None] * (count - len(window_pages)) + window_pages

    def _compute_window(self, row: _Row, start: int, end: int) -> None:
        """Do the same for the layers that see a window only: each query, by itself, reads what it sees."""
        for position in range(start, end):
            slot = self._window_slot(row, position)
            assert 0 <= slot < self.window_pool * self.page_size, "a page outside the window pool"
            self.window_kv[slot] = (row.ids[position], position)
        for position in range(max(start - self.window + 1, 0), end):
            slot = self._window_slot(row, position)
            assert self.window_kv.get(slot) == (row.ids[position], position), f"wrong window KV at {position}"

    def _window_slot(self, row: _Row, position: int) -> int:
        page = row.window_pages[position // self.page_size]
        assert page is not None, f"the row at {start_of(row)} reads position {position}, which it was given no page for"
        return page * self.page_size + position % self.page_size

    def _slot(self, row: _Row, position: int) -> int:
        return row.pages[position // self.page_size] * self.page_size + position % self.page_size

    def _append(self, number: int, token: int) -> RowStop | None:
        row = self.rows[number]
        row.ids.append(token)
        generated = len(row.ids) - row.opened.prompt_tokens
        if token in row.opened.stop_token_ids and generated > row.opened.min_new_tokens:
            row.stopped = True
            return RowStop(RowSlot(number), FinishReason.STOP, token)
        if len(row.ids) >= row.opened.max_total_tokens:
            row.stopped = True
            return RowStop(RowSlot(number), FinishReason.LENGTH)
        return None
