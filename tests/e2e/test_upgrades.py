"""Upgrades as Kubernetes performs them, with weights that take long to load: no stream is lost, no token repeated.

`PANDO_TEST_LOAD_S=100 python -m pytest tests/e2e/test_upgrades.py --timeout 600` loads as long as a large model does.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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

pytestmark = pytest.mark.extended

LOAD_S = float(os.environ.get("PANDO_TEST_LOAD_S", "10"))
STREAMS = 4
# Longer than schedulers drain.
TOKENS, STEP_MS, DRAIN_S = 200, 30, 2
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

    def __init__(self, directory: Path, groups: Sequence[int], drain_s: float) -> None:
        settings = {"scheduler.drain_s": drain_s, "gateway.drain_s": TIMEOUT_S}
        self.tier = Tier(directory, settings, step_ms=STEP_MS, groups=groups)
        self.groups = groups
        self.undisturbed: list[str] = []
        self._pool = ThreadPoolExecutor(16)
        self._gateway, self._port = "gateway", self.tier.port

    def start(self) -> None:
        self.tier.start()
        self.undisturbed = [future.result(TIMEOUT_S).text for _, future in self.start_streams()]
        assert len(set(self.undisturbed)) == STREAMS

    def start_streams(self) -> list[tuple[Stream, Future[Stream]]]:
        """Start the clients, and wait until each of them has received some text."""
        streams = [Stream(f"http://127.0.0.1:{self._port}", seed) for seed in range(STREAMS)]
        running = [(stream, self._pool.submit(stream.run)) for stream in streams]
        wait_until(lambda: all(stream.text for stream in streams), timeout_s=TIMEOUT_S, what=self.tier.logs)
        return running

    def replace_pod_with_sidecar(self, group: int) -> None:
        """Layout together: the worker is told to end once the scheduler has ended."""
        self.tier.end_group(group, signal.SIGTERM)
        self._start_slowly(group)

    def replace_separate_pods(self, group: int) -> None:
        """Layout separate: scheduler and worker are told to end at the same time."""
        self.end_separate_pods(group)
        self._start_slowly(group)

    def end_separate_pods(self, group: int) -> None:
        ends = [
            self._pool.submit(self.tier.end, f"{name}-{group}", timeout_s=TIMEOUT_S) for name in ("scheduler", "worker")
        ]
        for end in ends:
            end.result(TIMEOUT_S)

    def replace_others(self) -> None:
        """Replace the gateway after its successor has started, and tokenizer and detokenizer."""
        old, self._gateway, self._port = self._gateway, "gateway-new", free_port("127.0.0.1")
        self.tier.start_gateway(self._gateway, self._port)
        gateway = self._pool.submit(self.tier.end, old, timeout_s=TIMEOUT_S)
        for name, start in (("detokenizer", self.tier.start_detokenizer), ("tokenizer", self.tier.start_tokenizer)):
            self.tier.end(name)
            start()
        gateway.result(TIMEOUT_S)

    def together_with(self, *steps: Callable[[], None]) -> None:
        """Take all steps at the same time, as one upgrade does."""
        for step in [self._pool.submit(step) for step in steps]:
            step.result(TIMEOUT_S)

    def steps(self, group: int) -> int:
        """Return the passes that a group has computed since its scheduler started; 0 while that is away."""
        state = self.tier.state(group)
        return 0 if state is None else state.finished_steps

    def close(self) -> None:
        self.tier.stop()
        self._pool.shutdown()

    def _start_slowly(self, group: int) -> None:
        self.tier.variables[f"worker-{group}"] = {LOAD_VARIABLE: str(LOAD_S)}
        self.tier.start_group(group)
        wait_until(lambda: group in self.tier.serving(), timeout_s=TIMEOUT_S, what=self.tier.logs)


@contextmanager
def upgraded(groups: Sequence[int], drain_s: float = DRAIN_S) -> Iterator[Upgrade]:
    directory = Path(tempfile.mkdtemp(prefix="pando-upgrade-"))
    upgrade = Upgrade(directory, groups, drain_s)
    try:
        upgrade.start()
        yield upgrade
    finally:
        upgrade.close()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def single() -> Iterator[Upgrade]:
    with upgraded((0,)) as upgrade:
        yield upgrade


def check_streams(upgrade: Upgrade, running: Sequence[tuple[Stream, Future[Stream]]]) -> None:
    """Check that each stream has received the text of an undisturbed one."""
    ends = [future.result(TIMEOUT_S) for _, future in running]
    assert [stream.finish for stream in ends] == ["length"] * STREAMS
    assert [stream.text for stream in ends] == upgrade.undisturbed
    # They ended at groups that were replaced meanwhile, and have counted from 0.
    assert any(upgrade.steps(group) > 0 for group in upgrade.groups)


def test_no_stream_is_lost_when_all_services_are_upgraded(single: Upgrade) -> None:
    running = single.start_streams()
    single.together_with(single.replace_others, lambda: single.replace_pod_with_sidecar(0))
    check_streams(single, running)


@pytest.mark.extended
def test_no_stream_is_lost_when_scheduler_and_worker_are_separate(single: Upgrade) -> None:
    running = single.start_streams()
    single.replace_separate_pods(0)
    check_streams(single, running)


def test_separate_workers_serve_until_their_scheduler_has_drained() -> None:
    with upgraded((0,), drain_s=TIMEOUT_S) as upgrade:
        running = upgrade.start_streams()
        upgrade.end_separate_pods(0)
        # No other worker could have finished them.
        ends = [future.result(TIMEOUT_S).text for _, future in running]
        assert ends == upgrade.undisturbed


@pytest.mark.extended
def test_no_stream_is_lost_when_groups_are_upgraded_one_after_the_other() -> None:
    with upgraded((0, 1)) as upgrade:
        running = upgrade.start_streams()
        for group in upgrade.groups:
            upgrade.replace_pod_with_sidecar(group)
            # Served by the other group meanwhile; the next one is replaced after this one has loaded its weights.
            assert upgrade.tier.complete("somebody")["completion"] > 0
        check_streams(upgrade, running)
