"""Copies of KV pages between the tiers, as step plans ask for them and step results acknowledge them.

The contract between scheduler and workers, for every direction:

- A transfer belongs to the plan that carries it and begins after that plan's bookkeeping, beside its passes. It takes
  as long as it takes: passes never wait for it, and neither do later plans.
- It reads what the passes of *earlier* plans wrote, and it overwrites nothing that they still read. So a backup may be
  planned as soon as the plan that computes its pages has been sent.
- Nobody may write what it reads, nor read or write what it writes, before it is done: the scheduler keeps a reference
  on every page of both tiers until then, and lets no row start on pages that are still being loaded.
- Each rank copies its own part of every page, and acknowledges the transfer once, in any later result of the stream,
  the plan's own or one of a later plan, in any order. A transfer is done when *all* ranks have acknowledged it; its
  outcome is the least of what they managed.
- While transfers are open and no row computes, the scheduler sends plans without passes; a rank answers such a plan
  when a transfer is done, or after a few milliseconds.
- Ids are never used twice in one stream. When the stream ends, open transfers are void and both tiers are lost.
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
    """From which tier to which; the tiers are device, host and storage.

    DEVICE_TO_HOST: `device_pages[i]` is copied to `host_pages[i]`. HOST_TO_DEVICE: the other way.
    HOST_TO_STORAGE: `host_pages[i]` becomes the object `object_keys[i]`. STORAGE_TO_HOST: the other way; an object
    that is missing, not authentic, of another layout or too slow ends the transfer there, as a miss. DROP_FROM_STORAGE:
    the objects are deleted as far as they are there; no page takes part.
    """

    DEVICE_TO_HOST = "device_to_host"
    HOST_TO_DEVICE = "host_to_device"
    HOST_TO_STORAGE = "host_to_storage"
    STORAGE_TO_HOST = "storage_to_host"
    DROP_FROM_STORAGE = "drop_from_storage"

    @property
    def uses_storage(self) -> bool:
        """Whether the storage tier takes part."""
        return self not in (TransferDirection.DEVICE_TO_HOST, TransferDirection.HOST_TO_DEVICE)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A run of pages to copy, in order.

    Page ids are [pages] int32, distinct within a transfer and empty for a tier that takes no part. `object_keys` are
    opaque: the scheduler derives them from a secret, and a worker only adds what tells its rank's part from others'.
    `cipher_key`, [32], is what their content is encrypted with; it is never logged, and a transfer that drops objects
    has none.
    """

    transfer_id: TransferId
    direction: TransferDirection
    device_pages: TokenIds = field(default_factory=lambda: np.empty(0, np.int32))
    host_pages: TokenIds = field(default_factory=lambda: np.empty(0, np.int32))
    object_keys: tuple[bytes, ...] = ()
    cipher_key: bytes = field(default=b"", repr=False)

    @property
    def pages(self) -> int:
        """How many pages are copied, or objects dropped."""
        return max(len(self.host_pages), len(self.device_pages), len(self.object_keys))


@dataclass(frozen=True, slots=True)
class TransferAck:
    """What a rank, or with all ranks together the group, made of a transfer.

    The first `done_pages` pages are copied; the rest is undefined at the target, which for a load from storage is a
    miss and between device and host never happens. `duration_us` is the time of the copy itself on the slowest rank,
    without waiting for its turn.
    """

    transfer_id: TransferId
    done_pages: int
    duration_us: int = 0
