"""A simulated worker with a storage tier, which several of them may share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from common.transfers import TransferAck, TransferDirection
from tests.fakes.simulated_worker import SimulatedWorker, _Open

if TYPE_CHECKING:
    from common.transfers import Transfer, TransferId
    from tests.fakes.simulated_worker import Content

STORE, FETCH = TransferDirection.HOST_TO_STORAGE, TransferDirection.STORAGE_TO_HOST
DROP = TransferDirection.DROP_FROM_STORAGE
FIND = TransferDirection.FIND_IN_STORAGE

# What each rank has stored under each name, and the key that it is encrypted with.
Objects = dict[tuple[int, bytes], tuple[bytes, "Content"]]


@dataclass
class StoringWorker(SimulatedWorker):
    """`is_down`: storage takes nothing and gives nothing; `is_full`: it takes nothing.

    `looked_up` and `stored` are the keys, in order.

    `read_states` counts the snapshots, and `searches` the names of each search.

    A transfer with storage takes `storage_us`, as its acknowledgement says.
    """

    objects: Objects = field(default_factory=dict)
    is_down: bool = False
    is_full: bool = False
    storage_us: int = 1000
    looked_up: list[bytes] = field(default_factory=list)
    stored: list[bytes] = field(default_factory=list)
    stored_states: list[bytes] = field(default_factory=list)
    looked_up_states: list[bytes] = field(default_factory=list)
    searches: list[int] = field(default_factory=list)

    def complete(self, transfer_id: TransferId, rank: int = 0) -> TransferAck:
        transfer = self.open[transfer_id].transfer
        if not transfer.direction.uses_storage:
            return super().complete(transfer_id, rank)
        is_refused = self.is_down or (self.is_full and transfer.direction is STORE)
        done = 0 if is_refused else self._move(transfer, rank)
        opened = self.open[transfer_id]
        opened.ranks.remove(rank)
        if transfer.direction is FETCH:
            # What one rank lacks is of no use to the others.
            del opened.content[done:]
        if not opened.ranks:
            del self.open[transfer_id]
            memory = self._memory(transfer)
            for place, content in zip(_places(transfer), opened.content, strict=False):
                if transfer.direction is FETCH:
                    memory[place] = content
                else:
                    assert memory[place] == content, "somebody wrote what was being stored"
        return TransferAck(transfer_id, done, duration_us=self.storage_us)

    def _begin(self, transfer: Transfer) -> None:
        if not transfer.direction.uses_storage:
            super()._begin(transfer)
            return
        assert transfer.transfer_id > self.last_transfer
        self.last_transfer = transfer.transfer_id
        places, memory = _places(transfer), self._memory(transfer)
        of_states = len(transfer.host_snapshots) > 0
        assert not (of_states and len(transfer.host_pages))
        assert len(places) == (len(transfer.object_keys) if transfer.direction in (STORE, FETCH) else 0)
        assert all(0 <= place < (self.host_snapshot_slots if of_states else self.host_pages) for place in places)
        assert len(set(places)) == len(places)
        assert all(len(key) == 32 for key in transfer.object_keys)
        assert len(transfer.cipher_key) == (32 if transfer.direction in (STORE, FETCH) else 0)
        written = self._moving_snapshots(False, is_written=True) if of_states else self._written(False)
        content: list[Content] = []
        if transfer.direction is STORE:
            assert not written & set(places), "stores what is being written"
            content = [memory[place] for place in places]
            (self.stored_states if of_states else self.stored).extend(transfer.object_keys)
        elif transfer.direction is FETCH:
            read = self._moving_snapshots(False) if of_states else self._read(False)
            assert not (written | read) & set(places), "a race"
            content = [[None] * self.page_size for _ in places]
            (self.looked_up_states if of_states else self.looked_up).extend(transfer.object_keys)
            for place in places:
                memory[place] = [None] * self.page_size
        elif transfer.direction is FIND:
            self.searches.append(len(transfer.object_keys))
        self.open[transfer.transfer_id] = _Open(transfer, content, set(range(self.ranks)))

    def _move(self, transfer: Transfer, rank: int) -> int:
        content = self.open[transfer.transfer_id].content
        if transfer.direction is FETCH:
            for index, key in enumerate(transfer.object_keys):
                cipher_key, found = self.objects.get((rank, key), (None, []))
                if cipher_key != transfer.cipher_key:
                    return index
                if index < len(content):
                    content[index] = found
        elif transfer.direction is FIND:
            there = [index for index, key in enumerate(transfer.object_keys) if (rank, key) in self.objects]
            return max(there, default=-1) + 1
        elif transfer.direction is STORE:
            for key, page in zip(transfer.object_keys, content, strict=True):
                self.objects[rank, key] = transfer.cipher_key, page
        else:
            for key in transfer.object_keys:
                self.objects.pop((rank, key), None)
        return transfer.pages

    def _memory(self, transfer: Transfer) -> dict[int, Any] | list[Any]:  # snapshots have tokens only, pages also None
        return self.host_snapshots if len(transfer.host_snapshots) else self.host

    def _moving_snapshots(self, is_device: bool, *, is_written: bool = False) -> set[int]:
        slots: set[int] = set() if is_device else self._stored(FETCH, of_states=True)
        if not is_device and not is_written:
            slots |= self._stored(STORE, of_states=True)
        return slots | super()._moving_snapshots(is_device, is_written=is_written)

    def _written(self, is_device: bool) -> set[int]:
        return super()._written(is_device) | (set() if is_device else self._stored(FETCH))

    def _read(self, is_device: bool) -> set[int]:
        return super()._read(is_device) | (set() if is_device else self._stored(STORE))

    def _stored(self, direction: TransferDirection, *, of_states: bool = False) -> set[int]:
        transfers = [opened.transfer for opened in self.open.values() if opened.transfer.direction is direction]
        return {place for one in transfers for place in (one.host_snapshots if of_states else one.host_pages).tolist()}


def storing(worker: SimulatedWorker, objects: Objects) -> StoringWorker:
    """Return a worker like another one, which has run no plan yet, with a storage tier."""
    return StoringWorker(
        worker.pages, worker.page_size, worker.host_pages, worker.ranks, objects=objects, last_step=worker.last_step,
        last_transfer=worker.last_transfer, snapshots=worker.snapshots, max_step_tokens=worker.max_step_tokens,
        host_snapshot_slots=worker.host_snapshot_slots,
    )  # fmt: skip


def _places(transfer: Transfer) -> list[int]:
    places: list[int] = (transfer.host_snapshots if len(transfer.host_snapshots) else transfer.host_pages).tolist()
    return places
