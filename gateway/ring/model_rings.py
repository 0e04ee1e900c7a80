"""Combines the pipelines of several models."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.requests import GenerateRequest
    from common.types import RequestId
    from gateway.ring.port import Listener, Ring


class ModelRings:
    """Implements `gateway.ring.port.Ring`: each request goes to the pipeline of the model it names."""

    def __init__(self, rings: Mapping[str, Ring]) -> None:
        """`rings` maps model names, as the models' tokenizers report them, to pipelines."""
        self._rings = rings

    def submit(self, request: GenerateRequest, listener: Listener) -> None:
        """Send `request` to its model's pipeline; a resubmission goes to the same one."""
        self._rings[request.model].submit(request, listener)

    def abort(self, request_id: RequestId) -> None:
        """Abort the request in every pipeline: ids are globally unique, and a pipeline ignores unknown ids."""
        for ring in self._rings.values():
            ring.abort(request_id)
