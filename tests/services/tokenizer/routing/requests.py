"""Requests as the router sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from common.types import (
    ReplyTo,
    RequestId,
    ScheduleRequest,
    Subject,
    SubscriberId,
    View,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


def schedule(name: str, tenant: str = "acme", user: str = "ann", ids: Sequence[int] = (1, 2, 3)) -> ScheduleRequest:
    """Return an encoded request."""
    return ScheduleRequest(
        request_id=RequestId(name),
        view=View(Subject(tenant, user)),
        reply_to=ReplyTo(SubscriberId("gateway")),
        token_ids=np.array(ids, dtype=np.int32),
    )
