"""The served models, each with its own services, and the mapping from model names to them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from common.adapters import SEPARATOR
from common.errors import ConfigurationError, InvalidRequestError, ModelNotFoundError, PandoError, UnavailableError
from common.heads import Task
from common.names import check_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from common.requests import GenerateRequest
    from common.types import RequestId
    from gateway.pipeline.port import Administration, Listener, Model, ModelInfo, Pipeline, Readiness


# What models with a task do, and at which endpoints.
USES = {
    Task.GENERATE: "generates, at /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages and /generate",
    Task.EMBED: "embeds, at /v1/embeddings, /v2/embed, /embed and /pooling",
    Task.SCORE: "scores pairs of texts, at /v1/score and /v1/rerank",
    Task.CLASSIFY: "classifies texts, at /v1/classify, /pooling and /predict",
    Task.TOKEN_CLASSIFY: "classifies tokens, at /pooling",
}
_LACKS = {
    Task.GENERATE: "generates nothing",
    Task.EMBED: "does not embed",
    Task.SCORE: "does not score pairs of texts",
    Task.CLASSIFY: "does not classify texts",
    Task.TOKEN_CLASSIFY: "does not classify tokens",
}
NOTHING_NAMED = "You must provide a 'model' parameter."
SHOWN_CHARACTERS = 256


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


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """The model that a request names, and the name of its adapter; empty: none."""

    card: ModelInfo
    adapter: str = ""

    @property
    def name(self) -> str:
        """The name by which clients request both."""
        return f"{self.card.name}{SEPARATOR}{self.adapter}" if self.adapter else self.card.name


@dataclass(frozen=True, slots=True)
class Backend:
    """One model and its services. Without a name it is the only model, and its name comes from the tokenizer."""

    served: ServedModel
    model: Model
    readiness: Readiness
    administration: Administration
    name: str | None = None
    aliases: tuple[str, ...] = ()


class Backends:
    """All models of this gateway, found by name or alias."""

    def __init__(
        self,
        backends: Sequence[Backend],
        default: str | None = None,
        adapter_aliases: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Serve `backends`; `default` is the model of requests that name none.

        `adapter_aliases` are further names of models with adapters, `model:adapter`.

        Raises:
            ConfigurationError: two models share a name or alias, or the default is not one of them.
        """
        assert backends, "a gateway serves something"
        self.default = default
        self._adapter_aliases = adapter_aliases
        self._backends = tuple(backends)
        self._by_name: dict[str, Backend] = {}
        self._is_named = backends[0].name is not None
        for backend in backends if self._is_named else ():
            for name in (backend.name, *backend.aliases):
                if not name or name in self._by_name:
                    raise ConfigurationError(f"gateway.models: {name!r} is empty, or names two models")
                self._by_name[name] = backend
        if self._is_named and default is not None and default not in self._by_name:
            raise ConfigurationError(f"gateway.default_model: {default!r} is none of {', '.join(self._by_name)}")

    @property
    def all(self) -> tuple[Backend, ...]:
        """All models, in the order of the settings."""
        return self._backends

    async def find(self, name: str | None) -> Backend:
        """Return the model called `name`; without a name, the default or the only model.

        Raises:
            InvalidRequestError: no name is given, and several models are served without a default.
            ModelNotFoundError: no served model has this name.
            UnavailableError: the only model's services have never been reached, so its name is unknown.
        """
        name = name or self.default
        if name is None:
            if len(self._backends) > 1:
                raise InvalidRequestError(f"{NOTHING_NAMED} This server serves {self._names()}.", param="model")
            return self._backends[0]
        if self._is_named:
            found = self._by_name.get(name)
            if found is None:
                raise self._unknown(name, self._names())
            return found
        card = await self._backends[0].served.card()
        if name != card.name:
            raise self._unknown(name, f"'{card.name}'")
        return self._backends[0]

    async def choose(
        self, name: str | None, may_use: Callable[[str], bool], adapter: str | None = None, *, must_name: bool = True
    ) -> ChosenModel:
        """Return the model called `name`, which may have an adapter in it: `model:adapter`.

        An adapter that the caller may not use is refused exactly as a name that does not exist, without asking any
        service.

        Args:
            name: a model's name or alias.
            may_use: whether the caller may use an adapter, by its name.
            adapter: name of an adapter, instead of one in `name`.
            must_name: whether a name is needed unless there is a default.

        Raises:
            InvalidRequestError: no name is given, two adapters are, or one that is too long or has control characters.
            ModelNotFoundError: no served model has this name, or the caller may not use the adapter.
            UnavailableError: the model's services have never been reached.
        """
        base, named = await self._split(name)
        if adapter and named and adapter != named:
            raise InvalidRequestError(f"'model' names the adapter '{named}', 'lora_path' another.", param="lora_path")
        chosen = check_name("lora_path" if adapter else "model", adapter or named or "")
        if chosen and not may_use(chosen):
            raise await self._none_called(name if named else f"{base or self.default or 'model'}{SEPARATOR}{chosen}")
        card = await (self.require_named(base) if must_name else self.require(base))
        return ChosenModel(card, chosen)

    async def _split(self, name: str | None) -> tuple[str | None, str | None]:
        """Return the names of a model and of its adapter, None if `name` has no adapter."""
        if not name:
            return name, None
        known = set(self._by_name) if self._is_named else {(await self._backends[0].served.card()).name}
        base, _, adapter = self._adapter_aliases.get(name, name).rpartition(SEPARATOR)
        return (base, adapter) if name not in known and adapter and base in known else (name, None)

    async def _none_called(self, name: str | None) -> ModelNotFoundError:
        try:
            await self.find(name)
        except ModelNotFoundError as error:
            return error
        raise AssertionError("no model has such a name")

    async def require(self, name: str | None) -> ModelInfo:
        """Return the card of the model that `find` returns.

        Raises:
            UnavailableError: its services have never been reached.
        """
        return await (await self.find(name)).served.card()

    async def require_named(self, name: str | None) -> ModelInfo:
        """Like `require`, for endpoints where the name is mandatory unless there is a default.

        Raises:
            InvalidRequestError: no name is given, and there is no default.
        """
        if not name and self.default is None:
            raise InvalidRequestError(NOTHING_NAMED, param="model")
        return await self.require(name)

    async def known(self) -> list[tuple[Backend, ModelInfo | None]]:
        """Return all models, each with its card, or None if its services have never been reached."""
        cards = await asyncio.gather(*(backend.served.card() for backend in self._backends), return_exceptions=True)
        known = []
        for backend, card in zip(self._backends, cards, strict=True):
            if isinstance(card, BaseException) and not isinstance(card, PandoError):
                raise card
            known.append((backend, None if isinstance(card, BaseException) else card))
        return known

    def _names(self) -> str:
        return ", ".join(f"'{backend.name}'" for backend in self._backends)

    def _unknown(self, name: str, served: str) -> ModelNotFoundError:
        shown = name[:SHOWN_CHARACTERS]
        message = f"The model '{shown}' does not exist here; this server serves {served}."
        return ModelNotFoundError(message, param="model")


