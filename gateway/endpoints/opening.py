"""The request that an answer answers, in the form in which it is recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import orjson

from common.types import TraceContext
from common.version_skew import known_fields
from gateway.endpoints.shapes import ResponseHead
from gateway.identity.caller import Caller

Json: TypeAlias = dict[str, Any]  # Any: free JSON


@dataclass(frozen=True, slots=True)
class Opening:
    """The decisive parts of a request that is answered."""

    path: str
    body: Json
    caller: Caller
    # Of the response.
    id: str
    # Unix time in seconds.
    created: int
    trace: TraceContext
    # Drawn when the answer is first planned.
    seed: int | None = None
    # Looked up by the endpoint, because it could change before the answer is planned again.
    found: Json = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the opening as JSON.

        Raises:
            TypeError: the body is nested too deeply.
        """
        return orjson.dumps(self)

    def head(self, model: str, fingerprint: str) -> ResponseHead:
        """Return the fields that all parts of the response repeat."""
        return ResponseHead(self.id, self.created, model, fingerprint)

    @classmethod
    def decode(cls, encoded: bytes) -> Opening:
        """Decode the result of `encode`, which may be that of another version."""
        written = known_fields(cls, orjson.loads(encoded))
        caller = Caller.from_json(written["caller"])
        trace = TraceContext(**known_fields(TraceContext, written["trace"]))
        return cls(**{**written, "caller": caller, "trace": trace})
