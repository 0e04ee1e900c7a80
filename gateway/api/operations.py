"""/health, /ready and /metrics: for those who run the server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
from fastapi import APIRouter, Response

if TYPE_CHECKING:
    from gateway.api.context import Context

EXPOSITION_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def create_router(context: Context) -> APIRouter:
    """Return the endpoints; none asks for a key, so keep them from strangers by the network."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        """Say that this process lives and its event loop turns."""
        return Response(b'{"status":"alive"}', media_type="application/json")

    @router.get("/ready")
    async def ready() -> Response:
        """Say whether a request would be served now, or else what is missing."""
        missing = (
            ["this server is shutting down"] if context.generations.draining else await context.readiness.missing()
        )
        answer = {"status": "unavailable" if missing else "ready", "missing": missing}
        return Response(orjson.dumps(answer), 503 if missing else 200, media_type="application/json")

    @router.get("/metrics")
    async def metrics() -> Response:
        """Return all metrics in Prometheus' text format."""
        return Response(context.metrics.exposition(), headers={"content-type": EXPOSITION_TYPE})

    return router
