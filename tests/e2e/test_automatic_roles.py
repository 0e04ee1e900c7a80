"""Groups that change their roles by themselves: the tokens of a single group, before, during and after each change.

No load here depends on speeds: prompts wait because others of that group hold all of its pages and do not end, and rows
are taken because as many outputs wait for them as there are rows.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import grpc
import pytest

from common.rpc.options import CHANNEL_OPTIONS
from common.settings import GatewaySettings, ModelSettings, SchedulerSettings, Settings, TokenizerSettings
from common.settings.scheduler import AutomaticRoleSettings, HostTierSettings
from common.settings.tokenizer import RoutingSettings
from common.types import GroupRole
from common.wire.requests import role_from_wire, schedule_request_to_wire
from deploy.supervisor.layout import PlannedGroup, Replicas, free_port
from protos.gen.pando.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.e2e.byte_models import departures, save_byte_model
from tests.e2e.conftest import serve
from tests.e2e.served import serving_groups
from tests.e2e.test_disaggregation import is_quiet, state
from tests.services.scheduler.core.harness import make_request
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tests.e2e.served import Served

FIRST, SECOND, THIRD = "scheduler-0", "scheduler-1", "scheduler-2"
PREFILL, DECODE = GroupRole.PREFILL, GroupRole.DECODE
PAGE = 16
ROWS = 8
# Of an output; it is asked for again when it has ended.
OUTPUT = 4000
# All rows with the longest outputs have room.
PAGES = 2048
# Prompts that a prefill group is asked for at once, and their tokens: a third of them have no room.
ASKED, ASKED_TOKENS = 60, 800
assert ASKED * ASKED_TOKENS > 1.4 * PAGES * PAGE


def roles(served: Served) -> list[GroupRole]:
    return [role_from_wire(state(served, name).role) for name in (FIRST, SECOND, THIRD)]


@contextmanager
def all_of(task: Callable[[int], None], count: int) -> Iterator[None]:
    """Run a task beside the block so many times, each with its number; raise what one has raised, even if all fails."""
    with ThreadPoolExecutor(count) as pool:
        running = [pool.submit(task, number) for number in range(count)]
        try:
            yield
        finally:
            for each in running:
                each.result()


@contextmanager
def waiting_prompts(served: Served, name: str, random: Random) -> Iterator[None]:
    """Ask a prefill group for more prompts than it has memory for, as other groups do, and keep all pages of them."""
    prompts = [[random.randrange(256) for _ in range(ASKED_TOKENS)] for _ in range(ASKED)]
    calls: list[grpc.Call] = []
    has_ended = threading.Event()
    with grpc.insecure_channel(served.deployment.address_of(name), options=CHANNEL_OPTIONS) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)

        def keep(number: int) -> None:
            # Again, as the group ends calls after a while; others get their pages then.
            while not has_ended.is_set():
                request = make_request(f"prompt-{number}", prompts[number], user=f"user-{number}")
                call = stub.Prefill(scheduler_pb2.PrefillRequest(request=schedule_request_to_wire(request)))
                calls.append(call)
                if has_ended.is_set():
                    call.cancel()
                try:
                    for _ in call:
                        pass
                except grpc.RpcError:
                    if not has_ended.is_set():
                        raise

        with all_of(keep, ASKED):
            try:
                yield
            finally:
                has_ended.set()
                for call in calls:
                    call.cancel()


@dataclass
class Outputs:
    """Outcome of the outputs for one prompt, which are asked for one after the other."""

    prompt: list[int]
    given: list[list[int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.given))


@contextmanager
def generating(served: Served, prompts: Sequence[list[int]], tokens: int = OUTPUT) -> Iterator[list[Outputs]]:
    """Have outputs of so many tokens generated for the prompts all the time, and give the last ones up in the end."""
    has_ended = threading.Event()
    outputs = [Outputs(prompt) for prompt in prompts]

    def generate(number: int) -> None:
        body = {
            "model": served.model, "prompt": prompts[number], "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True, "stream": True, "user": f"user-{number}",
        }  # fmt: skip
        given = outputs[number].given
        while not has_ended.is_set():
            with served.http() as http, http.stream("POST", "/v1/completions", json=body) as answer:
                answer.raise_for_status()
                given.append([])
                for line in answer.iter_lines():
                    if has_ended.is_set():
                        return
                    if line.startswith("data: {"):
                        given[-1] += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]

    with all_of(generate, len(prompts)):
        try:
            yield outputs
        finally:
            has_ended.set()


def wait_for_more(outputs: Sequence[Outputs], tokens: int = 8) -> None:
    """Wait until each of the outputs has got some more tokens."""
    before = [each.tokens for each in outputs]
    wait_until(lambda: all(each.tokens >= tokens + had for each, had in zip(outputs, before, strict=True)))


@pytest.mark.slow
@pytest.mark.extended
def test_groups_change_with_the_load_and_every_answer_is_that_of_one_group(tmp_path: Path, run_root: Path) -> None:
    random = Random(5)
    # Too short to be computed by a prefill group.
    few, many, later = (
        [[random.randrange(256) for _ in range(40 + number)] for number in range(count)] for count in (4, 2 * ROWS, 4)
    )
    model = save_byte_model(tmp_path, "qwen3", max_position_embeddings=2 * OUTPUT)
    metrics_port = free_port("127.0.0.1")
    settings = Settings(
        model=ModelSettings(reference=str(model), dtype="float32"),
        gateway=GatewaySettings(port=0, anonymous="vouched"),
        tokenizer=TokenizerSettings(
            metrics_port=metrics_port, routing=RoutingSettings(policy="least_loaded", role_settle_s=3)
        ),
        scheduler=SchedulerSettings(
            host_tier=HostTierSettings(pages=256),
            prefill_min_tokens=64,
            device_pages=PAGES,
            max_rows=ROWS,
            # Outputs that have not ended after the drain go on in a group that computes prompts.
            automatic_role=AutomaticRoleSettings(enabled=True, interval_s=0, drain_s=2),
        ),
    )
    groups = (PlannedGroup(PREFILL), PlannedGroup(DECODE), PlannedGroup(DECODE))
    outputs: list[Outputs] = []
    with contextmanager(serve)(settings, run_root, replicas=Replicas(groups=groups)) as served:
        # It serves as soon as one of the groups does.
        wait_until(lambda: serving_groups(metrics_port) == len(groups))
        assert roles(served) == [PREFILL, DECODE, DECODE]
        # Prompts wait, and few outputs are generated meanwhile, some of them by the group that is to change.
        with generating(served, few) as generated:
            wait_until(lambda: state(served, THIRD).running_rows > 0)
            with waiting_prompts(served, FIRST, random):
                wait_until(lambda: roles(served) == [PREFILL, DECODE, PREFILL])
                wait_for_more(generated)
        outputs += generated
        # Nothing has to be computed for others, and outputs wait for rows.
        with generating(served, many) as generated:
            wait_until(lambda: roles(served) == [DECODE, DECODE, PREFILL])
            wait_until(lambda: sum(each.tokens > 0 for each in generated) >= ROWS)
        outputs += generated
        # Short ones: the first of them may come before it is known that the first group generates.
        with generating(served, later, 40) as generated:
            wait_until(lambda: state(served, FIRST).running_rows > 0)
            wait_for_more(generated)
        outputs += generated
        wait_until(lambda: all(is_quiet(served, name) for name in (FIRST, SECOND, THIRD)))
    given = [(each.prompt, answer) for each in outputs for answer in each.given if answer]
    assert len(given) >= len(few) + ROWS + len(later)
    assert departures(model, given) == []
