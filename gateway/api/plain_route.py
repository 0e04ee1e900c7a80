"""Routes of endpoints that need nothing of FastAPI but the route."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi.routing import APIRoute

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from fastapi import Request, Response


class PlainRoute(APIRoute):
    """Calls its endpoint, which takes the request and makes the response, with nothing around it.

    FastAPI would look for the values of parameters that there are not: a seventh of what the gateway does until a
    request is on its way.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the endpoint."""
        handler: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return handler
