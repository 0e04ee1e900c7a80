"""Formats in which shapes without weights are measured, and the programs that measure a whole server in them."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from deploy.evaluation.experiments.formats import FORMATS, shape_in
from deploy.evaluation.experiments.gpu_table import PARTS, SHAPES, TablePart
from deploy.evaluation.experiments.peers import vllm_throughput
from services.worker.engine.checkpoints.safetensors_directory import read_config
from services.worker.engine.quantization.checkpoint_scheme import stored_format

SHAPE = Path(SHAPES, "llama-3.1-8b")


@pytest.mark.parametrize("name", FORMATS)
def test_a_shape_in_a_format_is_read_as_a_published_checkpoint(name: str) -> None:
    with shape_in(SHAPE, name) as directory:
        assert directory.name == SHAPE.name
        assert read_config(directory).stored_format == stored_format(FORMATS[name])
    assert not directory.exists()


def test_other_names_leave_the_shape_as_it_is_and_fields_are_added() -> None:
    with shape_in(SHAPE, "bfloat16", architectures=["One"]) as directory:
        described = json.loads((directory / "config.json").read_text())
    assert described == {**json.loads((SHAPE / "config.json").read_text()), "architectures": ["One"]}


def test_the_gpu_table_has_a_part_for_each_format_of_both_shapes() -> None:
    weights = {(part.shape, part.weights) for part in PARTS if part.weights}
    assert weights == {(shape, name) for shape in ("llama-3.1-8b", "qwen3-14b") for name in FORMATS}


@pytest.mark.soak
def test_a_part_s_deployment_serves_the_shape_in_its_format() -> None:
    part = TablePart("small", (), "qwen3-0.6b", settings=("model.load_format=fake",), weights="awq")
    with part.deployment() as deployment:
        assert deployment is not None
        assert Path(deployment.settings.model.reference).name == "qwen3-0.6b"
        assert not str(deployment.settings.model.reference).startswith(SHAPES)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed, and would be measured")
def test_a_failed_format_is_told_by_the_exit_code(capfd: pytest.CaptureFixture[str]) -> None:
    assert vllm_throughput.main([str(SHAPE), "--formats", "awq"]) == 1
    assert "vllm" in capfd.readouterr().err
