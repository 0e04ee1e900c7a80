"""Special handling of requests that generate nothing: their prompt is embedded or classified."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from common.errors import ContextLengthError, InvalidRequestError
from common.types import CacheMode, Pooling

if TYPE_CHECKING:
    from common.types import ScheduleRequest
    from services.scheduler.core.config import CoreConfig


def with_usable_cache(request: ScheduleRequest) -> ScheduleRequest:
    """Return the request with the cache disabled if its pooling cannot use it.

    The cache holds keys and values but no hidden states, and some poolings need the hidden state of every token. The
    last token is always computed, so requests that need no other use the cache like those that generate.
    """
    if request.options.pooling in (None, Pooling.LAST, Pooling.CLASSIFY):
        return request
    return replace(request, options=replace(request.options, cache_mode=CacheMode.NONE))


def check_pooling(request: ScheduleRequest, config: CoreConfig) -> None:
    """Check that the model supports the request: generation, or the requested pooling.

    Raises:
        InvalidRequestError: it does not, or the request has parameters that have no meaning.
        ContextLengthError: the prompt is longer than the model, or a pass of an encoder, allows.
    """
    options = request.options
    if options.pooling is None:
        if config.only_pools or config.is_encoder:
            raise InvalidRequestError("this model generates nothing", param="model")
        return
    if config.head is not None and options.pooling is not config.head:
        message = f"this model's head supports {config.head.value}, not {options.pooling.value}"
        raise InvalidRequestError(message, param="model")
    if config.head is None and not options.pooling.embeds:
        raise InvalidRequestError("this model has no classification head", param="model")
    if options.n != 1 or options.resume is not None:
        raise InvalidRequestError("a request that generates nothing has one choice, and nothing to resume", param="n")
    if options.pooling is Pooling.FIRST and not config.is_encoder:
        raise InvalidRequestError("in this model the first token sees no other: pool last or mean", param="pooling")
    length, limit = len(request.token_ids), min(config.max_context, config.capacity_tokens)
    if length > limit:
        raise ContextLengthError(f"the prompt has {length} tokens, but at most {limit} fit", param="prompt")
