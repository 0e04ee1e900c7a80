"""Validates requests, without I/O. Gateways check much of this as well, but not every client is a gateway."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from common.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError
from common.patterns import compile_pattern
from common.prompt_limits import check_prompt_logprobs
from common.requests import ChatPrompt
from common.tokenization.parts import NO_TRAITS
from common.types import Pooling

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from common.requests import GenerateRequest, ImageFile, ImageLimits, Prompt
    from common.tokenization.parts import EmbeddingTraits
    from common.types import RequestOptions, Resume, SamplingParams, StopConditions, TokenIds

MAX_CHOICES: Final = 128
MAX_TOP_LOGPROBS: Final = 20
MAX_LOGIT_BIASES: Final = 1024
MAX_LOGPROB_TOKENS: Final = 128
# Limits on the detokenizer's work and memory for one request.
MAX_STOP_STRINGS: Final = 64
MAX_STOP_CHARACTERS: Final = 4096
MAX_STOP_PATTERNS: Final = 4
# Outputs of a head of each token for one prompt: 4 MB.
MAX_TOKEN_OUTPUTS: Final = 1_048_576
FRAMES_PER_SECOND = (0.001, 1000)
# How closely an image is looked at.
DETAILS: Final = ("auto", "low", "high")


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of the served model."""

    model: str
    max_context_tokens: int
    vocabulary_size: int
    embedding: EmbeddingTraits = NO_TRAITS
    # None: the model takes no images.
    images: ImageLimits | None = None


def check_request(request: GenerateRequest, limits: ModelLimits) -> None:
    """Check everything that does not depend on the encoded prompt.

    Raises:
        ModelNotFoundError: the request names another model.
        InvalidRequestError: a field is out of range; `param` names it.
    """
    if request.model != limits.model:
        raise ModelNotFoundError(f"The model `{request.model}` does not exist", param="model")
    if request.images and not isinstance(request.prompt, str):
        raise InvalidRequestError("images beside the prompt need a text with their placeholders", param="prompt")
    images = request.image_files
    check_images(images, limits, param_of(request.prompt))
    if images and request.truncate_prompt_tokens is not None:
        message = "A prompt with images cannot be truncated: an image might be cut in two."
        raise InvalidRequestError(message, param="truncate_prompt_tokens")
    options = request.options
    _check_range(options.n, 1, MAX_CHOICES, "n")
    if options.timeout_ms is not None and options.timeout_ms < 1:
        raise InvalidRequestError("timeout must be at least 1 ms", param="timeout")
    if options.pooling is not None:
        _check_pooling(options, options.pooling, limits)
        return
    if not limits.embedding.generates:
        raise InvalidRequestError(_no_generation(limits), param="model")
    _check_sampling(options.sampling, limits)
    if options.prompt_logprobs is not None:
        _check_range(options.prompt_logprobs.top, 0, MAX_TOP_LOGPROBS, "prompt_logprobs")
        check_ids(options.prompt_logprobs.token_ids, limits, "token_ids_logprob")
    _check_stop(options.stop)
    if options.resume is not None:
        _check_resume(options.resume, options, limits)
    if options.turn is not None:
        check_ids(options.turn.conversation_ids, limits, "session_params")


def check_images(images: Sequence[ImageFile], limits: ModelLimits, param: str) -> None:
    """Check what can be said of images without decoding them.

    Raises:
        InvalidRequestError: the model takes none, or there are too many, or one is empty or too large.
    """
    if not images:
        return
    if limits.images is None:
        raise InvalidRequestError(f"The model `{limits.model}` does not take images.", param=param)
    if len(images) > limits.images.max_images:
        message = f"The request has {len(images)} images; at most {limits.images.max_images} are allowed."
        raise InvalidRequestError(message, param=param)
    for image in images:
        if not (image.data or image.is_bare or (image.frames and all(image.frames))):
            raise InvalidRequestError("An image is empty.", param=param)
        if image.size > limits.images.max_file_bytes:
            message = f"An image has {image.size} bytes; at most {limits.images.max_file_bytes} are allowed."
            raise InvalidRequestError(message, param=param)
        if image.is_video:
            _check_video(image, limits.images, limits.model, param)
        if image.detail not in DETAILS:
            message = f"An image's detail must be one of {', '.join(DETAILS)}, not {image.detail!r}."
            raise InvalidRequestError(message, param=param)


