"""The requests that gateways send to tokenizers, free of protobuf types."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from common.types import RequestId, RequestOptions, View


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A picture for the model, as it was sent: JPEG, PNG, WebP or GIF; or a video.

    A video is a file (`data`, MP4 or WebM, and `is_video_file`), or its frames, each a file as of a picture. One of
    `data` and `frames` is empty.
    """

    data: bytes
    # low, high or auto.
    detail: str = "auto"
    frames: tuple[bytes, ...] = ()
    # Of a video: how many of its frames are a second, or are taken from a second of a file; None: as many as the
    # model's processor samples.
    frames_per_second: float | None = None
    is_video_file: bool = False
    # Its name among recent images, see `common.recent_images.key_of`; empty: none is known.
    key: bytes = field(default=b"", compare=False)

    @property
    def is_bare(self) -> bool:
        """Whether there is nothing but its key: the receiver has to keep the image."""
        return bool(self.key) and not (self.data or self.frames)

    def bare(self) -> ImageFile:
        """Return the image without its file, if it has a key; frames stay, as they show that it is a video."""
        return replace(self, data=b"") if self.key else self

    @property
    def is_video(self) -> bool:
        """Whether it is a video, in a file or as frames."""
        return self.is_video_file or bool(self.frames)

    @property
    def size(self) -> int:
        """Its bytes."""
        return len(self.data) + sum(map(len, self.frames))


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """The images that a request may have."""

    max_images: int
    # Of each image, as it was sent.
    max_file_bytes: int
    # Width times height of each image, and of each frame of a video.
    max_pixels: int
    # Of a video, which counts as an image; 0: the model takes no videos.
    max_frames: int = 0
    # Whether a video may be a file (MP4, WebM).
    video_files: bool = False


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation; the chat template does not receive parts that are None."""

    role: str
    content: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    # A JSON array of OpenAI tool call objects.
    tool_calls_json: str | None = None
    reasoning_content: str | None = None
    # Content with images, in its order; `content` is None then.
    parts: tuple[str | ImageFile, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation for the model's chat template. JSON fields are parsed when it is rendered, off the event loop."""

    messages: tuple[ChatMessage, ...]
    # One OpenAI tool object each.
    tools_json: tuple[str, ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    # A JSON object with extra variables for the template.
    template_variables_json: str | None = None
    # Text with which the answer begins.
    assistant_prefix: str | None = None

    @property
    def images(self) -> tuple[ImageFile, ...]:
        """The images of all messages in their order."""
        return tuple(part for message in self.messages for part in message.parts if isinstance(part, ImageFile))


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt that the client has already tokenized."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Truncation:
    """Shortening to the first (or last) `max_tokens` tokens, including the special ones that the model adds."""

    max_tokens: int
    drop_beginning: bool = False


@dataclass(frozen=True, slots=True)
class PooledText:
    """A text, or a pair of texts in the model's own notation of pairs; only for requests that generate nothing."""

    text: str
    second: str | None = None
    # Of a pair: the task, for notations that have one; None: the notation's default.
    instruction: str | None = None
    # Keep only this number of tokens at the beginning of the second text.
    max_second_tokens: int | None = None
    # Of a pair, the longer text is shortened first; None: a prompt that is too long is refused.
    truncation: Truncation | None = None


# A `str` is text to continue.
Prompt: TypeAlias = str | ChatPrompt | TokenPrompt | PooledText


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt to continue `n` times. `request_id` is never reused; every delta of the answer carries it."""

    request_id: RequestId
    view: View
    model: str
    prompt: Prompt
    options: RequestOptions
    # Name of the prompt's field in the client's request, for error messages.
    prompt_name: str | None = None
    # Whether the model's post-processor adds its special tokens; None: to texts but not to chats.
    add_special_tokens: bool | None = None
    # Keep only this number of tokens at the end of the prompt.
    truncate_prompt_tokens: int | None = None
    # Texts that must not be generated.
    bad_words: tuple[str, ...] = ()
    # Text that the output may repeat parts of: a source of drafts.
    prediction: str = ""
    # With several scheduler groups, requests of one view with equal keys are sent to the same group.
    routing_key: str | None = None
    # Whether the admission has the ids of the prompt.
    returns_prompt_ids: bool = False
    # The endpoint's operation, such as chat or embeddings, by which the ledger distinguishes use.
    operation: str = ""
    # Only with a text as the prompt, which has the model's own placeholders of images and of videos as often, each kind
    # in this order.
    images: tuple[ImageFile, ...] = ()

    @property
    def image_files(self) -> tuple[ImageFile, ...]:
        """The images of the prompt, within it or beside it, in their order."""
        return self.prompt.images if isinstance(self.prompt, ChatPrompt) else self.images
