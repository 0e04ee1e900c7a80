"""What the scheduler configures its ranks with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from common.errors import ConfigurationError, InvalidRequestError
from common.settings import CacheSettings, ModelSettings, SchedulerSettings, Settings
from common.steps import EngineSpec, SleepLevel
from services.scheduler.__main__ import check_ranks, engine_spec
from services.scheduler.encoder_desk import encoder_spec
from services.scheduler.group import WorkerGroup
from services.scheduler.sleep_desk import SleepDesk, SleepMode
from services.scheduler.weights_desk import UpdateMode, WeightsDesk


def test_the_engine_spec_carries_dtypes_and_quantization_of_the_settings() -> None:
    model = ModelSettings(
        reference="directory",
        dtype="bfloat16",
        kv_dtype="float16",
        quantization="fp8",
        classifier_from_token=("no", "yes"),
        rope_parameters={"rope_type": "yarn", "factor": 4},
    )
    spec = engine_spec(Settings(model=model))
    assert (spec.model, spec.dtype, spec.kv_dtype, spec.quantization) == ("directory", "bfloat16", "float16", "fp8")
    assert spec.classifier_from_token == ("no", "yes")
    assert spec.rope_parameters == '{"rope_type": "yarn", "factor": 4}'
    assert engine_spec(Settings()).rope_parameters == ""
    assert engine_spec(Settings()).quantization == "auto"


@pytest.mark.parametrize(
    ("workers", "changes", "named"),
    [
        (3, {"pipeline_parallel": 2}, "cannot be divided into the 2 stages"),
        (1, {"expert_parallel": True}, "scheduler.expert_parallel distributes experts"),
        (2, {"expert_parallel": True, "pipeline_parallel": 2}, "each stage has only one"),
    ],
)
def test_ranks_that_do_not_fit_the_settings_are_refused(workers: int, changes: dict[str, object], named: str) -> None:
    addresses = [f"host-{i}:50053" for i in range(workers)]
    with pytest.raises(ConfigurationError, match=named):
        check_ranks(SchedulerSettings.model_validate({"workers": addresses, **changes}))


def test_experts_are_distributed_over_the_ranks_of_a_stage() -> None:
    addresses = tuple(f"host-{i}:50053" for i in range(4))
    scheduler = SchedulerSettings(workers=addresses, pipeline_parallel=2, expert_parallel=True)
    check_ranks(scheduler)
    spec = engine_spec(Settings(scheduler=scheduler))
    assert (spec.expert_parallel, spec.stages) == (True, 2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"data_parallel": {"size": 2, "rank": 2}}, "data_parallel.rank 2 must be below data_parallel.size 2"),
        ({"workers": ("a:1", "b:1")}, "scheduler.workers of several ranks"),
        ({"pipeline_parallel": 2}, "scheduler.pipeline_parallel"),
        ({"expert_parallel": True}, "scheduler.expert_parallel"),
        ({"adapters": {"slots": 2}}, "scheduler.adapters.slots"),
        ({"device_turns": {"enabled": True}}, "scheduler.device_turns"),
    ],
)
def test_what_groups_that_share_experts_cannot_do_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        SchedulerSettings.model_validate({"data_parallel": {"size": 2}, **changes})


def test_a_log_of_decisions_leaves_hybrids_their_snapshots_and_windows_no_pool() -> None:
    cache = CacheSettings(decision_log=Path("decisions.jsonl"))
    spec = engine_spec(Settings(scheduler=SchedulerSettings(cache=cache)))
    assert (spec.snapshots, spec.window_ratio) == (None, 0.0)
    assert engine_spec(Settings()).window_ratio > 0.0


def test_groups_that_share_experts_know_their_number_and_where_they_meet() -> None:
    shared = {"size": 3, "rank": 1, "rendezvous": "host:7"}
    spec = engine_spec(Settings(scheduler=SchedulerSettings.model_validate({"data_parallel": shared})))
    assert (spec.data_parallel_size, spec.data_parallel_rank, spec.data_parallel_rendezvous) == (3, 1, "host:7")
    assert spec.has_whole_experts
    assert not spec.is_alone
    alone = engine_spec(Settings())
    assert alone.is_alone
    assert alone.data_parallel_rendezvous == ""
    encoder = encoder_spec(spec)
    assert (encoder.data_parallel_size, encoder.data_parallel_rank) == (1, 0)


async def test_groups_that_share_experts_neither_sleep_nor_replace_their_weights() -> None:
    listener: Any = SimpleNamespace(core=None)
    group = WorkerGroup([], EngineSpec("m", data_parallel_size=2), listener, 1.0)
    weights = WeightsDesk(listener, group)
    with pytest.raises(InvalidRequestError, match="cannot replace their weights"):
        await weights.update("newer", "", UpdateMode.DRAIN, "")
    with pytest.raises(InvalidRequestError, match="cannot sleep"):
        await SleepDesk(listener, group, weights, listener).sleep(SleepLevel.HOST, SleepMode.DRAIN, keep_cache=False)