def _check_video(video: ImageFile, limits: ImageLimits, model: str, param: str) -> None:
    if not limits.max_frames:
        raise InvalidRequestError(f"The model `{model}` does not take videos.", param=param)
    if video.is_video_file and not limits.video_files:
        message = (
            f"The model `{model}` takes videos as frames only: the decoder of MP4 and WebM, Pando's extra 'video', is "
            "not installed here."
        )
        raise InvalidRequestError(message, param=param)
    if len(video.frames) > limits.max_frames:
        message = f"A video has {len(video.frames)} frames; at most {limits.max_frames} are allowed."
        raise InvalidRequestError(message, param=param)
    rate = video.frames_per_second
    slowest, fastest = FRAMES_PER_SECOND
    if rate is not None and not slowest <= rate <= fastest:
        message = f"A video's frames per second must be between {slowest} and {fastest}, not {rate}."
        raise InvalidRequestError(message, param=param)


def check_prompt(
    token_ids: TokenIds, request: GenerateRequest, limits: ModelLimits, *, has_images: bool = False
) -> None:
    """Check the encoded prompt; those of requests with images have ids below 0.

    Raises:
        InvalidRequestError: it is empty, or an id is outside the vocabulary.
        ContextLengthError: the prompt and the output do not fit into the context.
    """
    param = param_of(request.prompt)
    if not len(token_ids):
        raise InvalidRequestError("the prompt is empty", param=param)
    low, high = int(token_ids.min()), int(token_ids.max())
    is_low = low < 0 and not has_images
    if is_low or high >= limits.vocabulary_size:
        wrong = low if is_low else high
        message = f"token id {wrong} is outside the vocabulary of {limits.vocabulary_size}"
        raise InvalidRequestError(message, param=param)
    options = request.options
    context, length = allowed_context(options, limits), len(token_ids)
    asked = options.stop.max_tokens
    what = "messages" if isinstance(request.prompt, ChatPrompt) else "prompt"
    whose = "This model's" if context == limits.max_context_tokens else "Your"
    maximum = f"{whose} maximum context length is {context} tokens."
    # Generation needs room for at least one more token, pooling does not.
    if length + (options.pooling is None) > context:
        message = f"{maximum} However, your {what} resulted in {length} tokens. Please reduce the length of the {what}."
        raise ContextLengthError(message, param=param)
    if options.pooling is None and asked is not None and length + asked > context:
        message = (
            f"{maximum} However, you requested {length + asked} tokens ({length} in the {what}, {asked} in the "
            f"completion). Please reduce the length of the {what} or completion."
        )
        raise ContextLengthError(message, param=param)

    head = limits.embedding.head
    if options.pooling is Pooling.TOKEN_CLASSIFY and head and length * len(head.labels) > MAX_TOKEN_OUTPUTS:
        message = (
            f"{length} tokens with {len(head.labels)} labels are more than {MAX_TOKEN_OUTPUTS} values; divide the text"
        )
        raise ContextLengthError(message, param=param)
    # A turn is only the end of its prompt, which the scheduler knows and checks.
    if options.prompt_logprobs is not None and options.turn is None:
        check_prompt_logprobs(options.prompt_logprobs, length)


def allowed_context(options: RequestOptions, limits: ModelLimits) -> int:
    """Return the maximum number of tokens of prompt and output together."""
    own = options.max_context_tokens
    return limits.max_context_tokens if own is None else min(own, limits.max_context_tokens)


def _check_pooling(options: RequestOptions, pooling: Pooling, limits: ModelLimits) -> None:
    head = limits.embedding.head
    if pooling is not (head and head.pooling) and not (head is None and pooling.embeds):
        own = "it embeds" if head is None else f"its head supports {head.pooling.value}"
        message = f"The model `{limits.model}` does not support {pooling.value}: {own}."
        raise InvalidRequestError(message, param="model")
    if pooling is Pooling.FIRST and not limits.embedding.is_encoder:
        message = "pooling 'cls' is for encoders: in this model the first token sees no other; use 'last' or 'mean'"
        raise InvalidRequestError(message, param="pooling")
    if options.n != 1 or options.resume is not None:
        raise InvalidRequestError("a request that generates nothing has one choice, and nothing to resume", param="n")


def _no_generation(limits: ModelLimits) -> str:
    traits = limits.embedding
    if traits.head is not None:
        return f"The model `{limits.model}` is a classifier and generates nothing."
    kind = "is an encoder" if traits.is_encoder else "is made for embeddings"
    uses = "it embeds texts (/v1/embeddings, /v1/score, /v1/rerank) and generates none"
    return f"The model `{limits.model}` {kind}: {uses}."


