"""A simulated worker with a storage tier, which several of them may share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.transfers import TransferAck, TransferDirection
from tests.fakes.simulated_worker import SimulatedWorker, _Open

if TYPE_CHECKING:
    from common.transfers import Transfer, TransferId
    from tests.fakes.simulated_worker import Content

STORE, FETCH = TransferDirection.HOST_TO_STORAGE, TransferDirection.STORAGE_TO_HOST
DROP = TransferDirection.DROP_FROM_STORAGE

# What each rank has stored under each name, and the key that it is encrypted with.
Objects = dict[tuple[int, bytes], tuple[bytes, "Content"]]


@dataclass
class StoringWorker(SimulatedWorker):
    """`is_down`: storage takes nothing and gives nothing. `looked_up` and `stored` are the keys, in order.

    A transfer with storage takes `storage_us`, as its acknowledgement says.
    """

    objects: Objects = field(default_factory=dict)
    is_down: bool = False
    storage_us: int = 1000
    looked_up: list[bytes] = field(default_factory=list)
    stored: list[bytes] = field(default_factory=list)

    def complete(self, transfer_id: TransferId, rank: int = 0) -> TransferAck:
        transfer = self.open[transfer_id].transfer
        if not transfer.direction.uses_storage:
            return super().complete(transfer_id, rank)
        done = 0 if self.is_down else self._move(transfer, rank)
        opened = self.open[transfer_id]
        opened.ranks.remove(rank)
        if transfer.direction is FETCH:
            # What one rank lacks is of no use to the others.
            del opened.content[done:]
        if not opened.ranks:
            del self.open[transfer_id]
            for page, content in zip(transfer.host_pages.tolist(), opened.content, strict=False):
                if transfer.direction is FETCH:
                    self.host[page] = content
                else:
                    assert self.host[page] == content, "somebody wrote what was being stored"
        return TransferAck(transfer_id, done, duration_us=self.storage_us)

    def _begin(self, transfer: Transfer) -> None:
        if not transfer.direction.uses_storage:
            super()._begin(transfer)
            return
        assert transfer.transfer_id > self.last_transfer
        self.last_transfer = transfer.transfer_id
        pages = transfer.host_pages.tolist()
        assert all(0 <= page < self.host_pages for page in pages)
        assert len(set(pages)) == len(pages)
        assert all(len(key) == 32 for key in transfer.object_keys)
        assert len(transfer.cipher_key) == (0 if transfer.direction is DROP else 32)
        content: list[Content] = []
        if transfer.direction is STORE:
            assert not any(page in self._written(False) for page in pages), "stores what is being written"
            content = [self.host[page] for page in pages]
            self.stored += transfer.object_keys
        elif transfer.direction is FETCH:
            assert not any(page in self._written(False) | self._read(False) for page in pages), "a race"
            content = [[None] * self.page_size for _ in pages]
            self.looked_up += transfer.object_keys
            for page in pages:
                self.host[page] = [None] * self.page_size
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
        elif transfer.direction is STORE:
            for key, page in zip(transfer.object_keys, content, strict=True):
                self.objects[rank, key] = transfer.cipher_key, page
        else:
            for key in transfer.object_keys:
                self.objects.pop((rank, key), None)
        return transfer.pages

    def _written(self, is_device: bool) -> set[int]:
        return super()._written(is_device) | (set() if is_device else self._stored(FETCH))

    def _read(self, is_device: bool) -> set[int]:
        return super()._read(is_device) | (set() if is_device else self._stored(STORE))

    def _stored(self, direction: TransferDirection) -> set[int]:
        transfers = [opened.transfer for opened in self.open.values()]
        return {page for one in transfers if one.direction is direction for page in one.host_pages.tolist()}
