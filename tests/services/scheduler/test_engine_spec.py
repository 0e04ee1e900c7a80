"""What the scheduler configures its ranks with."""

from __future__ import annotations

from common.settings import ModelSettings, Settings
from services.scheduler.__main__ import engine_spec


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
