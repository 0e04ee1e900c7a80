"""Groups that change their roles by themselves: the tokens of a single group, before, during and after each change."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
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
from deploy.supervisor.layout import PlannedGroup, Replicas
from protos.gen.pando.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.e2e.byte_models import continued, save_byte_model
from tests.e2e.conftest import serve
from tests.e2e.test_disaggregation import continuation, is_quiet, state
from tests.services.scheduler.core.harness import make_request
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.served import Served

FIRST, SECOND, THIRD = "scheduler-0", "scheduler-1", "scheduler-2"
PREFILL, DECODE = GroupRole.PREFILL, GroupRole.DECODE
ROWS, OUTPUT = 8, 60


def roles(served: Served) -> list[GroupRole]:
    return [role_from_wire(state(served, name).role) for name in (FIRST, SECOND, THIRD)]


@contextmanager
def long_queue(served: Served, name: str, random: Random) -> Iterator[None]:
    """Keep a prefill group busy with more prompts than it computes in a second, as other groups ask for them."""
    ends = threading.Event()
    stack = ExitStack()
    channel = stack.enter_context(grpc.insecure_channel(served.deployment.address_of(name), options=CHANNEL_OPTIONS))
    stub = scheduler_pb2_grpc.SchedulerStub(channel)

    def ask(number: int) -> None:
        for turn in range(10_000):
            if ends.is_set():
                return
            prompt = [random.randrange(256) for _ in range(400)]
            request = schedule_request_to_wire(make_request(f"{number}-{turn}", prompt, user=f"user-{number}"))
            call = stub.Prefill(scheduler_pb2.PrefillRequest(request=request))
            for message in call:
                if message.is_last or ends.is_set():
                    break
            call.cancel()

    pool = stack.enter_context(ThreadPoolExecutor(24))
    asking = [pool.submit(ask, number) for number in range(24)]
    with stack:
        try:
            yield
        finally:
            ends.set()
        for each in asking:
            each.result()


@contextmanager
def answering(served: Served, prompts: list[list[int]], answers: dict[int, list[list[int]]]) -> Iterator[None]:
    """Have each of the prompts answered, one answer after the other, and collect these by the prompt's number."""
    ends = threading.Event()

    def ask(number: int) -> None:
        while not ends.is_set():
            answers.setdefault(number, []).append(continuation(served, prompts[number], OUTPUT))

    with ThreadPoolExecutor(len(prompts)) as pool:
        asking = [pool.submit(ask, number) for number in range(len(prompts))]
        try:
            yield
        finally:
            ends.set()
        for each in asking:
            each.result()


@pytest.mark.slow
@pytest.mark.extended
def test_groups_change_with_the_load_and_every_answer_is_that_of_one_group(tmp_path: Path, run_root: Path) -> None:
    random = Random(5)
    prompts = [[random.randrange(256) for _ in range(40 + number)] for number in range(2 * ROWS)]
    model = save_byte_model(tmp_path, "qwen3")
    settings = Settings(
        model=ModelSettings(reference=str(model), dtype="float32"),
        gateway=GatewaySettings(port=0, anonymous="vouched"),
        tokenizer=TokenizerSettings(routing=RoutingSettings(policy="least_loaded", role_settle_s=1.5)),
        scheduler=SchedulerSettings(
            host_tier=HostTierSettings(pages=256),
            prefill_min_tokens=64,
            max_rows=ROWS,
            max_step_tokens=16,
            automatic_role=AutomaticRoleSettings(enabled=True, interval_s=0, drain_s=60),
        ),
    )
    groups = (PlannedGroup(PREFILL), PlannedGroup(DECODE), PlannedGroup(DECODE))
    answers: dict[int, list[list[int]]] = {}
    with contextmanager(serve)(settings, run_root, replicas=Replicas(groups=groups)) as served:
        assert roles(served) == [PREFILL, DECODE, DECODE]
        # Prompts wait, and few outputs are generated meanwhile, some of them by the group that is to change.
        with answering(served, prompts[:4], answers):
            wait_until(lambda: state(served, THIRD).running_rows > 0)
            with long_queue(served, FIRST, random):
                wait_until(lambda: roles(served) == [PREFILL, DECODE, PREFILL])
        # Nothing has to be computed for others, and outputs wait for rows.
        with answering(served, prompts, answers):
            wait_until(lambda: roles(served) == [DECODE, DECODE, PREFILL])
            wait_until(lambda: state(served, FIRST).running_rows > 0)
        assert len(answers) == len(prompts)
        expected = continued(model, prompts, OUTPUT)
        assert all(answer == expected[number] for number, given in answers.items() for answer in given)
        wait_until(lambda: all(is_quiet(served, name) for name in (FIRST, SECOND, THIRD)))
