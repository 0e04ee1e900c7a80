"""Special handling of requests that embed their prompt."""

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

    The cache holds keys and values but no hidden states, and mean pooling needs the hidden state of every token. The
    last token is always computed, so requests with last-token pooling use the cache like those that generate.
    """
    if request.options.pooling in (None, Pooling.LAST):
        return request
    return replace(request, options=replace(request.options, cache_mode=CacheMode.NONE))


def check_pooling(request: ScheduleRequest, config: CoreConfig) -> None:
    """Check that the model supports the request: generation, or the requested pooling.

    Raises:
        InvalidRequestError: generation on an encoder, or an embedding request with parameters that have no meaning.
        ContextLengthError: the prompt is longer than the model, or a pass of an encoder, allows.
    """
    options = request.options
    if options.pooling is None:
        if config.is_encoder:
            raise InvalidRequestError("this model is an encoder: it embeds, and generates nothing", param="model")
        return
    if options.n != 1 or options.resume is not None:
        raise InvalidRequestError("a request to embed has one choice, and nothing to resume", param="n")
    if options.pooling is Pooling.FIRST and not config.is_encoder:
        raise InvalidRequestError("in this model the first token sees no other: pool last or mean", param="pooling")
    length, limit = len(request.token_ids), min(config.max_context, config.capacity_tokens)
    if length > limit:
        raise ContextLengthError(f"the prompt has {length} tokens, but at most {limit} fit", param="prompt")
