"""What the scheduler configures its ranks with."""

from __future__ import annotations

import pytest

from common.errors import ConfigurationError
from common.settings import ModelSettings, SchedulerSettings, Settings
from services.scheduler.__main__ import check_ranks, engine_spec


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
