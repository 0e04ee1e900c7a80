"""What a gateway hands over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.requests import GenerateRequest
    from common.types import ReplyTo


@dataclass(frozen=True, slots=True)
class Submission:
    """A request, and the subscription that its text goes to."""

    request: GenerateRequest
    reply_to: ReplyTo
