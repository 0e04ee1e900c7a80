"""Orders to the storage tier, which travel in step plans, and what became of them, in step results."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    from common.types import TokenIds

StorageOrderId = NewType("StorageOrderId", int)


class StorageOperation(Enum):
    """What to do with each key: see whether it is there, read or write its host page, drop it."""

    FIND = "find"
    FETCH = "fetch"
    STORE = "store"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class StorageOrder:
    """One order to every rank, each of which keeps its own shard of a page under the same key.

    `host_pages` [keys] int32 belong to FETCH and STORE and are empty otherwise; nobody else writes them, nor reads
    those of a FETCH, until all ranks have acknowledged the order.
    """

    order_id: StorageOrderId
    operation: StorageOperation
    keys: tuple[bytes, ...]
    host_pages: TokenIds


@dataclass(frozen=True, slots=True)
class StorageAck:
    """One rank has done with an order; `done` [keys] says for which keys it did what was asked."""

    order_id: StorageOrderId
    done: tuple[bool, ...]
