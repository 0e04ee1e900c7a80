from __future__ import annotations

import logging

import pytest

from common.logs import set_level


@pytest.fixture(autouse=True)
def _at_info() -> None:
    set_level("info")


def test_at_level_debug_libraries_log_from_level_info_on() -> None:
    assert set_level("debug") == "info"
    assert logging.getLogger("services.worker").isEnabledFor(logging.DEBUG)
    assert not logging.getLogger("grpc._cython.cygrpc").isEnabledFor(logging.DEBUG)
    assert logging.getLogger("grpc._cython.cygrpc").isEnabledFor(logging.INFO)


def test_above_info_libraries_follow_the_configured_level() -> None:
    assert set_level("error") == "info"
    assert not logging.getLogger("services.worker").isEnabledFor(logging.WARNING)
    assert not logging.getLogger("grpc._cython.cygrpc").isEnabledFor(logging.WARNING)
