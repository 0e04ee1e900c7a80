"""Conversion between errors and gRPC statuses with `google.rpc` details."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, TypeVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped]  # no stubs exist
from grpc_status import rpc_status

from common.errors import GRPC_STATUS, PandoError, RequestFailedError, UnavailableError
from common.types import ErrorCode, RequestFailure

if TYPE_CHECKING:
    from collections.abc import Awaitable

DOMAIN = "pando"
RETRY_AFTER_MS = 1000
CLOSED_DURING_CALL = "the connection was closed during the call"
AWAY = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNIMPLEMENTED,
)
T = TypeVar("T")


def to_status(error: PandoError) -> grpc.Status:
    """Return `error` as a status with ErrorInfo, BadRequest if it names a field, and RetryInfo if a retry may help."""
    failure = error.to_failure()
    info = error_details_pb2.ErrorInfo(reason=failure.code.name, domain=DOMAIN)
    info.metadata["retryable"] = str(failure.retryable).lower()
    details = [_packed(info)]
    if failure.param is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=failure.param, description=failure.message)
        details.append(_packed(error_details_pb2.BadRequest(field_violations=[violation])))
    if failure.retry_after_ms is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(failure.retry_after_ms)
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    number = code_pb2.Code.Value(GRPC_STATUS[failure.code])
    status: grpc.Status = rpc_status.to_status(status_pb2.Status(code=number, message=failure.message, details=details))
    return status


def to_error(call_error: grpc.RpcError) -> PandoError:
    """Return a peer's status as an error.

    Without our details, INVALID_ARGUMENT becomes INVALID_REQUEST; UNAVAILABLE, CANCELLED, DEADLINE_EXCEEDED and
    UNIMPLEMENTED (a peer of another version) become UNAVAILABLE, which is retryable; all others become INTERNAL.
    """
    code = call_error.code() if isinstance(call_error, grpc.Call | grpc.aio.AioRpcError) else None
    text = (call_error.details() if isinstance(call_error, grpc.Call | grpc.aio.AioRpcError) else None) or str(code)
    rich = _rich_status(call_error)
    if rich is not None:
        failure = _failure(rich)
        if failure is not None:
            return RequestFailedError(failure)
    away = code in AWAY
    known = ErrorCode.UNAVAILABLE if away else ErrorCode.INTERNAL
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        known = ErrorCode.INVALID_REQUEST
    return RequestFailedError(RequestFailure(known, text, retryable=away))


async def answered(call: Awaitable[T]) -> T:
    """Return the response of a call.

    Raises:
        PandoError: the call failed; converted by `to_error`. UnavailableError if its channel was closed meanwhile, or
            its response cannot be decoded.
    """
    try:
        answer = await call
    except grpc.RpcError as error:
        raise to_error(error) from error
    except asyncio.CancelledError:
        if is_own_cancellation():
            raise
        raise UnavailableError(CLOSED_DURING_CALL, retry_after_ms=RETRY_AFTER_MS) from None
    if answer is None:  # gRPC's own sign that a response could not be decoded
        raise UnavailableError("the response could not be decoded", retry_after_ms=RETRY_AFTER_MS)
    return answer


def is_own_cancellation() -> bool:
    """Whether a CancelledError that the current task has caught is a cancellation of the task itself.

    Closing a channel cancels its calls, which looks the same to a task that awaits one.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def describe(error: grpc.RpcError) -> str:
    """Return the reason why a call ended, for logs."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__


def _rich_status(call_error: grpc.RpcError) -> status_pb2.Status | None:
    if isinstance(call_error, grpc.aio.AioRpcError):
        for key, value in call_error.trailing_metadata():
            if key == "grpc-status-details-bin" and isinstance(value, bytes):
                with contextlib.suppress(DecodeError):  # a bit has flipped
                    return status_pb2.Status.FromString(value)
    return None


def _failure(status: status_pb2.Status) -> RequestFailure | None:
    code, param, retryable, retry_after_ms = None, None, False, None
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        bad = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        with contextlib.suppress(DecodeError):  # a bit has flipped
            if detail.Unpack(info) and info.domain == DOMAIN:
                # None: the code of another version.
                code, retryable = ErrorCode.__members__.get(info.reason), info.metadata.get("retryable") == "true"
            elif detail.Unpack(bad):
                param = next((violation.field for violation in bad.field_violations), None)
            elif detail.Unpack(retry):
                retry_after_ms = retry.retry_delay.ToMilliseconds()
    return RequestFailure(code, status.message, param, retryable, retry_after_ms) if code else None


def _packed(
    message: error_details_pb2.ErrorInfo | error_details_pb2.BadRequest | error_details_pb2.RetryInfo,
) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
