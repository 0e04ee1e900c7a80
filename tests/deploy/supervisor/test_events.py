from __future__ import annotations

from deploy.supervisor.console import format_event, parse_line


def test_a_json_event_is_written_with_time_and_fields_but_without_its_envelope() -> None:
    line = '{"event": "request.finished", "level": "info", "timestamp": "2026-01-31T12:34:56.789012Z", "tokens": 3, "service": "gateway", "component": "http", "why": "a b"}'  # noqa: E501
    assert format_event("gateway", parse_line(line)) == (
        '     gateway | 12:34:56.789 request.finished tokens=3 why="a b"'
    )


def test_a_warning_is_labelled() -> None:
    assert "WARNING link.broken" in format_event("worker", parse_line('{"event": "link.broken", "level": "warning"}'))


def test_every_line_of_a_traceback_has_the_prefix() -> None:
    text = format_event("worker", parse_line('{"event": "x", "level": "error", "exception": "Traceback\\n  boom"}'))
    assert text.splitlines() == ["      worker | ERROR x", "      worker | Traceback", "      worker |   boom"]


def test_a_line_that_is_not_an_event_is_shown_unchanged() -> None:
    for line in ("Segmentation fault", "[1, 2]", '{"no": "event"}', '{"event": 3}'):
        assert parse_line(line).text == line


def test_progress_is_recognised_by_its_fields() -> None:
    assert parse_line('{"event": "weights.loading", "done": 3, "total": 12}').progress == (3.0, 12.0)
    assert parse_line('{"event": "worker.configuring", "percent": 40}').progress == (40.0, 100.0)
    assert parse_line('{"event": "weights.loading", "done": 3}').progress is None
    assert parse_line('{"event": "weights.loading", "done": 3, "total": 0}').progress is None
