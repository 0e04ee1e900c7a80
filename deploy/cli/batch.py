"""`pando batch`: runs files of requests as batches, lists and cancels them."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import orjson
from rich.console import Console
from rich.table import Table

from deploy.cli.chat.client import ChatError, tls_context
from deploy.cli.chat.command import API_KEY_VARIABLE, DEFAULT_URL, running_url

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

POLL_S = 2.0
TIMEOUT_S = 60.0
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})


class BatchCommandError(Exception):
    """The message is for the user at the terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `pando batch`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    start = actions.add_parser("run", help="run a file of requests (JSONL), wait for its end and write the responses")
    start.add_argument("file", nargs="?", type=Path, metavar="FILE", help="one request per line, as for /v1/batches")
    start.add_argument("-i", "--input-file", type=Path, metavar="FILE", help="the same, as for vLLM's run-batch")
    start.add_argument("-o", "--output-file", type=Path, metavar="FILE", help="responses and errors; default: stdout")
    start.add_argument("--endpoint", help="default: the url of the first line")
    shown = actions.add_parser("list", help="list your batches, newest first")
    cancel = actions.add_parser("cancel", help="cancel a batch; its responses so far are kept")
    cancel.add_argument("id", help="the batch's id")
    for action in (start, shown, cancel):
        action.add_argument("--url", help=f"server; default: the deployment on this machine, otherwise {DEFAULT_URL}")
        action.add_argument("--api-key", default=os.environ.get(API_KEY_VARIABLE), help=f"(or {API_KEY_VARIABLE})")
        action.add_argument("--authority", metavar="FILE", help="authority of the server's certificate (PEM)")
        action.add_argument("--certificate", metavar="FILE", help="client certificate (PEM)")
        action.add_argument("--key", metavar="FILE", help="private key of the client certificate (PEM)")


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen action; return the exit status."""
    url = arguments.url or ""
    try:
        tls = tls_context(arguments.authority, arguments.certificate, arguments.key)
        url = (url or running_url()).rstrip("/").removesuffix("/v1")
        headers = {"authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}
        with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S, verify=tls or True) as client:
            return run_action(client, arguments)
    except (BatchCommandError, ChatError, OSError) as error:
        sys.stderr.write(f"pando batch: {error}\n")
    except httpx.HTTPError as error:
        sys.stderr.write(f"pando batch: no answer from {url}: {error}\n")
    return 1


def run_action(client: httpx.Client, arguments: argparse.Namespace) -> int:
    """Run an action with `client`; return the exit status.

    Raises:
        BatchCommandError: the server refuses, or the file is not one of requests.
    """
    match arguments.action:
        case "run":
            return _run(client, arguments)
        case "list":
            return _list(client)
        case _:
            batch = _ask(client, "POST", f"/v1/batches/{arguments.id}/cancel")
            sys.stdout.write(f"{batch['id']} {batch['status']}\n")
            return 0


def _run(client: httpx.Client, arguments: argparse.Namespace) -> int:
    path: Path | None = arguments.file or arguments.input_file
    if path is None or (arguments.file and arguments.input_file):
        raise BatchCommandError("name one file of requests")
    endpoint = arguments.endpoint or _endpoint_of(path)
    with path.open("rb") as content:
        file = _ask(client, "POST", "/v1/files", data={"purpose": "batch"}, files={"file": (path.name, content)})
    body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"}
    batch = _ask(client, "POST", "/v1/batches", json=body)
    sys.stderr.write(f"batch {batch['id']} (`pando batch cancel {batch['id']}` cancels it)\n")
    shown = ""
    while batch["status"] not in ENDED:
        time.sleep(POLL_S)
        batch = _ask(client, "GET", f"/v1/batches/{batch['id']}")
        counts = batch["request_counts"]
        line = f"{batch['status']}: {counts['completed']} of {counts['total']} done, {counts['failed']} failed\n"
        if line != shown:
            sys.stderr.write(line)
            shown = line
    for error in (batch["errors"] or {"data": []})["data"]:
        where = "" if error["line"] is None else f"line {error['line']}: "
        sys.stderr.write(f"{where}{error['message']}\n")
    _write(client, batch, arguments.output_file)
    return 0 if batch["status"] == "completed" and not batch["request_counts"]["failed"] else 1


def _endpoint_of(path: Path) -> str:
    with path.open("rb") as content:
        first = next((line for line in content if line.strip()), b"")
    try:
        return str(orjson.loads(first)["url"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise BatchCommandError(f"{path}: the first line is not a request with a 'url'") from None


def _write(client: httpx.Client, batch: dict[str, Any], path: Path | None) -> None:
    """Write the lines of responses, then those of errors."""
    if path is None:
        for piece in _results(client, batch):
            sys.stdout.buffer.write(piece)
        sys.stdout.flush()
        return
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as target:
        for piece in _results(client, batch):
            target.write(piece)
    partial.replace(path)


def _results(client: httpx.Client, batch: dict[str, Any]) -> Iterator[bytes]:
    for file_id in (batch["output_file_id"], batch["error_file_id"]):
        if file_id is not None:
            with client.stream("GET", f"/v1/files/{file_id}/content") as response:
                _check(response)
                yield from response.iter_bytes()


def _list(client: httpx.Client) -> int:
    table = Table("id", "status", "endpoint", "total", "completed", "failed")
    after: dict[str, str] = {}
    while True:
        page = _ask(client, "GET", "/v1/batches", params={"limit": "100", **after})
        for batch in page["data"]:
            counts = batch["request_counts"]
            numbers = (str(counts[name]) for name in ("total", "completed", "failed"))
            table.add_row(batch["id"], batch["status"], batch["endpoint"], *numbers)
        if not page["has_more"]:
            break
        after = {"after": page["last_id"]}
    Console().print(table)
    return 0


def _ask(client: httpx.Client, method: str, path: str, **given: Any) -> dict[str, Any]:
    response = client.request(method, path, **given)
    _check(response)
    return dict(response.json())


def _check(response: httpx.Response) -> None:
    if response.status_code == httpx.codes.OK:
        return
    response.read()
    try:
        message = response.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = response.text[:200]
    raise BatchCommandError(f"the server answered {response.status_code}: {message}")
