"""Adapters, to and from protobuf."""

from __future__ import annotations

from common.adapters import AdapterInfo
from protos.gen.pando.v1 import common_pb2


def adapter_to_wire(adapter: AdapterInfo) -> common_pb2.AdapterInfo:
    """Encode an adapter."""
    return common_pb2.AdapterInfo(
        name=adapter.name,
        source=adapter.source,
        digest=adapter.digest,
        pinned=adapter.pinned,
        rank=adapter.rank,
        bytes=adapter.bytes,
    )


def adapter_from_wire(message: common_pb2.AdapterInfo) -> AdapterInfo:
    """Decode an adapter."""
    return AdapterInfo(message.name, message.source, message.digest, message.pinned, message.rank, message.bytes)
