"""What is served, asked of the tokenizer once and kept while that is away."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from common.errors import ModelNotFoundError, PandoError

if TYPE_CHECKING:
    from gateway.ring.messages import ModelInfo
    from gateway.ring.port import Model


class ServedModel:
    """The served model's card. `expire` makes the next question go to the tokenizer, which may have changed."""

    def __init__(self, model: Model) -> None:
        """Ask `model` when the card is first needed."""
        self._model = model
        self._card: ModelInfo | None = None
        self._is_fresh = False
        self._asking = asyncio.Lock()

    def expire(self) -> None:
        """Do not trust the card any more; keep it in case that nobody can be asked."""
        self._is_fresh = False

    async def card(self) -> ModelInfo:
        """Return what is served.

        Raises:
            UnavailableError: the tokenizer has never been reached.
        """
        if self._is_fresh and self._card is not None:
            return self._card
        async with self._asking:
            if self._is_fresh and self._card is not None:
                return self._card
            try:
                self._card = await self._model.get_model()
            except PandoError:
                if self._card is None:
                    raise
            # Also after a failure: when the tokenizer is back, the card expires again.
            self._is_fresh = True
            return self._card

    async def require(self, name: str | None) -> ModelInfo:
        """Return what is served; `name` must be its name, if given.

        Raises:
            ModelNotFoundError: another model is asked for.
            UnavailableError: the tokenizer has never been reached.
        """
        card = await self.card()
        if name is not None and name != card.name:
            message = f"The model '{name[:256]}' does not exist here; this server serves '{card.name}'."
            raise ModelNotFoundError(message, param="model")
        return card
