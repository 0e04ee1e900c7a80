"""A group that computes prompts and one that generates, with the real model: the tokens of a single group, always."""

from __future__ import annotations

import importlib.util
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING

import grpc
import pytest

from common.rpc.options import CHANNEL_OPTIONS
from common.settings import (
    GatewaySettings,
    ModelSettings,
    SchedulerSettings,
    Settings,
    TokenizerSettings,
    WorkerSettings,
)
from common.settings.scheduler import HostTierSettings
from common.types import GroupRole
from deploy.supervisor.layout import PlannedGroup, Replicas, free_port
from protos.gen.pando.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.e2e.byte_models import continued, save_byte_model
from tests.e2e.conftest import require_model, serve
from tests.e2e.served import serving_groups
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.served import Served

PREFILL, DECODE = "scheduler-0", "scheduler-1"
TOPICS = ("bridges", "lighthouses", "maps", "clocks")


def prompt(topic: str, repeats: int = 24) -> str:
    sentence = f"The history of {topic} is long, and few people know it well. "
    return f"Notes on {topic}. {sentence * repeats}It began"


@pytest.fixture(scope="module")
def divided(run_root: Path) -> Iterator[Served]:
    require_model()
    settings = Settings(
        gateway=GatewaySettings(port=0, anonymous="vouched"),
        scheduler=SchedulerSettings(host_tier=HostTierSettings(gigabytes=0.5), prefill_min_tokens=64),
    )
    with serve_both(settings, run_root, (PlannedGroup(GroupRole.PREFILL), PlannedGroup(GroupRole.DECODE))) as served:
        yield served


@contextmanager
def serve_both(settings: Settings, root: Path, groups: tuple[PlannedGroup, ...]) -> Iterator[Served]:
    """Run two groups, of which the one that prefills may be ready later than the one that answers; wait for both."""
    port = free_port("127.0.0.1")
    settings = settings.model_copy(update={"tokenizer": TokenizerSettings(metrics_port=port)})
    with contextmanager(serve)(settings, root, replicas=Replicas(groups=groups)) as served:
        wait_until(lambda: serving_groups(port) == len(groups))
        yield served


def state(served: Served, name: str) -> scheduler_pb2.GetStateResponse:
    with grpc.insecure_channel(served.deployment.address_of(name), options=CHANNEL_OPTIONS) as channel:
        return scheduler_pb2_grpc.SchedulerStub(channel).GetState(scheduler_pb2.GetStateRequest(), timeout=30)


def is_quiet(served: Served, name: str) -> bool:
    """Whether a group has no requests, no leases and no pages in use, but for the cache's own."""
    try:
        now = state(served, name)
    except grpc.RpcError:
        return False
    busy = now.running_rows + now.waiting_requests + now.disaggregation.open_leases + now.host_tier.open_transfers
    return not busy and not now.leaked_pages and all(tier.protected_pages == 0 for tier in now.tiers)


@pytest.mark.slow
def test_prompts_are_computed_in_one_group_and_answered_from_the_other(divided: Served, served: Served) -> None:
    expected = [served.complete(prompt(topic), 16) for topic in TOPICS]
    before = state(divided, DECODE).disaggregation
    with ThreadPoolExecutor(len(TOPICS)) as pool:
        answers = list(pool.map(lambda topic: divided.complete(prompt(topic), 16), TOPICS))
    assert answers == expected
    asked = state(divided, DECODE).disaggregation
    assert asked.remote_prefills - before.remote_prefills == len(TOPICS)
    # On a busy machine, computing a prompt here may be faster than waiting for the other group.
    assert asked.failed_prefills - before.failed_prefills < len(TOPICS)
    assert asked.fetched_pages > 0
    assert state(divided, PREFILL).disaggregation.prefills > 0
    wait_until(lambda: is_quiet(divided, PREFILL) and is_quiet(divided, DECODE))


def test_the_next_turn_continues_where_the_first_was_decoded(divided: Served, served: Served) -> None:
    first = prompt("looms")
    answer = divided.complete(first, 16)
    asked = state(divided, DECODE).disaggregation.remote_prefills
    longer = first + answer + " And then"
    assert divided.complete(longer, 8) == served.complete(longer, 8)
    assert state(divided, DECODE).disaggregation.remote_prefills == asked


