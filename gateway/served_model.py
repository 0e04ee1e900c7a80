"""The card of a served model, fetched from the tokenizer and cached while the tokenizer is unavailable."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from common.errors import PandoError, UnavailableError

if TYPE_CHECKING:
    from gateway.pipeline.messages import ModelInfo
    from gateway.pipeline.port import Model


class ServedModel:
    """Caches a served model's card until `expire` is called, because the tokenizer may have changed."""

    def __init__(self, model: Model, name: str | None = None) -> None:
        """The card is fetched from `model` on first use; with a `name`, the card must have that name."""
        self._model = model
        self._name = name
        self._card: ModelInfo | None = None
        self._is_fresh = False
        self._asking = asyncio.Lock()

    def expire(self) -> None:
        """Fetch the card again on the next use; the old one serves as fallback while the tokenizer is unavailable."""
        self._is_fresh = False

    async def card(self) -> ModelInfo:
        """Return the model's card.

        Raises:
            UnavailableError: the tokenizer has never been reached, or serves another model.
        """
        if self._is_fresh and self._card is not None:
            return self._card
        async with self._asking:
            if self._is_fresh and self._card is not None:
                return self._card
            try:
                self._card = self._checked(await self._model.get_model())
            except PandoError:
                if self._card is None:
                    raise
            # Also after a failure: the card expires again when the tokenizer reconnects.
            self._is_fresh = True
            return self._card

    def _checked(self, card: ModelInfo) -> ModelInfo:
        if self._name is not None and card.name != self._name:
            raise UnavailableError(f"the services of the model '{self._name}' serve '{card.name}'")
        return card
