"""Groups with roles and one storage: pages that either has stored, both find again, for the same user only."""

from __future__ import annotations

import re
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import TYPE_CHECKING

import grpc
import httpx
import pytest
from pydantic import SecretStr

from common.rpc.options import CHANNEL_OPTIONS
from common.settings import (
    GatewaySettings,
    HostTierSettings,
    ModelSettings,
    SchedulerSettings,
    Settings,
    StorageSettings,
    TokenizerSettings,
    WorkerSettings,
    WorkerStorageSettings,
)
from common.types import GroupRole
from deploy.supervisor.layout import PlannedGroup, Replicas, free_port
from protos.gen.pando.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.e2e.byte_models import continued, save_byte_model
from tests.e2e.conftest import serve
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.served import Served

pytestmark = pytest.mark.extended

PREFILL, DECODE = "scheduler-0", "scheduler-1"
PROMPT = [Random(0).randrange(256) for _ in range(200)]
WHOLE_PAGES = 12
LONGER = PROMPT + [Random(1).randrange(256) for _ in range(200)]
TOKENS = 12


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_byte_model(tmp_path / "model", "qwen3")


@contextmanager
def divided(model: Path, place: Path, root: Path) -> Iterator[Served]:
    metrics_port = free_port("127.0.0.1")
    settings = Settings(
        model=ModelSettings(reference=str(model), dtype="float32"),
        gateway=GatewaySettings(port=0, anonymous="vouched"),
        tokenizer=TokenizerSettings(metrics_port=metrics_port),
        scheduler=SchedulerSettings(
            host_tier=HostTierSettings(pages=256),
            prefill_min_tokens=64,
            storage=StorageSettings(prefetch="wait_complete", keyring=place / "keyring.db"),
        ),
        worker=WorkerSettings(storage=WorkerStorageSettings(location=SecretStr(str(place / "pages")), timeout_s=10.0)),
    )
    replicas = Replicas(groups=(PlannedGroup(GroupRole.PREFILL), PlannedGroup(GroupRole.DECODE)))
    for served in serve(settings, root, replicas=replicas):
        # It answers once the tokenizer has heard of the group that decodes, which may be before it hears of the other.
        wait_until(partial(has_heard_of_both, metrics_port))
        yield served


def has_heard_of_both(metrics_port: int) -> bool:
    metrics = httpx.get(f"http://127.0.0.1:{metrics_port}/metrics", trust_env=False, timeout=30).text
    return len(re.findall(r"^pando_tokenizer_replica_serving{[^}]*} 1", metrics, re.MULTILINE)) == 2


def state(served: Served, name: str) -> scheduler_pb2.GetStateResponse:
    with grpc.insecure_channel(served.deployment.address_of(name), options=CHANNEL_OPTIONS) as channel:
        return scheduler_pb2_grpc.SchedulerStub(channel).GetState(scheduler_pb2.GetStateRequest(), timeout=30)


def answer(served: Served, prompt: list[int], user: str) -> tuple[list[int], int]:
    """Return the tokens that follow a prompt, and the number of the prompt's tokens that were cached."""
    body = {
        "model": served.model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "user": user,
    }  # fmt: skip
    with served.http() as http:
        response = http.post("/v1/completions", json=body)
    response.raise_for_status()
    content = response.json()
    ids: list[int] = content["choices"][0]["token_ids"]
    return ids, content["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_both_groups_find_after_a_restart_what_either_has_stored(model: Path, tmp_path: Path, run_root: Path) -> None:
    short, long = continued(model, [PROMPT, LONGER], TOKENS)
    with divided(model, tmp_path, run_root) as served:
        assert answer(served, PROMPT, "ann") == (short, 0)
        # Also pages that the decode group has read from the other group's workers are stored by it.
        wait_until(lambda: state(served, PREFILL).storage.stored_pages >= WHOLE_PAGES)
        wait_until(lambda: state(served, DECODE).storage.stored_pages >= WHOLE_PAGES)
        before = state(served, DECODE).storage.stored_pages
        assert answer(served, PROMPT, "bob") == (short, 0)
        wait_until(lambda: state(served, DECODE).storage.stored_pages >= before + WHOLE_PAGES)
    with divided(model, tmp_path, run_root) as served:
        # Both groups load the beginning from storage, and the one that prefills computes the rest.
        assert answer(served, LONGER, "ann") == (long, 16 * WHOLE_PAGES)
        assert state(served, DECODE).disaggregation.remote_prefills == 1
        for name in (PREFILL, DECODE):
            assert state(served, name).storage.fetched_pages == WHOLE_PAGES
        assert answer(served, PROMPT, "bob") == (short, 16 * WHOLE_PAGES)
        fetched = [state(served, name).storage.fetched_pages for name in (PREFILL, DECODE)]
        assert answer(served, PROMPT, "carol") == (short, 0)
        assert [state(served, name).storage.fetched_pages for name in (PREFILL, DECODE)] == fetched
        wait_until(lambda: not any(state(served, name).leaked_pages for name in (PREFILL, DECODE)))
