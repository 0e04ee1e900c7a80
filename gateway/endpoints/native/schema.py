"""The bodies of /generate, /open_session and /close_session, compatible with SGLang's clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, ModelWrapValidatorHandler, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from common.errors import InvalidRequestError
from common.names import check_name
from common.prompt_logprobs import PromptLogprobs
from common.requests import TokenPrompt
from common.types import (
    CacheMode,
    SessionTurn,
)
from gateway.endpoints.completions.schema import CompletionBody, parse_prompts
from gateway.endpoints.generation_fields import INT32_MAX, MAX_TOP_LOGPROBS, Biases, StopPatterns, StopTexts, TokenId
from gateway.endpoints.schema import LEAVE_OUT, Refusal, Schema, is_empty, parse
from gateway.images.references import ImageReference, from_base64, from_url, from_video

DEFAULT_NEW_TOKENS = 128
MAX_LOGPROB_TOKEN_IDS = 128
# Additional data that SGLang can return.
NATIVE_RETURNED = (
    "return_entropy",
    "return_flat_raw_top_logprobs",
    "return_flat_raw_top_logprobs_b64",
    "return_indexer_topk",
    "return_prompt_token_ids",
    "return_routed_experts",
    "return_sampling_mask",
)


class UserFields(Schema):
    """The model, and the fields that name a user."""

    model: str | None = None
    user_id: str | None = None
    user: str | None = None
    cache_salt: str | None = None

    @property
    def user_names(self) -> tuple[tuple[str, str | None], ...]:
        """The fields that may name a user, in order of precedence."""
        return (("user_id", self.user_id), ("user", self.user))


class OpenSessionBody(UserFields):
    """A session to open; the capacity counts tokens here, of which a text has no more than characters."""

    capacity_of_str_len: int | None = Field(None, ge=1, le=INT32_MAX)
    session_id: str | None = None
    timeout: float | None = Field(None, gt=0, le=INT32_MAX / 1000)


class CloseSessionBody(UserFields):
    """A session to close."""

    session_id: str


class SessionParams(Schema):
    """The object `session_params`: the session of a request, and the earlier turn that it continues."""

    id: str
    rid: str | None = None
    offset: int | None = Field(None, ge=-INT32_MAX, le=INT32_MAX)
    replace: bool | None = None
    drop_previous_output: bool | None = None

    def turn(self, name: str) -> SessionTurn:
        """Return the turn called `name`, which continues the session."""
        return SessionTurn(
            name=name,
            after=self.rid or None,
            offset=self.offset or None,
            drop_previous_output=bool(self.drop_previous_output),
            replace=bool(self.replace),
        )


class NativeSampling(Schema):
    """The object `sampling_params`."""

    unsupported: ClassVar[tuple[Refusal, ...]] = tuple(
        Refusal(name, is_empty, LEAVE_OUT) for name in ("custom_params", "beam_width")
    )

    max_new_tokens: int | None = Field(None, ge=0, le=INT32_MAX)
    min_new_tokens: int | None = Field(None, ge=0, le=INT32_MAX)
    stop: StopTexts = None
    stop_token_ids: list[int] | None = None
    stop_regex: StopPatterns = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Biases = None
    sampling_seed: int | None = None
    n: int | None = None
    json_schema: str | bool | dict[str, Any] | None = None  # Any: free JSON
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None


def _ids(value: object) -> object:
    if value is None:
        return None
    prompts = parse_prompts(value)
    if not isinstance(prompts, list) or not all(isinstance(prompt, TokenPrompt) for prompt in prompts):
        raise PydanticCustomError("input_ids", "should be a list of token ids, or a list of such lists")
    return prompts


def _texts(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _is_given(value: object) -> bool:
    return value is not None and not is_empty(value)


def _media(
    given: object, param: str, read: Callable[[object, str], ImageReference], prompts: int | None
) -> list[list[ImageReference]]:
    """Return the images or videos of each text; `prompts`: how many texts a list has, None: there is one.

    Raises:
        InvalidRequestError: one is malformed, or there are not as many lists of them as texts.
    """
    if not _is_given(given):
        return [[] for _ in range(prompts or 1)]
    if prompts is None:
        return [_of_text(given, param, read)]
    if not isinstance(given, list) or len(given) != prompts:
        message = f"'{param}' should be a list with those of each of the {prompts} texts."
        raise InvalidRequestError(message, param=param)
    return [_of_text(each, f"{param}[{number}]", read) for number, each in enumerate(given)]


def _of_text(given: object, param: str, read: Callable[[object, str], ImageReference]) -> list[ImageReference]:
    if given is None:
        return []
    if not isinstance(given, list):
        return [read(given, param)]
    return [read(each, f"{param}[{number}]") for number, each in enumerate(given)]


def _video(given: object, param: str) -> ImageReference:
    """Return a video: a data URL with its file or its frames, a URL, plain base64, or an object with one as `url`."""
    fields = given if isinstance(given, dict) else {"url": given}
    return from_video(fields.get("url"), fields.get("fps"), fields.get("detail"), param)


def _image(given: object, param: str) -> ImageReference:
    """Return an image: a data URL, a URL, or plain base64."""
    if isinstance(given, dict) and "url" in given:
        return from_url(given["url"], given.get("detail"), param)
    if isinstance(given, str) and given[:8].lower().startswith(("data:", "http://", "https://")):
        return from_url(given, None, param)
    return from_base64(given, param)


class GenerateBody(Schema):
    """A request to complete one or several prompts."""

    takes_images: ClassVar[bool] = True

    unsupported: ClassVar[tuple[Refusal, ...]] = (
        Refusal("input_embeds", is_empty, "use 'text' or 'input_ids'"),
        Refusal("audio_data", is_empty, LEAVE_OUT),
        Refusal("custom_logit_processor", is_empty, LEAVE_OUT),
        Refusal("return_hidden_states", is_empty, LEAVE_OUT),
        Refusal("positional_embed_overrides", is_empty, LEAVE_OUT),
        Refusal("max_thinking_tokens", is_empty, LEAVE_OUT),
        Refusal("multi_item_delimiter_indices", is_empty, LEAVE_OUT),
        *(Refusal(name, is_empty, LEAVE_OUT) for name in NATIVE_RETURNED),
    )

    text: Annotated[list[str] | None, Field(min_length=1), BeforeValidator(_texts)] = None
    input_ids: Annotated[list[TokenPrompt] | None, BeforeValidator(_ids)] = Field(None, strict=False)
    # Of one text: an image or several. Of a list of texts: as many of these, of which null is none.
    image_data: Any = None  # Any: the client's JSON
    video_data: Any = None  # Any: the same
    sampling_params: NativeSampling | None = None
    rid: str | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    top_logprobs_num: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    logprob_start_len: int | None = Field(None, ge=-1, le=INT32_MAX)
    token_ids_logprob: list[TokenId] | None = Field(None, max_length=MAX_LOGPROB_TOKEN_IDS)
    model: str | None = None
    lora_path: str | None = None
    user_id: str | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    cache_mode: CacheMode | None = Field(None, strict=False)
    session_params: SessionParams | None = None
    session_id: str | None = None

    _is_batch: bool = PrivateAttr(default=False)

    @model_validator(mode="wrap")
    @classmethod
    def _note_form(cls, body: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:  # Any: the client's JSON
        valid = handler(body)
        texts, ids = body.get("text"), body.get("input_ids")
        valid._is_batch = isinstance(texts, list) or (isinstance(ids, list) and bool(ids) and isinstance(ids[0], list))
        return valid

    @classmethod
    def refuse_unsupported(cls, body: Mapping[str, object]) -> None:
        super().refuse_unsupported(body)
        sampling = body.get("sampling_params")
        NativeSampling.refuse_unsupported(sampling if isinstance(sampling, dict) else {})

    @property
    def is_batch(self) -> bool:
        """Whether the client sent a list of prompts."""
        return self._is_batch

    @model_validator(mode="after")
    def _has_one_prompt(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            raise PydanticCustomError("prompt", "exactly one of text and input_ids should be given")
        for name, kind in (("image_data", "an image"), ("video_data", "a video")):
            if _is_given(getattr(self, name)) and self.text is None:
                message = f"'{name}' needs 'text', which has the model's own placeholder of {kind} for each."
                raise InvalidRequestError(message, param=name)
        if self.session_params is not None and self.session_id:
            raise InvalidRequestError("'session_id' cannot be given beside 'session_params'.", param="session_id")
        return self

    @property
    def has_images(self) -> bool:
        """Whether there are images or videos."""
        return _is_given(self.image_data) or _is_given(self.video_data)

    def image_references(self) -> list[list[ImageReference]]:
        """Return the images of each text, and its videos after them.

        Raises:
            InvalidRequestError: one is malformed, or there are not as many lists of them as texts.
        """
        prompts = len(self.text or self.input_ids or ()) if self.is_batch else None
        images = _media(self.image_data, "image_data", _image, prompts)
        videos = _media(self.video_data, "video_data", _video, prompts)
        return [of_images + of_videos for of_images, of_videos in zip(images, videos, strict=True)]

    @property
    def session(self) -> str | None:
        """The conversation of the request; None if it has none.

        Raises:
            InvalidRequestError: it is not a valid name.
        """
        if self.session_params is not None:
            return check_name("session_params.id", self.session_params.id)
        return check_name("session_id", self.session_id) if self.session_id else None

    @property
    def user_names(self) -> tuple[tuple[str, str | None], ...]:
        """The fields that may name a user, in order of precedence."""
        return (("user_id", self.user_id), ("user", self.user))

    @property
    def logprob_token_ids(self) -> tuple[int, ...]:
        """Token ids whose log probabilities are requested at every position."""
        return tuple(self.token_ids_logprob or ()) if self.return_logprob else ()

    @property
    def prompt_logprobs_wanted(self) -> PromptLogprobs | None:
        """The requested log probabilities of prompts; None: none."""
        if not self.return_logprob or self.logprob_start_len in (None, -1):
            return None
        return PromptLogprobs(self.logprob_start_len, self.top_logprobs_num or 0, self.logprob_token_ids)

    def to_completion(self, model: str) -> CompletionBody:
        """Return the equivalent completion request.

        Raises:
            InvalidRequestError: a value is out of range.
        """
        given = self.sampling_params or NativeSampling()
        fields = given.model_dump(exclude={"max_new_tokens", "min_new_tokens", "sampling_seed"}, exclude_none=True)
        prompts: list[Any] = list(self.text or []) or [list(prompt.ids) for prompt in self.input_ids or []]
        fields |= {
            "model": model,
            "prompt": prompts,
            "max_tokens": DEFAULT_NEW_TOKENS if given.max_new_tokens is None else given.max_new_tokens,
            "min_tokens": given.min_new_tokens,
            "seed": given.sampling_seed,
            "stream": self.stream,
            "logprobs": (self.top_logprobs_num or 0) if self.return_logprob else None,
            "priority": self.priority,
            "cache_mode": self.cache_mode,
            "session_id": self.session,
        }
        return parse(CompletionBody, fields)
