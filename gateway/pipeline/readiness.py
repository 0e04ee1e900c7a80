"""Checks whether a request would be served now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.rpc.channel import is_serving
from protos.gen.pando.v1 import tokenizer_pb2

if TYPE_CHECKING:
    import grpc

    from gateway.pipeline.client import GrpcPipeline

TOKENIZER_SERVICE = tokenizer_pb2.DESCRIPTOR.services_by_name["Tokenizer"].full_name


class PipelineReadiness:
    """Implements `gateway.pipeline.port.Readiness`.

    The tokenizer's health includes the scheduler's, which includes the workers and the link to the detokenizer.
    """

    def __init__(self, pipeline: GrpcPipeline, tokenizer: grpc.aio.Channel) -> None:
        """Use the connections of `pipeline` and the health that the tokenizer reports."""
        self._pipeline = pipeline
        self._tokenizer = tokenizer

    async def missing(self) -> list[str]:
        """Return the missing services, each in a few words."""
        missing = []
        if not self._pipeline.is_linked:
            missing.append("tokenizer: not connected")
        elif not await is_serving(self._tokenizer, TOKENIZER_SERVICE):
            missing.append("tokenizer: connected, but it cannot serve (is the scheduler or a worker away?)")
        if not self._pipeline.is_subscribed:
            missing.append("detokenizer: not subscribed")
        return missing