def _check_sampling(sampling: SamplingParams, limits: ModelLimits) -> None:
    _check_range(sampling.temperature, 0, 2, "temperature")
    _check_range(sampling.top_p, 0, 1, "top_p")
    _check_range(sampling.min_p, 0, 1, "min_p")
    _check_range(sampling.presence_penalty, -2, 2, "presence_penalty")
    _check_range(sampling.frequency_penalty, -2, 2, "frequency_penalty")
    if sampling.top_k is not None:
        _check_range(sampling.top_k, 1, None, "top_k")
    if not (sampling.repetition_penalty > 0 and math.isfinite(sampling.repetition_penalty)):
        raise InvalidRequestError("repetition_penalty must be greater than 0", param="repetition_penalty")
    if sampling.top_logprobs is not None:
        _check_range(sampling.top_logprobs, 0, MAX_TOP_LOGPROBS, "top_logprobs")
    _check_range(len(sampling.logit_bias), 0, MAX_LOGIT_BIASES, "logit_bias", "the number of entries")
    check_ids(sampling.logit_bias, limits, "logit_bias")
    check_ids(sampling.logprob_token_ids, limits, "token_ids_logprob")
    _check_range(len(sampling.logprob_token_ids), 0, MAX_LOGPROB_TOKENS, "token_ids_logprob", "the number of ids")
    check_ids(sampling.allowed_token_ids, limits, "allowed_token_ids")
    for bias in sampling.logit_bias.values():
        _check_range(bias, -100, 100, "logit_bias", "each value")


def _check_stop(stop: StopConditions) -> None:
    # Stop ids may be outside of the vocabulary; these never match.
    if stop.max_tokens is not None:
        _check_range(stop.max_tokens, 0, None, "max_tokens")
        _check_range(stop.min_tokens, 0, stop.max_tokens, "min_tokens")
    if not all(stop.stop_strings):
        raise InvalidRequestError("a stop text must not be empty", param="stop")
    _check_range(len(stop.stop_strings), 0, MAX_STOP_STRINGS, "stop", "the number of texts")
    _check_range(sum(map(len, stop.stop_strings)), 0, MAX_STOP_CHARACTERS, "stop", "the number of characters")
    _check_range(len(stop.stop_patterns), 0, MAX_STOP_PATTERNS, "stop_regex", "the number of expressions")
    for pattern in stop.stop_patterns:
        compile_pattern(pattern)


def _check_resume(resume: Resume, options: RequestOptions, limits: ModelLimits) -> None:
    if options.n != 1:
        raise InvalidRequestError("only a request for one choice can be resumed", param="n")
    check_ids(resume.token_ids, limits, "resume")
    longest = options.stop.max_tokens
    if longest is not None and len(resume.token_ids) >= longest:
        message = f"resume: {len(resume.token_ids)} tokens were generated already, and max_tokens is {longest}"
        raise InvalidRequestError(message, param="resume")


def check_ids(token_ids: Iterable[int], limits: ModelLimits, param: str) -> None:
    """Check the ids of the field `param`.

    Raises:
        InvalidRequestError: one is outside the vocabulary.
    """
    for token_id in token_ids:
        if not 0 <= token_id < limits.vocabulary_size:
            message = f"{param}: token id {token_id} is outside the vocabulary of {limits.vocabulary_size}"
            raise InvalidRequestError(message, param=param)


def check_count(count: int, limits: ModelLimits, param: str) -> None:
    """Check the number of ids in the field `param`.

    Raises:
        InvalidRequestError: it exceeds the model's context.
    """
    if count > limits.max_context_tokens:
        message = (
            f"{param} has {count} token ids; at most {limits.max_context_tokens}, the model's context, are decoded"
        )
        raise InvalidRequestError(message, param=param)


def _check_range(value: float, low: float, high: float | None, param: str, what: str | None = None) -> None:
    """Raise InvalidRequestError unless low <= value <= high, also for NaN."""
    if low <= value and (high is None or value <= high):
        return
    wanted = f"at least {low}" if high is None else f"between {low} and {high}"
    # `:g`, because values cross the wire as 32-bit floats: 2.1 arrives as 2.0999999.
    name = param if what is None else f"{param}: {what}"
    raise InvalidRequestError(f"{name} must be {wanted}, got {value:g}", param=param)


def param_of(prompt: Prompt) -> str:
    """Return the name of a prompt's field in errors."""
    return "messages" if isinstance(prompt, ChatPrompt) else "prompt"
