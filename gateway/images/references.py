"""Images and videos as a request names them: inline in base64, by URL, or by the id of an uploaded file."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias

from common.errors import InvalidRequestError
from common.names import check_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Json: TypeAlias = dict[str, Any]  # Any: free JSON

# Beginning with the one that examples in errors have.
MEDIA_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
# Of videos in files.
VIDEO_MEDIA_TYPES = ("video/mp4", "video/webm", "video/quicktime", "video/x-matroska")
# Of the frames of a video, one after the other, as vLLM takes them.
FRAMES_MEDIA_TYPE = "video/jpeg"
VIDEO_EXPECTED = (
    "a data URL of a file (data:video/mp4;base64,…, data:video/webm;base64,…), an https URL, or the frames of the "
    "video, as JPEG or PNG: data:video/jpeg;base64,<first frame>,<second frame>,…"
)
FRAMES_PER_SECOND = (0.001, 1000)
# What clients also call image/jpeg, video/mp4 and video/x-matroska.
JPEG_ALIASES = ("image/jpg", "image/pjpeg")
VIDEO_ALIASES = ("video/x-m4v", "video/matroska")
ALIASES = (*JPEG_ALIASES, *VIDEO_ALIASES)
_IMAGE_TYPES = (*MEDIA_TYPES, *JPEG_ALIASES)
# "original" asks for the full resolution, as "high" does.
DETAILS = {"auto": "auto", "low": "low", "high": "high", "original": "high"}
# Of the part of a data URL before its data.
MAX_HEADER_CHARACTERS = 256
MAX_URL_CHARACTERS = 8192
SHOWN_CHARACTERS = 64
_BASE64 = re.compile(r";\s*base64\s*,", re.IGNORECASE | re.ASCII)
EXPECTED = "a data URL such as data:image/png;base64,… or an https URL"


class ImageSource(Enum):
    """Where the bytes of an image are."""

    INLINE = "inline"
    URL = "url"
    FILE = "file"


@dataclass(frozen=True, slots=True)
class ImageReference:
    """An image or a video of a request that has not been read yet.

    `value` is a URL, the id of a file, or a text in which base64 begins at `start`; of a video that is not in a file,
    that of each frame with commas between them.
    """

    source: ImageSource
    value: str
    # low, high or auto.
    detail: str = "auto"
    # Its place in the request, for errors.
    param: str = ""
    start: int = 0
    is_video: bool = False
    frames_per_second: float | None = None
    # Of a video: whether it is in a file, and not its frames.
    is_video_file: bool = False

    @property
    def kind(self) -> str:
        """Its name in errors."""
        return "video" if self.is_video else "image"

    @property
    def key(self) -> str:
        """A name of what has to be looked up; equal for equal images."""
        return f"{self.source.value}:{self.value}"

    def to_part(self, found: Mapping[str, str]) -> Json:
        """Return the content part of a chat that has this image; `found` are contents in base64 by `key`.

        A content found at a URL is written into the part, because the URL may have another one later. A file stays a
        reference, so that its deletion deletes the image.
        """
        if self.source is ImageSource.FILE:
            return {"type": "image_file", "image_file": {"file_id": self.value, "detail": self.detail}}
        url = self.value if self.start else f"data:;base64,{self.value}"
        if self.source is ImageSource.URL:
            url = f"data:;base64,{found[self.key]}"
        return {"type": "image_url", "image_url": {"url": url, "detail": self.detail}}


def from_url(url: object, detail: object, param: str) -> ImageReference:
    """Return the image of a data URL or a URL.

    Raises:
        InvalidRequestError: it is neither, its media type is not supported, or the detail is unknown.
    """
    if not isinstance(url, str):
        raise InvalidRequestError(f"'{param}' should be {EXPECTED}.", param=param)
    known = check_detail(detail, param)
    if url[:5].lower() == "data:":
        return ImageReference(ImageSource.INLINE, url, known, param, _start_of_data(url, param, _IMAGE_TYPES))
    return ImageReference(ImageSource.URL, _checked_url(url, EXPECTED, param), known, param)


def from_video_url(url: object, rate: object, detail: object, param: str) -> ImageReference:
    """Return the video of a URL, or of a data URL with its file or its frames.

    `rate` is how many of its frames are a second, or are to be taken from a second of its file.

    Raises:
        InvalidRequestError: it is none, the rate is no such number, or the detail is unknown.
    """
    if not isinstance(url, str):
        raise InvalidRequestError(f"'{param}' should be {VIDEO_EXPECTED}.", param=param)
    video = ImageReference(
        ImageSource.INLINE, url, check_detail(detail, param), param, is_video=True,
        frames_per_second=_checked_rate(rate, param), is_video_file=True,
    )  # fmt: skip
    beginning = url[:MAX_HEADER_CHARACTERS].lower()
    if beginning.startswith((f"data:{FRAMES_MEDIA_TYPE};", f"data:{FRAMES_MEDIA_TYPE},")):
        return replace(video, start=_start_of_data(url, param, (FRAMES_MEDIA_TYPE,)), is_video_file=False)
    if beginning.startswith("data:"):
        return replace(video, start=_start_of_data(url, param, (*VIDEO_MEDIA_TYPES, *VIDEO_ALIASES)))
    return replace(video, source=ImageSource.URL, value=_checked_url(url, VIDEO_EXPECTED, param))


def from_video(content: object, rate: object, detail: object, param: str) -> ImageReference:
    """Return a video as `from_video_url` does, or in plain base64.

    Raises:
        InvalidRequestError: it is none, the rate is no such number, or the detail is unknown.
    """
    if not isinstance(content, str) or ":" in content[:MAX_HEADER_CHARACTERS]:
        return from_video_url(content, rate, detail, param)
    return ImageReference(
        ImageSource.INLINE, content, check_detail(detail, param), param, is_video=True,
        frames_per_second=_checked_rate(rate, param), is_video_file=True,
    )  # fmt: skip


def from_base64(content: object, param: str, media_type: object = None) -> ImageReference:
    """Return an image in plain base64; without a media type, its bytes say what it is.

    Raises:
        InvalidRequestError: it is not a text, or the media type is not supported.
    """
    if not isinstance(content, str):
        raise InvalidRequestError(f"'{param}' should be an image in base64.", param=param)
    if media_type is not None:
        _check_media_type(media_type, param, _IMAGE_TYPES)
    return ImageReference(ImageSource.INLINE, content, param=param)


def from_file(file_id: object, detail: object, param: str) -> ImageReference:
    """Return the image of an uploaded file.

    Raises:
        InvalidRequestError: it is not an id, or the detail is unknown.
    """
    if not isinstance(file_id, str) or not file_id:
        raise InvalidRequestError(f"'{param}' should be the id of an uploaded file.", param=param)
    return ImageReference(ImageSource.FILE, check_name(param, file_id), check_detail(detail, param), param)


def check_detail(detail: object, param: str) -> str:
    """Return the resolution at which an image is to be read: low, high or auto.

    Raises:
        InvalidRequestError: the value is unknown.
    """
    if detail is None:
        return "auto"
    if not isinstance(detail, str) or detail not in DETAILS:
        raise InvalidRequestError(f"The detail of '{param}' should be one of {', '.join(DETAILS)}.", param=param)
    return DETAILS[detail]


def from_part(part: Mapping[str, object], param: str) -> ImageReference:
    """Return the image of a part `image_url` or `image_file` of a chat message, or the video of a `video_…` one.

    Raises:
        InvalidRequestError: the part is malformed.
    """
    kind = str(part.get("type"))
    given, param = part.get(kind), f"{param}.{kind}"
    detail = None
    if isinstance(given, dict):
        detail = given.get("detail")
    if kind == "video_url":
        fields = given if isinstance(given, dict) else {"url": given}
        return from_video_url(fields.get("url"), fields.get("fps"), detail, param)
    if kind in ("image_file", "video_file"):
        fields = given if isinstance(given, dict) else {"file_id": given}
        file = from_file(fields.get("file_id"), detail, param)
        if kind == "image_file":
            return file
        rate = _checked_rate(fields.get("fps"), param)
        return replace(file, is_video=True, frames_per_second=rate, is_video_file=True)
    return from_url(given.get("url") if isinstance(given, dict) else given, detail, param)


def _checked_rate(rate: object, param: str) -> float | None:
    if rate is None:
        return None
    slowest, fastest = FRAMES_PER_SECOND
    if isinstance(rate, int | float) and not isinstance(rate, bool) and slowest <= rate <= fastest:
        return float(rate)
    message = f"The fps of '{param}' should be a number between {slowest} and {fastest}."
    raise InvalidRequestError(message, param=param)


def _checked_url(url: str, expected: str, param: str) -> str:
    if not url[:8].lower().startswith(("http://", "https://")):
        shown = url[:SHOWN_CHARACTERS].encode(errors="replace").decode()
        raise InvalidRequestError(f"'{param}' should be {expected}, got {shown!r}.", param=param)
    if len(url) > MAX_URL_CHARACTERS:
        message = f"'{param}' has {len(url)} characters; a URL may have {MAX_URL_CHARACTERS}."
        raise InvalidRequestError(message, param=param)
    return url


def _start_of_data(url: str, param: str, media_types: Sequence[str]) -> int:
    """Return the place at which the base64 of a data URL begins."""
    # Browsers write codecs with commas: data:video/webm;codecs=vp8,opus;base64,…
    marker = _BASE64.search(url, 0, MAX_HEADER_CHARACTERS)
    comma = marker.end() - 1 if marker else url.find(",", 0, MAX_HEADER_CHARACTERS)
    header = url[5:comma].lower() if comma >= 0 else ""
    media_type, *parameters = (each.strip() for each in header.split(";"))
    if "base64" not in parameters:
        message = f"'{param}' should be a data URL with base64: data:{media_types[0]};base64,…"
        raise InvalidRequestError(message, param=param)
    if media_type:
        _check_media_type(media_type, param, media_types)
    return comma + 1


def _check_media_type(media_type: object, param: str, supported: Sequence[str]) -> None:
    if isinstance(media_type, str) and media_type.lower() in supported:
        return
    shown = media_type[:SHOWN_CHARACTERS].encode(errors="replace").decode() if isinstance(media_type, str) else "it"
    sent = ", ".join(each for each in supported if each not in ALIASES)
    message = f"'{param}' has the media type {shown!r}, which is not supported; send {sent}."
    raise InvalidRequestError(message, param=param)
