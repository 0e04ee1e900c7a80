"""Groups that share the experts of a mixture (`pando up --dp`): a worker dies in the middle of answers."""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from common.settings import GatewaySettings, ModelSettings, SchedulerSettings, Settings, WorkerSettings
from common.settings.scheduler import DataParallelSettings
from deploy.supervisor.layout import PlannedGroup, Replicas, free_port
from tests.e2e.byte_models import save_byte_model
from tests.e2e.conftest import serve
from tests.layouts.arrangements import Arrangement, served_as
from tests.layouts.judgement import Judge
from tests.layouts.kills import state_of
from tests.layouts.load import Load
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.e2e.served import Served

pytestmark = [pytest.mark.slow, pytest.mark.extended]

SCHEDULERS = ("scheduler-0", "scheduler-1")
RECOVERY_S = 180.0


def bodies(count: int) -> list[dict[str, Any]]:
    """Return requests for long answers: greedy and seeded ones in turns, prompts of which some take several steps."""
    draw = random.Random(7)
    return [
        {
            "prompt": [draw.randrange(256) for _ in range(draw.choice((5, 40, 200)))],
            "max_tokens": 160, "ignore_eos": True, "return_token_ids": True, "logprobs": 1, "seed": index,
            "temperature": index % 2 * 0.8, "user": "abc"[index % 3],
        }
        for index in range(count)
    ]  # fmt: skip


def metric(served: Served, worker: str, name: str) -> float:
    port = served.deployment.layout.find(worker).settings.worker.metrics_port
    lines = httpx.get(f"http://127.0.0.1:{port}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def running(served: Served) -> list[int]:
    states = [state_of(served, name) for name in SCHEDULERS]
    return [0 if state is None else state.running_rows for state in states]


def kill_during_answers(served: Served, load: Load, workers: Sequence[str]) -> None:
    """Kill each of `workers` while both groups compute answers, and wait until both serve again."""
    for name in workers:
        wait_until(lambda: min(running(served)) > 0, RECOVERY_S, what=lambda: f"rows {running(served)}")
        assert load.answered < len(load.answers)
        before = served.deployment.pid_of(name)
        served.deployment.kill(name)
        wait_until(lambda: served.deployment.pid_of(name) not in (None, before), RECOVERY_S)  # noqa: B023  (called here)
        wait_until(served.is_ready, RECOVERY_S)


def settings_of(model: Path) -> Settings:
    return Settings(
        model=ModelSettings(reference=str(model), dtype="float32", kv_dtype="float32"),
        gateway=GatewaySettings(port=0, anonymous="vouched"),
        scheduler=SchedulerSettings(max_rows=8, max_step_tokens=96, data_parallel=DataParallelSettings(size=2)),
        worker=WorkerSettings(threads=1, metrics_port=free_port("127.0.0.1")),
    )


def test_answers_go_on_with_the_same_tokens_when_a_worker_of_either_group_dies(tmp_path: Path, run_root: Path) -> None:
    model, requests = save_byte_model(tmp_path, "qwen3 moe"), bodies(18)
    with served_as(Arrangement("mixture"), model, run_root) as served:
        expected = Load(served, requests).run()
    replicas = Replicas(groups=(PlannedGroup(), PlannedGroup()))
    with contextmanager(serve)(settings_of(model), run_root, 1, replicas) as served:
        # One group has all requests, the other one only computes its experts.
        first = Load(served, requests[:1]).run()
        joined = [metric(served, f"worker-{rank}", "pando_worker_joined_passes_total") for rank in range(2)]
        assert max(joined) > 100
        for rank in range(2):
            wait_until(lambda: metric(served, f"worker-{rank}", "pando_worker_expert_tokens_total{") > 0)  # noqa: B023
            assert metric(served, f"worker-{rank}", "pando_worker_expert_imbalance_ratio") >= 1
        load = Load(served, requests)
        answers = load.run(lambda load: kill_during_answers(served, load, ("worker-1", "worker-0")))
    judge = Judge(model, is_exact=False)
    assert not (differences := judge.differences(requests, answers, expected)), differences
    assert not (differences := judge.differences(requests[:1], first, expected[:1])), differences
