"""What is served, asked of the tokenizer once and kept while that is away."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from common.errors import PandoError, UnavailableError

if TYPE_CHECKING:
    from gateway.ring.messages import ModelInfo
    from gateway.ring.port import Model


class ServedModel:
    """A served model's card. `expire` makes the next question go to the tokenizer, which may have changed."""

    def __init__(self, model: Model, name: str | None = None) -> None:
        """Ask `model` when the card is first needed; with a `name`, it must be called so."""
        self._model = model
        self._name = name
        self._card: ModelInfo | None = None
        self._is_fresh = False
        self._asking = asyncio.Lock()

    def expire(self) -> None:
        """Do not trust the card any more; keep it in case that nobody can be asked."""
        self._is_fresh = False

    async def card(self) -> ModelInfo:
        """Return what is served.

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
            # Also after a failure: when the tokenizer is back, the card expires again.
            self._is_fresh = True
            return self._card

    def _checked(self, card: ModelInfo) -> ModelInfo:
        if self._name is not None and card.name != self._name:
            raise UnavailableError(f"the services of the model '{self._name}' serve '{card.name}'")
        return card
