"""Sessions and their turns, from and to protobuf."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import InvalidRequestError
from common.names import check_name
from common.types import SessionTurn
from protos.gen.pando.v1 import common_pb2

if TYPE_CHECKING:
    from protos.gen.pando.v1 import scheduler_pb2, tokenizer_pb2


def turn_to_wire(turn: SessionTurn | None) -> common_pb2.SessionTurn | None:
    """Encode how a request continues its session; None: it does not."""
    if turn is None:
        return None
    return common_pb2.SessionTurn(
        name=turn.name,
        after=turn.after,
        offset=turn.offset,
        drop_previous_output=turn.drop_previous_output,
        replace=turn.replace,
    )


def turn_from_wire(message: scheduler_pb2.ScheduleRequest | tokenizer_pb2.GenerateRequest) -> SessionTurn | None:
    """Decode how a request continues its session.

    Raises:
        InvalidRequestError: it names no session, or has no name that could be one.
    """
    if not message.HasField("turn"):
        return None
    turn = message.turn
    if not message.session or not turn.name:
        raise InvalidRequestError("a turn needs a name, and a session that it belongs to", param="session_params")
    return SessionTurn(
        name=check_name("rid", turn.name),
        after=check_name("session_params.rid", turn.after) if turn.HasField("after") else None,
        offset=turn.offset or None,
        drop_previous_output=turn.drop_previous_output,
        replace=turn.replace,
    )
