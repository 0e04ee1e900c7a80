"""Logging as events with fields, through structlog: one line each, JSON where no person watches."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

import structlog

if TYPE_CHECKING:
    from common.settings import LogSettings

# At debug, they tell dozens of times per call what only concerns themselves.
TALKATIVE = ("asyncio", "grpc", "httpcore")


def configure_logging(service: str, settings: LogSettings) -> None:
    """Set up structlog and the standard library's loggers for this process, writing to standard error."""
    as_console = settings.format == "console" or (settings.format == "auto" and sys.stderr.isatty())
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: structlog.types.Processor = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
        if as_console
        else structlog.processors.JSONRenderer()
    )
    errors: list[structlog.types.Processor] = [] if as_console else [structlog.processors.format_exc_info]
    structlog.configure(
        processors=[*shared, *errors, _with_service(service), renderer],
        wrapper_class=structlog.make_filtering_bound_logger(settings.level),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        # `set_level` changes the wrapper later on.
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *errors,
                _with_service(service),
                renderer,
            ],
        )
    )
    logging.basicConfig(handlers=[handler], force=True)
    _set_library_levels(settings.level)


def set_level(level: str) -> str:
    """Write events from `level` on, from now on and in the whole process; return the level until now."""
    previous = logging.getLevelName(logging.getLogger().level).lower()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(level), **_kept_configuration())
    _set_library_levels(level)
    return previous


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return a logger whose events carry the component `name`."""
    logger: structlog.stdlib.BoundLogger = structlog.get_logger(component=name)
    return logger


def _set_library_levels(level: str) -> None:
    """Let the standard library's loggers write from `level` on; talkative ones never at debug."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(max(root.level, logging.INFO))


def _kept_configuration() -> dict[str, Any]:
    """Return structlog's configuration but for the wrapper: `configure` sets what it is not given to defaults."""
    return {key: value for key, value in structlog.get_config().items() if key != "wrapper_class"}


def _with_service(service: str) -> structlog.types.Processor:
    def add(
        logger: structlog.types.WrappedLogger, method: str, event: structlog.types.EventDict
    ) -> structlog.types.EventDict:
        event["service"] = service
        return event

    return add