@pytest.mark.extended
@pytest.mark.parametrize("name", [PREFILL, DECODE, "worker-0", "worker-1", "tokenizer", "detokenizer"])
def test_a_killed_service_of_either_group_changes_no_token(divided: Served, served: Served, name: str) -> None:
    prompts = [prompt(f"{topic} near {name}") for topic in TOPICS]
    expected = [served.complete(text, 24) for text in prompts]
    wait_until(lambda: divided.is_ready() and is_quiet(divided, PREFILL) and is_quiet(divided, DECODE))
    before = divided.deployment.pid_of(name)
    timer = threading.Timer(0.5, divided.deployment.kill, (name,))
    timer.start()
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda text: divided.complete(text, 24), prompts))
    timer.join()
    assert answers == expected
    wait_until(lambda: divided.deployment.pid_of(name) not in (None, before))
    wait_until(lambda: divided.is_ready() and is_quiet(divided, PREFILL) and is_quiet(divided, DECODE))


@pytest.mark.extended
@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
def test_groups_with_other_numbers_of_ranks_read_each_others_pages(
    tmp_path: Path, run_root: Path, prefill: int, decode: int
) -> None:
    random = Random(prefill)
    prompts = [[random.randrange(256) for _ in range(80 + 30 * number)] for number in range(6)]
    model = save_byte_model(tmp_path, "qwen3")
    settings = Settings(
        model=ModelSettings(reference=str(model), dtype="float32"),
        gateway=GatewaySettings(port=0, anonymous="vouched"),
        scheduler=SchedulerSettings(host_tier=HostTierSettings(pages=256), prefill_min_tokens=64),
    )
    groups = (PlannedGroup(GroupRole.PREFILL, prefill), PlannedGroup(GroupRole.DECODE, decode))
    with serve_both(settings, run_root, groups) as served:
        assert [continuation(served, prompt, 16) for prompt in prompts] == continued(model, prompts, 16)
        asked = state(served, DECODE).disaggregation
        # Once both are measured, prompts are computed where that is faster.
        assert asked.fetched_pages > 0
        wait_until(lambda: is_quiet(served, PREFILL) and is_quiet(served, DECODE))


@pytest.mark.extended
@pytest.mark.skipif(importlib.util.find_spec("nixl_cu13") is None, reason="NIXL is NOT installed: run `make nixl`")
def test_pages_that_come_over_nixl_give_the_same_tokens(tmp_path: Path, run_root: Path) -> None:
    random = Random(19)
    prompts = [[random.randrange(256) for _ in range(90 + 40 * number)] for number in range(6)]
    model = save_byte_model(tmp_path, "qwen3")
    expected = continued(model, prompts, 16)
    settings = Settings(
        model=ModelSettings(reference=str(model), dtype="float32"),
        gateway=GatewaySettings(port=0, anonymous="vouched"),
        scheduler=SchedulerSettings(host_tier=HostTierSettings(pages=256), prefill_min_tokens=64),
        worker=WorkerSettings(peer_transfers="nixl"),
    )
    groups = (PlannedGroup(GroupRole.PREFILL), PlannedGroup(GroupRole.DECODE))
    with serve_both(settings, run_root, groups) as served:
        assert [continuation(served, prompt, 16) for prompt in prompts] == expected
        assert state(served, DECODE).disaggregation.fetched_pages > 0
        logged = served.deployment.logged
        assert (logged["peer.mapped"], logged["peer.not_mapped"], logged["peer.failed"]) == (1, 0, 0)
        wait_until(lambda: is_quiet(served, PREFILL) and is_quiet(served, DECODE))
        before = served.deployment.pid_of("worker-0")
        served.deployment.kill("worker-0")
        wait_until(lambda: served.deployment.pid_of("worker-0") not in (None, before))
        wait_until(lambda: served.is_ready() and is_quiet(served, PREFILL))
        others = [list(reversed(prompt)) for prompt in prompts]
        assert [continuation(served, prompt, 16) for prompt in others] == continued(model, others, 16)
        wait_until(lambda: is_quiet(served, PREFILL) and is_quiet(served, DECODE))


def continuation(served: Served, prompt: list[int], tokens: int) -> list[int]:
    body = {
        "model": served.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    with served.http() as http:
        answer = http.post("/v1/completions", json=body)
    answer.raise_for_status()
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids
