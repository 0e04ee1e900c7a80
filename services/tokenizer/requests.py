"""Requests as gateways submit them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.requests import GenerateRequest
    from common.types import ReplyTo


@dataclass(frozen=True, slots=True)
class Submission:
    """A request, and the subscription that receives its output."""

    request: GenerateRequest
    reply_to: ReplyTo
