"""/open_session and /close_session."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import orjson
from fastapi import APIRouter, Request, Response

from common.errors import InvalidRequestError
from common.names import check_name
from common.types import SessionWish
from gateway.endpoints.native.schema import CloseSessionBody, OpenSessionBody
from gateway.endpoints.openapi import documented
from gateway.endpoints.plain_route import PlainRoute
from gateway.endpoints.schema import parse
from gateway.identity.caller import identify

if TYPE_CHECKING:
    from gateway.endpoints.context import Context


def create_router(context: Context) -> APIRouter:
    """Return the routes."""
    router = APIRouter(route_class=PlainRoute)

    @router.post("/open_session", openapi_extra=documented(OpenSessionBody))
    async def open_session(request: Request) -> Response:
        """Open a session, which keeps its latest turn in the cache; return its id."""
        caller = await context.caller(request)
        body = parse(OpenSessionBody, await context.body(request))
        session = check_name("session_id", body.session_id) if body.session_id else f"sess-{secrets.token_hex(16)}"
        requester = identify(caller, body.user_names, body.cache_salt)
        backend = await context.models.find(body.model)
        wish = SessionWish(
            view=requester.view,
            session=session,
            capacity_tokens=body.capacity_of_str_len,
            timeout_ms=None if body.timeout is None else max(round(body.timeout * 1000), 1),
        )
        async with context.charged(request, requester.subject):
            grant = await backend.model.open_session(wish)
        headers = {
            "x-session-capacity-tokens": str(grant.capacity_tokens),
            "x-session-timeout-s": f"{grant.timeout_ms / 1000:g}",
        }
        return Response(orjson.dumps(session), media_type="application/json", headers=headers)

    @router.post("/close_session", openapi_extra=documented(CloseSessionBody))
    async def close_session(request: Request) -> Response:
        """Close one of the caller's sessions."""
        caller = await context.caller(request)
        body = parse(CloseSessionBody, await context.body(request))
        session = check_name("session_id", body.session_id)
        requester = identify(caller, body.user_names, body.cache_salt)
        backend = await context.models.find(body.model)
        await context.charge_for_ending(request, requester.subject)
        if not await backend.model.close_session(requester.view, session):
            message = f"You have no open session '{session}' with this model; it may have timed out."
            raise InvalidRequestError(message, param="session_id")
        return Response(b"{}", media_type="application/json")

    return router
