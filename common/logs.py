"""Logging with structlog: each event is one line with fields, as JSON unless standard error is a terminal."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

import structlog

if TYPE_CHECKING:
    from common.settings import LogSettings

# At debug level these loggers write dozens of lines per call about their own internals.
VERBOSE_LOGGERS = ("asyncio", "grpc", "httpcore")


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
    prepared: list[structlog.types.Processor] = [
        _with_printable_fields if as_console else structlog.processors.format_exc_info,
        _with_service(service),
    ]
    structlog.configure(
        processors=[*shared, *prepared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(settings.level),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        # `set_level` replaces the wrapper later.
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *prepared,
                renderer,
            ],
        )
    )
    logging.basicConfig(handlers=[handler], force=True)
    _set_library_levels(settings.level)


def escaped(text: str) -> str:
    """Return `text` with escapes in place of characters that would control a terminal; tabs stay."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each == "\t" else _escape(each) for each in text)


def set_level(level: str) -> str:
    """Set the log level of the whole process; return the previous level."""
    previous = logging.getLevelName(logging.getLogger().level).lower()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(level), **_kept_configuration())
    _set_library_levels(level)
    return previous


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return a logger whose events carry the component `name`."""
    logger: structlog.stdlib.BoundLogger = structlog.get_logger(component=name)
    return logger


def _set_library_levels(level: str) -> None:
    """Set the level of the standard library's loggers; those in `VERBOSE_LOGGERS` never go below info."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    for name in VERBOSE_LOGGERS:
        logging.getLogger(name).setLevel(max(root.level, logging.INFO))


def _kept_configuration() -> dict[str, Any]:
    """Return structlog's configuration without the wrapper: `configure` resets omitted values to their defaults."""
    return {key: value for key, value in structlog.get_config().items() if key != "wrapper_class"}


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def _with_printable_fields(
    logger: structlog.types.WrappedLogger, method: str, event: structlog.types.EventDict
) -> structlog.types.EventDict:
    """Escape what clients may have sent to control a terminal."""
    return {name: escaped(value) if isinstance(value, str) else value for name, value in event.items()}


def _with_service(service: str) -> structlog.types.Processor:
    def add(
        logger: structlog.types.WrappedLogger, method: str, event: structlog.types.EventDict
    ) -> structlog.types.EventDict:
        event["service"] = service
        return event

    return add
