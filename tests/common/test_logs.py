from __future__ import annotations

import logging

import pytest
import structlog

from common.logs import configure_logging, get_logger, set_level
from common.settings import LogSettings


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


def test_texts_of_clients_do_not_control_the_console(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    configuration, handlers = structlog.get_config(), logging.getLogger().handlers
    try:
        configure_logging("gateway", LogSettings(format="console"))
        get_logger("http").warning("request.finished", path="/\x1b[2J\x9b2J")
        logging.getLogger("uvicorn").warning("GET /\x1b[2J")
    finally:
        structlog.configure(**configuration)
        logging.getLogger().handlers = handlers
    written = capsys.readouterr().err
    assert written.count("\\x1b[2J") == 2
    assert "\x1b" not in written
