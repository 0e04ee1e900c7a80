"""Groups with roles and one storage: pages that either has stored, both find again, for the same user only.

With `wait_complete`, pages are loaded from storage however long that takes. But the group that decodes does not wait
for long for the one that prefills: on a slow machine it may compute a prompt itself, and another one is tried then.
"""

from __future__ import annotations

from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING

import grpc
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
from tests.e2e.served import serving_groups
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.e2e.served import Served

pytestmark = pytest.mark.extended

PREFILL, DECODE = "scheduler-0", "scheduler-1"
PAGE = 16
PROMPT_TOKENS = 200
WHOLE_PAGES = (PROMPT_TOKENS - 1) // PAGE
TOKENS = 12
# Pages of a prompt and its answer, whose last token is not computed.
STORED_PAGES = (PROMPT_TOKENS + TOKENS - 1) // PAGE
# Prompts that are tried until the prefill group has computed one.
TRIES = 10


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
        worker=WorkerSettings(storage=WorkerStorageSettings(location=SecretStr(str(place / "pages")), timeout_s=100.0)),
    )
    replicas = Replicas(groups=(PlannedGroup(GroupRole.PREFILL), PlannedGroup(GroupRole.DECODE)))
    for served in serve(settings, root, replicas=replicas):
        # It answers once the tokenizer has heard of the group that decodes, which may be before it hears of the other.
        wait_until(lambda: serving_groups(metrics_port) == len(replicas.groups))
        yield served


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


def more(seed: int, before: Sequence[int] = ()) -> list[int]:
    """Return a prompt that continues another one by random tokens."""
    random = Random(seed)
    return [*before, *(random.randrange(256) for _ in range(PROMPT_TOKENS))]


def stored(served: Served, name: str) -> int:
    return state(served, name).storage.stored_pages


def fetched(served: Served, name: str) -> int:
    return state(served, name).storage.fetched_pages


def is_prefilled(served: Served, prompt: list[int], expected: tuple[list[int], int]) -> bool:
    """Have ann's prompt answered; return whether the prefill group has computed it."""
    before = state(served, DECODE).disaggregation
    assert answer(served, prompt, "ann") == expected
    after = state(served, DECODE).disaggregation
    return (after.remote_prefills - before.remote_prefills, after.failed_prefills - before.failed_prefills) == (1, 0)


def test_both_groups_find_after_a_restart_what_either_has_stored(model: Path, tmp_path: Path, run_root: Path) -> None:
    with divided(model, tmp_path, run_root) as served:
        for seed in range(TRIES):
            prompt = more(seed)
            [short] = continued(model, [prompt], TOKENS)
            if is_prefilled(served, prompt, (short, 0)):
                break
        else:
            pytest.fail("the prefill group has computed none of the prompts")
        # Also pages that the decode group has read from the other group's workers are stored by it.
        wait_until(lambda: stored(served, PREFILL) >= WHOLE_PAGES)
        wait_until(lambda: stored(served, DECODE) == STORED_PAGES * (seed + 1))
        assert answer(served, prompt, "bob") == (short, 0)
        wait_until(lambda: stored(served, DECODE) == STORED_PAGES * (seed + 2))
    with divided(model, tmp_path, run_root) as served:
        # Both groups load the beginning from storage, and the one that prefills computes the rest.
        for seed in range(TRIES):
            longer = more(TRIES + seed, prompt)
            [long] = continued(model, [longer], TOKENS)
            if is_prefilled(served, longer, (long, PAGE * WHOLE_PAGES)):
                break
        else:
            pytest.fail("the prefill group has computed none of the prompts")
        assert fetched(served, PREFILL) >= WHOLE_PAGES
        # Those that had not come when the other group offered them were read from there.
        before = fetched(served, DECODE)
        assert before <= WHOLE_PAGES
        assert answer(served, prompt, "bob") == (short, PAGE * WHOLE_PAGES)
        assert fetched(served, DECODE) == before + WHOLE_PAGES
        pages = [fetched(served, name) for name in (PREFILL, DECODE)]
        assert answer(served, prompt, "carol") == (short, 0)
        assert [fetched(served, name) for name in (PREFILL, DECODE)] == pages
        wait_until(lambda: not any(state(served, name).leaked_pages for name in (PREFILL, DECODE)))
