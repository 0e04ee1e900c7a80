"""What is different about requests that embed their prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from common.errors import ContextLengthError, InvalidRequestError
from common.types import CacheMode, Pooling

if TYPE_CHECKING:
    from common.types import ScheduleRequest
    from services.scheduler.core.config import CoreConfig


def with_usable_cache(request: ScheduleRequest) -> ScheduleRequest:
    """Return the request without the cache, where that could not be used.

    The cache has keys and values, but no hidden states, of which a mean needs every one. The last token's is always
    computed: such requests find prefixes and leave theirs, as those do that generate.
    """
    if request.pooling in (None, Pooling.LAST):
        return request
    return replace(request, cache_mode=CacheMode.NONE)


def check_pooling(request: ScheduleRequest, config: CoreConfig) -> None:
    """Raise unless the model can do what is asked: to generate, or to embed in this way.

    Raises:
        InvalidRequestError: an encoder is to generate, or a request to embed asks for what has no meaning.
        ContextLengthError: the prompt is longer than the model, or a pass of an encoder, allows.
    """
    if request.pooling is None:
        if config.is_encoder:
            raise InvalidRequestError("this model is an encoder: it embeds, and generates nothing", param="model")
        return
    if request.n != 1 or request.resume is not None:
        raise InvalidRequestError("a request to embed has one choice, and nothing to resume", param="n")
    if request.pooling is Pooling.FIRST and not config.is_encoder:
        raise InvalidRequestError("in this model the first token sees no other: pool last or mean", param="pooling")
    length, limit = len(request.token_ids), min(config.max_context, config.capacity_tokens)
    if length > limit:
        raise ContextLengthError(f"the prompt has {length} tokens, but at most {limit} fit", param="prompt")
