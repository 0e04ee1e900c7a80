"""The error tree. Each class has an `ErrorCode`; the tables below map codes to gRPC status and HTTP status."""

from __future__ import annotations

from common.types import ErrorCode, RequestFailure


class PandoError(Exception):
    """An error whose message may be shown to the caller; any other exception is a bug in Pando."""

    code = ErrorCode.INTERNAL
    retryable = False
    # More precise than `code`, for clients that know it; None: there is nothing to add.
    reason: str | None = None

    def __init__(self, message: str, *, param: str | None = None, retry_after_ms: int | None = None) -> None:
        """Store a `message` that names the problem and a valid value, and `param`, the request field at fault."""
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_ms = retry_after_ms

    def to_failure(self) -> RequestFailure:
        """Return this error as a value that can be sent on a stream."""
        return RequestFailure(self.code, self.message, self.param, self.retryable, self.retry_after_ms)


class BrokenStateError(Exception):
    """A defect has left the process's own state half changed, so it must end; its cause is the defect.

    Whatever handles the defects of one peer's messages, or of one task, raises it again.
    """


class InvalidRequestError(PandoError):
    """A field is missing, malformed or out of range."""

    code = ErrorCode.INVALID_REQUEST


class ModelNotFoundError(PandoError):
    """The named model is not served here."""

    code = ErrorCode.MODEL_NOT_FOUND


class ContextLengthError(PandoError):
    """Prompt and output do not fit the model's context."""

    code = ErrorCode.CONTEXT_LENGTH_EXCEEDED


class UnauthenticatedError(PandoError):
    """The credential is missing or wrong."""

    code = ErrorCode.UNAUTHENTICATED


class PermissionDeniedError(PandoError):
    """The credential is valid but does not permit this operation."""

    code = ErrorCode.PERMISSION_DENIED


class QueueFullError(PandoError):
    """Too many requests are already waiting."""

    code = ErrorCode.QUEUE_FULL
    retryable = True


class RequestTimeoutError(PandoError):
    """The limit on a request's waiting time or run time has passed."""

    code = ErrorCode.TIMEOUT
    retryable = True


class UnavailableError(PandoError):
    """A service of the pipeline is unreachable; the same request may succeed later."""

    code = ErrorCode.UNAVAILABLE
    retryable = True


class DeviceMemoryError(PandoError):
    """The device has too little memory for the request, even with the smallest steps."""

    code = ErrorCode.OUT_OF_MEMORY
    retryable = True


class EngineFailureError(PandoError):
    """The engine failed repeatedly while it computed the request, which is therefore not run again."""


class ConfigurationError(Exception):
    """A setting is unknown, malformed or in conflict with another; the process must not start."""


class RequestFailedError(PandoError):
    """A failure that another service reported, raised again with its own code."""

    def __init__(self, failure: RequestFailure) -> None:
        """Copy the code, message and hints of `failure`."""
        super().__init__(failure.message, param=failure.param, retry_after_ms=failure.retry_after_ms)
        self.failure = failure
        self.code = failure.code
        self.retryable = failure.retryable


# Names of `grpc.StatusCode`; `common/rpc/status.py` resolves them, so that this module does not import gRPC.
GRPC_STATUS: dict[ErrorCode, str] = {
    ErrorCode.INVALID_REQUEST: "INVALID_ARGUMENT",
    ErrorCode.MODEL_NOT_FOUND: "NOT_FOUND",
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: "INVALID_ARGUMENT",
    ErrorCode.QUEUE_FULL: "RESOURCE_EXHAUSTED",
    ErrorCode.TIMEOUT: "DEADLINE_EXCEEDED",
    ErrorCode.UNAVAILABLE: "UNAVAILABLE",
    ErrorCode.INTERNAL: "INTERNAL",
    ErrorCode.UNAUTHENTICATED: "UNAUTHENTICATED",
    ErrorCode.PERMISSION_DENIED: "PERMISSION_DENIED",
    ErrorCode.OUT_OF_MEMORY: "RESOURCE_EXHAUSTED",
}

HTTP_STATUS: dict[ErrorCode, int] = {
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.MODEL_NOT_FOUND: 404,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: 400,
    ErrorCode.QUEUE_FULL: 429,
    ErrorCode.TIMEOUT: 504,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.INTERNAL: 500,
    ErrorCode.UNAUTHENTICATED: 401,
    ErrorCode.PERMISSION_DENIED: 403,
    ErrorCode.OUT_OF_MEMORY: 503,
}
