"""/v1/batches: its body and routes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from fastapi import APIRouter, Depends, Query, Request, Response

from common.errors import InvalidRequestError
from gateway.batches.files import FileOwner
from gateway.batches.lines import ENDPOINTS
from gateway.endpoints.files import json_response, page
from gateway.endpoints.schema import Schema
from gateway.identity.caller import Caller, identify

if TYPE_CHECKING:
    from gateway.endpoints.context import Context

WINDOW: Final = "24h"
WINDOW_S: Final = 86_400
MOST_METADATA: Final = 16
MOST_VALUE: Final = 512
MOST_LISTED: Final = 100


class BatchBody(Schema):
    """A batch to create."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


def add_routes(router: APIRouter, context: Context) -> None:
    """Add the routes."""

    @router.post("/v1/batches")
    async def create_batch(request: Request, body: BatchBody, caller: Caller = Depends(context.caller)) -> Response:
        """Create a batch from an uploaded file."""
        owner = FileOwner.of(caller)
        _check(body)
        async with context.charged(request, identify(caller).subject):
            file = await context.files.get(owner, body.input_file_id)
            if file["purpose"] != "batch":
                raise InvalidRequestError("The file's purpose must be 'batch'.", param="input_file_id")
            if file["expires_at"] < time.time() + WINDOW_S:
                message = "The file expires before the batch's completion window ends; upload it again."
                raise InvalidRequestError(message, param="input_file_id")
            fields = {
                "endpoint": body.endpoint,
                "input_file_id": body.input_file_id,
                "completion_window": WINDOW,
                "metadata": body.metadata,
            }
            return json_response(await context.batches.create(caller, fields, WINDOW_S))

    @router.get("/v1/batches")
    async def list_batches(
        request: Request,
        caller: Caller = Depends(context.caller),
        after: str | None = None,
        limit: int = Query(20, ge=1, le=MOST_LISTED),
    ) -> Response:
        """List the caller's batches, newest first."""
        owner = FileOwner.of(caller)
        async with context.charged(request, identify(caller).subject):
            return json_response(page(await context.batches.all_of(owner), after, limit))

    @router.get("/v1/batches/{batch_id}")
    async def retrieve_batch(request: Request, batch_id: str, caller: Caller = Depends(context.caller)) -> Response:
        """Return a batch's object."""
        owner = FileOwner.of(caller)
        async with context.charged(request, identify(caller).subject):
            return json_response((await context.batches.get(owner, batch_id)).shown)

    @router.post("/v1/batches/{batch_id}/cancel")
    async def cancel_batch(request: Request, batch_id: str, caller: Caller = Depends(context.caller)) -> Response:
        """Cancel a batch; the responses so far are in its output file."""
        owner = FileOwner.of(caller)
        await context.charge_for_ending(request, identify(caller).subject)
        return json_response(await context.batches.cancel(owner, batch_id))


def _check(body: BatchBody) -> None:
    if body.endpoint not in ENDPOINTS:
        raise InvalidRequestError(f"'endpoint' must be one of {', '.join(ENDPOINTS)}.", param="endpoint")
    if body.completion_window != WINDOW:
        raise InvalidRequestError(f"'completion_window' must be {WINDOW!r}.", param="completion_window")
    metadata = body.metadata or {}
    if len(metadata) > MOST_METADATA or any(len(key) + len(value) > MOST_VALUE for key, value in metadata.items()):
        message = f"'metadata' may have {MOST_METADATA} entries of {MOST_VALUE} characters each."
        raise InvalidRequestError(message, param="metadata")
