"""Other people's clients against a gateway that really listens. They need packages of their own: `make clients`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fakes.pipeline import says
from tests.gateway.listening import listening
from tests.gateway.support import FakedGateway, faked

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.requests import GenerateRequest
    from tests.fakes.pipeline import Event

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".venv-clients" / "bin"
HERE = Path(__file__).parent / "clients"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not CLIENTS.is_dir(), reason="other people's clients are NOT installed: run `make clients`"),
]


def script(request: GenerateRequest) -> Iterable[Event]:
    """Call the tool if there is one; go on with the call if it is begun."""
    prompt = request.prompt
    prefix = getattr(prompt, "assistant_prefix", None)
    if prefix:
        return says('{"a": 1, ', '"b": 2}}</tool_call>')(request)
    if getattr(prompt, "tools_json", ()):
        return says("<tool_call>", '{"name": "add", "arguments": {"a": 1, "b": 2}}', "</tool_call>")(request)
    return says("Hi", " there")(request)


def gateway() -> FakedGateway:
    return faked(script)


async def run(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=ROOT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-6000:]


@pytest.mark.parametrize("client", ["litellm", "langchain", "instructor", "anthropic"])
async def test_third_party_clients_work(client: str) -> None:
    async with listening(gateway()) as port:
        await run(str(CLIENTS / "python"), str(HERE / f"{client}_smoke.py"), f"http://127.0.0.1:{port}")


@pytest.mark.slow
async def test_schemathesis_finds_no_server_error_and_no_undeclared_answer(tmp_path: Path) -> None:
    async with listening(gateway()) as port:
        url = f"http://127.0.0.1:{port}/openapi.json"
        options = [
            "--checks",
            CHECKS,
            "--max-examples",
            "40",
            "--seed",
            "1",
            "--phases",
            "examples,fuzzing",
            "--no-color",
        ]
        await run(str(CLIENTS / "schemathesis"), "run", url, *options)
