from __future__ import annotations

import grpc
import pytest

from common.errors import (
    GRPC_STATUS,
    HTTP_STATUS,
    ContextLengthError,
    PandoError,
    QueueFullError,
    RequestFailedError,
)
from common.types import ErrorCode


def every_error() -> list[type[PandoError]]:
    return [kind for kind in PandoError.__subclasses__() if kind is not RequestFailedError]


def test_every_code_has_a_grpc_status_and_an_http_code() -> None:
    assert set(GRPC_STATUS) == set(HTTP_STATUS) == set(ErrorCode)
    assert all(hasattr(grpc.StatusCode, name) for name in GRPC_STATUS.values())


def test_every_code_but_internal_belongs_to_one_error() -> None:
    codes = [kind.code for kind in every_error() if kind.code is not ErrorCode.INTERNAL]
    assert sorted(code.name for code in codes) == sorted({code.name for code in ErrorCode} - {"INTERNAL"})


@pytest.mark.parametrize("kind", every_error())
def test_an_error_survives_as_a_value(kind: type[PandoError]) -> None:
    failure = kind("what was wrong", param="n", retry_after_ms=5).to_failure()
    again = RequestFailedError(failure)
    assert again.to_failure() == failure


def test_only_failures_that_may_succeed_later_are_retryable() -> None:
    assert QueueFullError("full").to_failure().retryable
    assert not ContextLengthError("long").to_failure().retryable