def check_generates(card: ModelInfo) -> ModelInfo:
    """Return `card` if its model can generate.

    Raises:
        InvalidRequestError: it cannot.
    """
    return check_task(card, Task.GENERATE)


def check_task(card: ModelInfo, task: Task) -> ModelInfo:
    """Return `card` if its model has a task.

    Raises:
        InvalidRequestError: it has not; the message names the endpoints of those that it has.
    """
    if task not in card.tasks:
        served = "; ".join(USES[own] for own in card.tasks)
        message = f"The model '{card.name}' {_LACKS[task]}; it {served}."
        raise InvalidRequestError(message, param="model")
    return card


class ModelPipelines:
    """Implements `Pipeline`: each request goes to the pipeline of the model it names."""

    def __init__(self, pipelines: Mapping[str, Pipeline]) -> None:
        """`pipelines` maps model names, as the models' tokenizers report them, to pipelines."""
        self._pipelines = pipelines

    def submit(self, request: GenerateRequest, listener: Listener) -> None:
        """Send `request` to its model's pipeline; a resubmission goes to the same one."""
        self._pipelines[request.model].submit(request, listener)

    def abort(self, request_id: RequestId) -> None:
        """Abort the request in every pipeline: ids are globally unique, and a pipeline ignores unknown ids."""
        for pipeline in self._pipelines.values():
            pipeline.abort(request_id)
