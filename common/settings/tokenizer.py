"""The tokenizer's and the detokenizer's sections of the configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from common.section import Addresses, Section


class RoutingSettings(Section):
    """Choice among several scheduler groups."""

    policy: Literal["prefix_aware", "least_loaded", "round_robin"] = "prefix_aware"
    """Choice of a request's scheduler group. prefix_aware: the same group for one user's prompts with equal beginnings.
    least_loaded: the group with the fewest open requests. round_robin: each group in turn."""
    role_settle_s: float = Field(default=15.0, gt=0)
    """With scheduler.automatic_role: seconds after a change of roles, or of the groups, before another one is decided;
    loads are averaged over a third of it. A group that does not answer for less than a third of it delays a decision
    until it does, and is no change."""


class ImageDecodingSettings(Section):
    """Images for vision models: how many and which ones a request may have, and what decoding may use."""

    max_images: int = Field(default=16, ge=1, le=1024)
    """Images of one request, those of earlier messages included."""
    max_file_bytes: int = Field(default=20 * 1024 * 1024, ge=1024, le=48 * 1024 * 1024)
    """Bytes of each image as it was sent."""
    max_pixels: int = Field(default=50_000_000, ge=4096, le=1_000_000_000)
    """Width times height of each image, before the model's processor resizes it."""
    max_frames: int = Field(default=768, ge=2, le=4096)
    """Frames of a video, for models that take some; it counts as one image, and its frames together as one file. Of a
    video in a file, at most as many are taken."""
    processes: int = Field(default=0, ge=0, le=64)
    """Processes that decode images, one at a time each; they can neither open files nor connections. One user's images
    leave one of them to others, and one tenant's leave one to other tenants that send images. 0: half as many as the
    tokenizer may use processors, but two to eight, and beyond two only as many as may take half of its free memory
    (memory_bytes each)."""
    memory_bytes: int = Field(default=768 * 1024 * 1024, ge=64 * 1024 * 1024)
    """Memory that each of them may use for an image; an image that takes more is refused. About 16 bytes per pixel of
    max_pixels are enough."""
    timeout_s: float = Field(default=10.0, gt=0, le=300)
    """Seconds that decoding an image or a video may take; a process that takes longer is replaced."""
    kept_bytes: int | None = Field(default=None, ge=0)
    """Memory for images that were sent in the last five minutes, as the model takes them. An image that is sent again,
    as in each turn of a conversation, is then not decoded again; only requests of the same view find it. 0: none are
    kept. Absent: a sixteenth of the memory that is free at the start, from 256 MiB to 4 GiB."""


class TokenizerSettings(Section):
    """The conversion of text to token ids."""

    address: str = "127.0.0.1:50051"
    """gRPC address to listen on: host:port or unix:path."""
    schedulers: Addresses = Field(default=("127.0.0.1:50052",), min_length=1)
    """Addresses of the scheduler groups, usually a single one; dns:host:port stands for all addresses that the host
    name resolves to, which are looked up periodically."""
    threads: int = Field(default=2, ge=1)
    """Threads that tokenize. With two or more, one is kept free of texts of more than 65,536 characters."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the Prometheus endpoint, in plaintext and without credentials; absent: none."""
    routing: RoutingSettings = RoutingSettings()
    images: ImageDecodingSettings = ImageDecodingSettings()


class DetokenizerSettings(Section):
    """The conversion of token ids to text."""

    address: str = "127.0.0.1:50054"
    """gRPC address to listen on: host:port or unix:path."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the Prometheus endpoint, in plaintext and without credentials; absent: none."""
