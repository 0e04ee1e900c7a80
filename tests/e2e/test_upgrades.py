"""Upgrades as Kubernetes performs them, with weights that take long to load: no stream is lost, no token repeated.

`PANDO_TEST_LOAD_S=100 python -m pytest tests/e2e/test_upgrades.py --timeout 600` loads as long as a large model does.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from deploy.supervisor.layout import free_port
from services.worker.engine.execution.fake_model import LOAD_VARIABLE
from tests.e2e.groups import Tier
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

LOAD_S = float(os.environ.get("PANDO_TEST_LOAD_S", "10"))
STREAMS = 4
# Longer than schedulers drain.
TOKENS, STEP_MS, DRAIN_S = 300, 30, 2
TIMEOUT_S = 120 + 2 * LOAD_S


class Stream:
    """A client's stream: the text that it has received, and its end."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self._seed = seed
        self.text = ""
        self.finish: str | None = None

    def run(self) -> Stream:
        """Receive the stream until its end."""
        body = {"model": "smollm2-135m-instruct", "prompt": "Tell", "max_tokens": TOKENS, "stream": True}
        with (
            httpx.Client(base_url=self._url, timeout=TIMEOUT_S, trust_env=False) as http,
            http.stream(
                "POST", "/v1/completions", json=body | {"seed": self._seed, "user": f"u{self._seed}"}
            ) as answer,
        ):
            assert answer.status_code == httpx.codes.OK
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    choice = json.loads(line.removeprefix("data: "))["choices"][0]
                    self.text += choice["text"]
                    self.finish = self.finish or choice["finish_reason"]
        return self


class Upgrade:
    """A tier with one or two groups, streams through its gateway, and the steps of an upgrade."""

    def __init__(self, directory: Path, groups: Sequence[int]) -> None:
        settings = {"scheduler.drain_s": DRAIN_S, "gateway.drain_s": TIMEOUT_S}
        self.tier = Tier(directory, settings, step_ms=STEP_MS, groups=groups)
        self.groups = groups
        self._pool = ThreadPoolExecutor(16)

    def start_streams(self) -> list[tuple[Stream, Future[Stream]]]:
        """Start the clients, and wait until each of them has received some text."""
        streams = [Stream(f"http://127.0.0.1:{self.tier.port}", seed) for seed in range(STREAMS)]
        running = [(stream, self._pool.submit(stream.run)) for stream in streams]
        wait_until(lambda: all(stream.text for stream in streams), timeout_s=TIMEOUT_S, what=self.tier.logs)
        return running

    def replace_pod_with_sidecar(self, group: int) -> None:
        """Layout together: the worker is told to end once the scheduler has ended."""
        self.tier.end_group(group, signal.SIGTERM)
        self._start_slowly(group)

    def replace_separate_pods(self, group: int) -> None:
        """Layout separate: scheduler and worker are told to end at the same time."""
        ends = [self._pool.submit(self.tier.end, f"{name}-{group}") for name in ("scheduler", "worker")]
        for end in ends:
            end.result(TIMEOUT_S)
        self._start_slowly(group)

    def replace_others(self) -> None:
        """Replace the gateway after its successor has started, and tokenizer and detokenizer."""
        self.tier.start_gateway("gateway-new", free_port("127.0.0.1"))
        gateway = self._pool.submit(self.tier.end, "gateway", timeout_s=TIMEOUT_S)
        for name, start in (("detokenizer", self.tier.start_detokenizer), ("tokenizer", self.tier.start_tokenizer)):
            self.tier.end(name)
            start()
        gateway.result(TIMEOUT_S)

    def together_with(self, *steps: Callable[[], None]) -> None:
        """Take all steps at the same time, as one upgrade does."""
        for step in [self._pool.submit(step) for step in steps]:
            step.result(TIMEOUT_S)

    def close(self) -> None:
        self.tier.stop()
        self._pool.shutdown()

    def _start_slowly(self, group: int) -> None:
        self.tier.variables[f"worker-{group}"] = {LOAD_VARIABLE: str(LOAD_S)}
        self.tier.start_group(group)
        wait_until(lambda: group in self.tier.serving(), timeout_s=TIMEOUT_S, what=self.tier.logs)


@pytest.fixture
def make_upgrade() -> Iterator[Callable[[Sequence[int]], Upgrade]]:
    directory = Path(tempfile.mkdtemp(prefix="pando-upgrade-"))
    made: list[Upgrade] = []

    def make(groups: Sequence[int]) -> Upgrade:
        made.append(Upgrade(directory, groups))
        made[0].tier.start()
        return made[0]

    try:
        yield make
    finally:
        for each in made:
            each.close()
        shutil.rmtree(directory, ignore_errors=True)


def finished(running: Sequence[tuple[Stream, Future[Stream]]], expected: Sequence[str]) -> None:
    """Check that each stream has received the text of an undisturbed one."""
    ends = [future.result(TIMEOUT_S) for _, future in running]
    assert [stream.finish for stream in ends] == ["length"] * STREAMS
    assert [stream.text for stream in ends] == list(expected)


@pytest.mark.parametrize("layout", ["together", "separate"])
def test_no_stream_is_lost_when_all_services_of_a_single_group_are_upgraded(
    layout: str, make_upgrade: Callable[[Sequence[int]], Upgrade]
) -> None:
    upgrade = make_upgrade((0,))
    undisturbed = [future.result(TIMEOUT_S).text for _, future in upgrade.start_streams()]
    assert len(set(undisturbed)) == STREAMS
    running = upgrade.start_streams()
    replace = {"together": upgrade.replace_pod_with_sidecar, "separate": upgrade.replace_separate_pods}[layout]
    upgrade.together_with(upgrade.replace_others, lambda: replace(0))
    finished(running, undisturbed)
    # They ended at the new group.
    state = upgrade.tier.state(0)
    assert state is not None
    assert state.finished_steps > 0


@pytest.mark.extended
def test_no_stream_waits_for_weights_when_groups_are_upgraded_one_after_the_other(
    make_upgrade: Callable[[Sequence[int]], Upgrade],
) -> None:
    upgrade = make_upgrade((0, 1))
    undisturbed = [future.result(TIMEOUT_S).text for _, future in upgrade.start_streams()]
    running = upgrade.start_streams()
    for group in upgrade.groups:
        upgrade.replace_pod_with_sidecar(group)
        # Served by the other group meanwhile; the next one is replaced after this one has loaded its weights.
        assert upgrade.tier.complete("somebody")["completion"] > 0
    finished(running, undisturbed)


def test_a_worker_that_is_told_to_end_finishes_the_requests_of_its_scheduler(
    make_upgrade: Callable[[Sequence[int]], Upgrade],
) -> None:
    upgrade = make_upgrade((0,))
    undisturbed = [future.result(TIMEOUT_S).text for _, future in upgrade.start_streams()]
    running = upgrade.start_streams()
    before = upgrade.tier.state(0)
    ending = threading.Thread(target=upgrade.tier.end, args=("worker-0",), kwargs={"timeout_s": TIMEOUT_S})
    ending.start()
    # More passes than the two that are under way when a worker ends at once.
    wait_until(lambda: before is not None and steps(upgrade) >= before.finished_steps + 5, timeout_s=TIMEOUT_S)
    ending.join(TIMEOUT_S)
    assert not ending.is_alive()
    upgrade.tier.start_worker(0)
    finished(running, undisturbed)


def steps(upgrade: Upgrade) -> int:
    state = upgrade.tier.state(0)
    return 0 if state is None else state.finished_steps
