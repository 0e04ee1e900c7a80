"""Services of neighbouring protocols serve together; others refuse each other, and both sides log why."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from common.rpc.handshake import PROTOCOL, PROTOCOL_VARIABLE, Build, refusal
from common.version import version
from tests.e2e.groups import TOKENS, Tier
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

CLIENTS, SERVERS = ("gateway", "scheduler-0"), ("tokenizer", "detokenizer", "worker-0")
# Every link of the pipeline, from the process that calls to the one that is called.
LINKS = (
    ("gateway", "tokenizer"),
    ("gateway", "detokenizer"),
    ("tokenizer", "scheduler-0"),
    ("scheduler-0", "detokenizer"),
    ("scheduler-0", "worker-0"),
)


@contextmanager
def tier_of(gateway_and_scheduler: int, others: int) -> Iterator[tuple[Tier, Path]]:
    """Prepare a group whose links all connect a process of one protocol with one of the other."""
    directory = Path(tempfile.mkdtemp(prefix="pando-versions-"))
    tier = Tier(directory, groups=(0,))
    for names, protocol in ((CLIENTS, gateway_and_scheduler), (SERVERS, others)):
        for name in names:
            tier.variables[name] = {PROTOCOL_VARIABLE: str(protocol)}
    try:
        yield tier, directory
    finally:
        tier.stop()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.parametrize(
    "protocols", [(PROTOCOL, PROTOCOL + 1), pytest.param((PROTOCOL, PROTOCOL - 1), marks=pytest.mark.extended)]
)
def test_every_link_connects_neighbouring_protocols(protocols: tuple[int, int]) -> None:
    with tier_of(*protocols) as (tier, _):
        tier.start()
        assert tier.complete("ada")["completion"] == TOKENS
        info = [line for line in tier.metrics().splitlines() if line.startswith("pando_build_info{")]
        assert info == [f'pando_build_info{{protocol="{protocols[1]}",version="{version()}"}} 1.0']


def test_every_link_refuses_other_protocols_and_both_sides_log_why() -> None:
    protocols = PROTOCOL, PROTOCOL + 2
    with tier_of(*protocols) as (tier, directory):
        tier.launch()

        def logged(name: str, reason: str) -> bool:
            return reason in (directory / f"{name}.log").read_text()

        for client, server in LINKS:
            its = Build(protocols[client in SERVERS], version()), Build(protocols[server in SERVERS], version())
            reason = refusal(server=its[1], client=its[0])
            assert reason is not None
            for name in (client, server):
                wait_until(lambda name=name, reason=reason: logged(name, reason), timeout_s=120, what=tier.logs)  # type: ignore[misc]  # bound per turn
        body = {"model": "smollm2-135m-instruct", "prompt": "Hello"}
        answer = tier.http.post("/v1/completions", json=body)
        assert answer.status_code == httpx.codes.SERVICE_UNAVAILABLE
