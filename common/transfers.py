"""Copies of KV pages between tiers: step plans request them, step results acknowledge them.

The contract between scheduler and workers, for every direction:

- A transfer belongs to the plan that contains it. It begins after that plan's bookkeeping and runs in parallel with
  the plan's passes; neither these passes nor later plans wait for it.
- It reads pages that the passes of *earlier* plans wrote, and never overwrites a page that they still read. So a
  backup may be planned as soon as the plan that computes its pages has been sent.
- Until it is done, its source pages must not be written, and its target pages neither read nor written: the scheduler
  holds a reference on every page of both tiers and starts no row on pages that are still being loaded.
- Snapshots of recurrent states are copied by the same rules as pages: between device and host, and from peers to the
  device, with them or alone, and with storage by transfers of their own.
- Each rank copies its own part of every page and acknowledges the transfer once, in a result of the same plan or of
  any later one, in any order. A transfer is done when *all* ranks have acknowledged it; its `done_pages` is the
  smallest of theirs.
- While transfers are open and no row computes, the scheduler sends plans without passes; a rank answers such a plan
  when a transfer is done, or after a few milliseconds.
- Ids are never reused in a stream. When the stream ends, open transfers are void and the content of both tiers is lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NewType

import numpy as np

if TYPE_CHECKING:
    from common.types import TokenIds

TransferId = NewType("TransferId", int)


class TransferDirection(Enum):
    """The source and target tier of a transfer: device, host, storage, or the devices of another group, a peer.

    DEVICE_TO_HOST: `device_pages[i]` is copied to `host_pages[i]`. HOST_TO_DEVICE: the reverse.
    HOST_TO_STORAGE: `host_pages[i]` becomes the object `object_keys[i]`. STORAGE_TO_HOST: the reverse; an object that
    is missing, not authentic, of another layout or too slow ends the transfer at that page, as a cache miss.
    FIND_IN_STORAGE: nothing is copied; `done_pages` is the number of `object_keys` up to the last one that exists.
    DROP_FROM_STORAGE: objects that exist are deleted; no pages are involved. PEER_TO_HOST: the peer's page
    `peer.device_pages[i]` is copied to `host_pages[i]`; a page that cannot be read ends the transfer. PEER_TO_DEVICE:
    the same to `device_pages[i]`.
    """

    DEVICE_TO_HOST = "device_to_host"
    HOST_TO_DEVICE = "host_to_device"
    HOST_TO_STORAGE = "host_to_storage"
    STORAGE_TO_HOST = "storage_to_host"
    DROP_FROM_STORAGE = "drop_from_storage"
    FIND_IN_STORAGE = "find_in_storage"
    PEER_TO_HOST = "peer_to_host"
    PEER_TO_DEVICE = "peer_to_device"

    @property
    def uses_storage(self) -> bool:
        """Whether the source or target is the storage tier."""
        return self in (
            TransferDirection.HOST_TO_STORAGE, TransferDirection.STORAGE_TO_HOST, TransferDirection.DROP_FROM_STORAGE,
            TransferDirection.FIND_IN_STORAGE,
        )  # fmt: skip

    @property
    def is_from_peer(self) -> bool:
        """Whether the source is another group."""
        return self in (TransferDirection.PEER_TO_HOST, TransferDirection.PEER_TO_DEVICE)

    @property
    def is_between_tiers(self) -> bool:
        """Whether the rank's own device and host are source and target."""
        return self in (TransferDirection.DEVICE_TO_HOST, TransferDirection.HOST_TO_DEVICE)


@dataclass(frozen=True, slots=True)
class PeerPages:
    """Pages on the devices of another group, whose shards may be others; `workers` are its workers' addresses, by rank.

    The `lease`, 16 random bytes, permits reading them while the other group grants it; it is never logged.
    `device_pages` is [pages] int32, and `device_snapshots`, which are read after them, [snapshots] int32.
    """

    workers: tuple[str, ...]
    lease: bytes = field(repr=False)
    device_pages: TokenIds
    device_snapshots: TokenIds = field(default_factory=lambda: np.empty(0, np.int32))


@dataclass(frozen=True, slots=True)
class Transfer:
    """A sequence of pages to copy, in order.

    Page ids are [pages] int32, distinct within a transfer and empty for a tier that is not involved. `object_keys` are
    opaque: the scheduler derives them from a secret, and each rank derives the names of its own parts from them.
    `cipher_key`, 32 bytes, encrypts the objects' content; it is never logged, and empty where no content is copied.
    Between device and host, slots of snapshots, [snapshots] int32, are copied likewise, beside the pages or alone;
    those of a peer arrive in `device_snapshots`. With storage, `object_keys` are of `host_pages` or of
    `host_snapshots`, never of both.
    """

    transfer_id: TransferId
    direction: TransferDirection
    device_pages: TokenIds = field(default_factory=lambda: np.empty(0, np.int32))
    host_pages: TokenIds = field(default_factory=lambda: np.empty(0, np.int32))
    object_keys: tuple[bytes, ...] = ()
    cipher_key: bytes = field(default=b"", repr=False)
    # Set for transfers from a peer.
    peer: PeerPages | None = None
    device_snapshots: TokenIds = field(default_factory=lambda: np.empty(0, np.int32))
    host_snapshots: TokenIds = field(default_factory=lambda: np.empty(0, np.int32))

    @property
    def arriving(self) -> TokenIds:
        """The pages, [pages] int32, in which those of a peer arrive, on the device or the host."""
        return self.device_pages if self.direction is TransferDirection.PEER_TO_DEVICE else self.host_pages

    @property
    def pages(self) -> int:
        """Number of pages to copy, or of other objects of storage."""
        return max(len(self.host_pages), len(self.device_pages), len(self.object_keys))


@dataclass(frozen=True, slots=True)
class TransferAck:
    """Outcome of a transfer on one rank, or on the whole group once all ranks are combined.

    The first `done_pages` pages are copied; the target's other pages are undefined. For a load from storage or a peer
    they are cache misses; between device and host there are none. `duration_us` is the time in microseconds of the
    copy itself on the slowest rank, without queueing. `done_snapshots` is the number of leading snapshots that have
    arrived from a peer, none unless all pages have; between device and host it is 0.
    """

    transfer_id: TransferId
    done_pages: int
    duration_us: int = 0
    done_snapshots: int = 0
