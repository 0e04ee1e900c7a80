"""`pando batch` against a server that answers like the gateway."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

import httpx
import pytest

from deploy.cli import batch
from deploy.supervisor.layout import free_port

if TYPE_CHECKING:
    from pathlib import Path

COUNTS = {"total": 2, "completed": 1, "failed": 1}
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


class Server:
    """Answers the requests of one batch, whose status advances with each look."""

    def __init__(self, *statuses: str) -> None:
        self.statuses = list(statuses)
        self.asked: list[str] = []
        self.created: dict[str, str] = {}

    def client(self) -> httpx.Client:
        return httpx.Client(base_url="http://test", transport=httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.asked.append(f"{request.method} {path}")
        if path == "/v1/files":
            assert b'name="purpose"\r\n\r\nbatch' in request.read()
            return httpx.Response(200, json={"id": "file-in"})
        if path.endswith("/content"):
            return httpx.Response(200, content=f"{path.split('/')[3]}\n".encode())
        if path == "/v1/batches" and request.method == "GET":
            return httpx.Response(200, json={"data": [self._batch("completed")], "has_more": False})
        if path == "/v1/batches":
            self.created = json.loads(request.content)
            return httpx.Response(200, json=self._batch("validating"))
        if path.endswith("/gone/cancel"):
            return httpx.Response(404, json={"error": {"message": "No batch found"}})
        return httpx.Response(200, json=self._batch("cancelling" if "cancel" in path else self.statuses.pop(0)))

    def _batch(self, status: str) -> dict[str, object]:
        return {
            "id": "batch_1",
            "status": status,
            "endpoint": "/v1/completions",
            "request_counts": COUNTS,
            "errors": None,
            "output_file_id": "file-good" if status == "completed" else None,
            "error_file_id": "file-bad" if status == "completed" else None,
        }


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    batch.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize("flags", [("{file}",), ("-i", "{file}")])
def test_a_file_is_run_and_its_results_written(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "POLL_S", 0.0)
    given, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text(json.dumps(LINE))
    server = Server("in_progress", "completed")
    arguments = parsed("run", *(flag.format(file=given) for flag in flags), "-o", str(output))
    # One line has failed.
    assert batch.run_action(server.client(), arguments) == 1
    assert output.read_text() == "file-good\nfile-bad\n"
    assert server.created == {
        "input_file_id": "file-in",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    assert sorted(tmp_path.iterdir()) == [given, output]


def test_batches_are_listed_and_cancelled(capsys: pytest.CaptureFixture[str]) -> None:
    server = Server()
    assert batch.run_action(server.client(), parsed("list")) == 0
    assert batch.run_action(server.client(), parsed("cancel", "batch_1")) == 0
    shown = capsys.readouterr().out
    assert "completed" in shown
    assert "batch_1 cancelling" in shown
    with pytest.raises(batch.BatchCommandError, match="404: No batch found"):
        batch.run_action(server.client(), parsed("cancel", "gone"))


def test_a_server_that_does_not_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    assert batch.run(parsed("list", "--url", url)) == 1
    assert capsys.readouterr().err.startswith(f"pando batch: no answer from {url}: ")


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("text\n")
    with pytest.raises(batch.BatchCommandError, match="first line"):
        batch.run_action(Server().client(), parsed("run", str(tmp_path / "in.jsonl")))
    with pytest.raises(batch.BatchCommandError, match="one file"):
        batch.run_action(Server().client(), parsed("run"))
