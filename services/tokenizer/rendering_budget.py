"""Limits on the time and size of rendering a template, checked by the rendering thread, which cannot be interrupted."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import jinja2.sandbox

from common.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterable


class RenderingBudget:
    """Time and characters of a rendering; each thread has one rendering at a time."""

    def __init__(self, limit_s: float, max_characters: int) -> None:
        """Allow `limit_s` seconds and `max_characters` per rendering."""
        self._limit_s = limit_s
        self._max_characters = max_characters
        self._local = threading.local()

    def collect(self, pieces: Iterable[str]) -> str:
        """Return the text that a template yields in `pieces`.

        Raises:
            InvalidRequestError: rendering takes too long, or the text becomes too long.
        """
        self._local.deadline = time.monotonic() + self._limit_s
        collected, size = [], 0
        for piece in pieces:
            self.check()
            size += len(piece)
            if size > self._max_characters:
                raise InvalidRequestError("the model's chat template makes too long a text of this", param="messages")
            collected.append(piece)
        return "".join(collected)

    def check(self) -> None:
        """Raise InvalidRequestError if this thread's rendering exceeds its time."""
        # There is no deadline during compilation, which looks up constants.
        if time.monotonic() > getattr(self._local, "deadline", float("inf")):
            message = f"the model's chat template takes longer than {self._limit_s:g} s for this conversation"
            raise InvalidRequestError(message, param="messages")


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Checks a budget at every call and look-up, at least one of which occurs in every long loop."""

    def __init__(self, budget: RenderingBudget, **options: Any) -> None:  # Any: jinja's own options
        super().__init__(**options)
        self._budget = budget

    def call(self, context: Any, function: Any, /, *arguments: Any, **named: Any) -> Any:  # Any: a template's values
        self._budget.check()
        return super().call(context, function, *arguments, **named)

    def getattr(self, value: Any, attribute: str) -> Any:  # Any: a template's values
        self._budget.check()
        return super().getattr(value, attribute)

    def getitem(self, value: Any, argument: Any) -> Any:  # Any: a template's values
        self._budget.check()
        return super().getitem(value, argument)
