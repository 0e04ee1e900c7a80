"""The messages of `vllm.distributed.kv_events`, a module of vLLM: MessagePack arrays without trailing defaults."""

from __future__ import annotations

from typing import Any

import msgspec

MEDIUM_DEVICE = "GPU"
MEDIUM_HOST = "CPU"


class KVEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Base of all events; on the wire, an event begins with the name of its class."""


class BlockStored(KVEvent):
    """Consecutive blocks of one prefix can be matched on a medium.

    `block_hashes` are 64-bit names, see `FleetKeys.block`. `parent_block_hash` is the name of the block before the
    first; None: the first begins the prompt. `token_ids` is always empty, as it would reveal what users sent.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None


class BlockRemoved(KVEvent):
    """Blocks can no longer be matched on a medium."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(KVEvent):
    """No block can be matched on any medium."""


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events in their order; `ts` is in seconds since 1970."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def encode(batch: KVEventBatch) -> bytes:
    """Return a batch as the payload of a message."""
    return msgspec.msgpack.encode(batch)


def decode(payload: bytes) -> KVEventBatch:
    """Return the batch in a payload, as a reader that knows vLLM's types sees it.

    Raises:
        msgspec.DecodeError: it holds none.
    """
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(KVEventBatch)
    batch: KVEventBatch = decoder.decode(payload)
    return batch
