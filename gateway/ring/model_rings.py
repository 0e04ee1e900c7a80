"""The rings of several models as one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.requests import GenerateRequest
    from common.types import RequestId
    from gateway.ring.port import Listener, Ring


class ModelRings:
    """Implements `gateway.ring.port.Ring`: each request goes to the ring of the model it names."""

    def __init__(self, rings: Mapping[str, Ring]) -> None:
        """Send to `rings`, by the names that the models' tokenizers know."""
        self._rings = rings

    def submit(self, request: GenerateRequest, listener: Listener) -> None:
        """Send `request` round its model's ring; also when it is submitted again."""
        self._rings[request.model].submit(request, listener)

    def abort(self, request_id: RequestId) -> None:
        """Forget the request: ids are unique for all time, and a ring ignores those that it does not have."""
        for ring in self._rings.values():
            ring.abort(request_id)
