"""Routes that use only FastAPI's routing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi.routing import APIRoute

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from fastapi import Request, Response


class PlainRoute(APIRoute):
    """Calls its endpoint directly with the request and returns its response.

    FastAPI would look for values of parameters that these endpoints do not have, which takes a seventh of the gateway's
    time until a request is submitted.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return handler
