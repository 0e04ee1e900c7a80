"""The console's routes: its files, which hold no data, and the data of its pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from gateway.console.files import PAGE, load_files
from gateway.identity.caller import Caller

if TYPE_CHECKING:
    from gateway.console.console import Console
    from gateway.endpoints.context import Context

# Scripts and styles come from the gateway only, nothing is sent elsewhere, and text becomes HTML only through
# DOMPurify, whose output is the only one that the browser accepts (Trusted Types).
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        # Pictures that the user attaches are shown from memory.
        "img-src 'self' blob:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    # Checked with the gateway each time, so that an upgrade applies at once.
    "cache-control": "no-cache",
}
# Data about users is not kept by browsers.
PRIVATE = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


def add_routes(router: APIRouter, context: Context, console: Console) -> None:
    """Add the routes."""
    files = load_files()
    is_admin = [Depends(context.admin)]

    def served(request: Request, name: str) -> Response:
        file = files.get(name)
        if file is None:
            raise HTTPException(404)
        headers = {**HEADERS, "etag": file.etag}
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)

    @router.get("/console", include_in_schema=False)
    @router.get("/console/", include_in_schema=False)
    async def page(request: Request) -> Response:
        """Return the page, which is the same for all; its data needs credentials."""
        return served(request, PAGE)

    @router.get("/console/static/{name:path}", include_in_schema=False)
    async def static(request: Request, name: str) -> Response:
        """Return a script, a style sheet or a picture."""
        return served(request, name)

    @router.get("/console/about", include_in_schema=False)
    async def about(caller: Caller = Depends(context.caller)) -> Response:
        """Return the caller's identity and the models."""
        return Response(orjson.dumps(await console.about(caller)), media_type="application/json", headers=PRIVATE)

    @router.get("/console/fleet", include_in_schema=False, dependencies=is_admin)
    async def fleet() -> Response:
        """Return the state of all services, groups and tenants."""
        return Response(orjson.dumps(await console.fleet()), media_type="application/json", headers=PRIVATE)

    @router.get("/console/grove", include_in_schema=False, dependencies=is_admin)
    async def grove(model: str | None = None) -> Response:
        """Stream the prefix caches of a model: a snapshot, then every change."""
        backend = await console.watchable(model)
        return StreamingResponse(console.changes(backend), media_type="text/event-stream", headers=PRIVATE)
