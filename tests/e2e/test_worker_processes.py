"""Ranks as processes of their own, as they are run: signals, and tensor parallelism over a real group."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest

from common.rpc.channel import is_serving, open_channel
from common.rpc.security import Security
from common.steps import EngineSpec, StepPlan, StepResult
from common.types import StepId
from deploy.supervisor.layout import free_port
from protos.gen.pando.v1 import worker_pb2, worker_pb2_grpc
from services.scheduler.wire.steps import plan_to_wire, result_from_wire, spec_to_wire
from services.worker.__main__ import NAME
from services.worker.engine.execution.fake_model import STEP_VARIABLE
from tests.e2e.hosts import Host, NoHostsError, hosts
from tests.services.worker.engine.scenario import chunk, open_row
from tests.services.worker.engine.tiny_llama import save_tiny_llama

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

pytestmark = pytest.mark.extended

PROMPT = [5, 17, 80, 33, 61, 2, 9]
NEW_TOKENS = 10
PLAN = StepPlan(
    StepId(1),
    opens=(open_row(0, PROMPT, [3, 1], total=len(PROMPT) + NEW_TOKENS),),
    prefills=(chunk(0, 0, len(PROMPT)),),
    steps=NEW_TOKENS,
)


@dataclass
class Rank:
    """A worker process and a connection to it."""

    process: asyncio.subprocess.Process
    stub: worker_pb2_grpc.WorkerAsyncStub

    async def configure(self, spec: EngineSpec) -> None:
        messages = [message async for message in self.stub.Configure(spec_to_wire(spec), timeout=150)]
        assert messages[-1].HasField("capacity")

    async def run(self, plan: StepPlan) -> list[StepResult]:
        """Run one plan in a stream of its own."""

        async def plans() -> AsyncIterator[worker_pb2.StepPlan]:
            yield plan_to_wire(plan)

        return [result_from_wire(message) async for message in self.stub.Execute(plans(), timeout=150)]

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


class Launcher:
    """Starts worker processes."""

    def __init__(self, directory: Path, stack: AsyncExitStack) -> None:
        self.directory = directory
        self._stack = stack
        self._started = 0

    async def start(self, *flags: str, address: str = "", prefix: tuple[str, ...] = ()) -> Rank:
        """Start one that listens on a socket of its own, or at `address`; `prefix` goes before the command."""
        self._started += 1
        address = address or f"unix:{self.directory}/{self._started}.sock"
        process = await asyncio.create_subprocess_exec(
            *prefix, sys.executable, "-m", "services.worker", "--worker.address", address, "--worker.device", "cpu",
            "--worker.threads", "1", "--worker.backend", "torch", *flags,
        )  # fmt: skip
        channel = open_channel(address, Security(plaintext=True))
        rank = Rank(process, worker_pb2_grpc.WorkerStub(channel))
        self._stack.push_async_callback(self._end, rank)
        self._stack.push_async_callback(channel.close)
        async with asyncio.timeout(150):
            while not await is_serving(channel, NAME):
                assert process.returncode is None, "the worker ended"
                await asyncio.sleep(0.05)
        return rank

    @staticmethod
    async def _end(rank: Rank) -> None:
        if rank.process.returncode is None:
            await rank.kill()


@pytest.fixture
async def launcher(tmp_path: Path) -> AsyncIterator[Launcher]:
    async with AsyncExitStack() as stack:
        yield Launcher(tmp_path, stack)


@pytest.fixture
def two_hosts() -> Iterator[list[Host]]:
    try:
        with hosts(2) as made:
            yield made
    except NoHostsError as error:
        pytest.skip(str(error))


def group_spec(directory: Path) -> EngineSpec:
    return EngineSpec(
        str(directory), max_rows=2, max_context=64, max_step_tokens=32, device_pages=8, world_size=2,
        rendezvous=f"127.0.0.1:{free_port('127.0.0.1')}",
    )  # fmt: skip


async def configure_all(ranks: list[Rank], spec: EngineSpec) -> None:
    await asyncio.gather(*(rank.configure(replace(spec, rank=number)) for number, rank in enumerate(ranks)))


def tokens(results: list[StepResult]) -> list[int]:
    return [int(token) for result in results for token in result.token_ids]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_process_in_order(
    launcher: Launcher, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PANDO_SCHEDULER__DRAIN_S", "0.2")
    rank = await launcher.start()
    await rank.configure(EngineSpec("anything", "fake"))
    # An open stream delays it as long as schedulers drain.
    call = rank.stub.Execute()
    await call.wait_for_connection()
    os.kill(rank.process.pid, number)
    async with asyncio.timeout(150):
        assert await rank.process.wait() == 0


async def test_a_signal_ends_the_process_though_the_engine_is_busy(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STEP_VARIABLE, "60000")
    monkeypatch.setenv("PANDO_SCHEDULER__DRAIN_S", "0.2")
    rank = await launcher.start()
    await rank.configure(EngineSpec("anything", "fake"))
    call = rank.stub.Execute()
    await call.write(plan_to_wire(PLAN))
    await asyncio.sleep(0.2)
    rank.process.terminate()
    async with asyncio.timeout(150):
        assert await rank.process.wait() == 0


@pytest.mark.slow
async def test_two_ranks_generate_the_same_as_one_and_survive_the_loss_of_either(launcher: Launcher) -> None:
    save_tiny_llama(launcher.directory)
    spec = group_spec(launcher.directory)
    ranks = list(await asyncio.gather(launcher.start(), launcher.start()))

    await ranks[0].configure(replace(spec, world_size=1, rendezvous=""))
    expected = tokens(await ranks[0].run(PLAN))
    assert len(expected) == NEW_TOKENS

    await configure_all(ranks, spec)
    first, second = await asyncio.gather(*(rank.run(PLAN) for rank in ranks))
    assert tokens(first) == expected
    assert tokens(second) == []
    assert [result.last for result in second] == [result.last for result in first]

    # A scheduler that starts again configures again: the ranks meet anew.
    await configure_all(ranks, spec)
    assert tokens((await asyncio.gather(*(rank.run(PLAN) for rank in ranks)))[0]) == expected

    # Either rank may die. The other notices as soon as it waits for it, in the middle of a plan.
    for lost, left in ((1, 0), (0, 1)):
        await configure_all(ranks, spec)
        await ranks[lost].kill()
        await assert_fails(ranks[left], PLAN)
        ranks[lost] = await launcher.start()
        await configure_all(ranks, spec)
        assert tokens((await asyncio.gather(*(rank.run(PLAN) for rank in ranks)))[0]) == expected


async def assert_fails(rank: Rank, plan: StepPlan) -> None:
    call = rank.stub.Execute(timeout=150)
    await call.write(plan_to_wire(plan))
    answer = await call.read()
    assert isinstance(answer, worker_pb2.StepResult)
    assert answer.HasField("error")
    assert (await rank.stub.GetState(worker_pb2.GetWorkerStateRequest())).state == "FAILED"


async def test_ranks_on_separate_hosts_generate_the_same_as_one_rank(launcher: Launcher, two_hosts: list[Host]) -> None:
    save_tiny_llama(launcher.directory)
    alone = await launcher.start()
    await alone.configure(replace(group_spec(launcher.directory), world_size=1, rendezvous=""))
    expected = tokens(await alone.run(PLAN))
    ranks = [
        await launcher.start("--rpc.plaintext", "true", address=f"{host.address}:50053", prefix=host.prefix)
        for host in two_hosts
    ]
    # The same port on both: they have nothing in common but the network.
    spec = replace(group_spec(launcher.directory), rendezvous=f"{two_hosts[0].address}:29500")
    for _ in range(2):
        await configure_all(ranks, spec)
        first, second = await asyncio.gather(*(rank.run(PLAN) for rank in ranks))
        assert tokens(first) == expected
        assert tokens(second) == []
