"""W1 on vLLM, with a stand-in for vLLM: which engine is asked for, which adapters requests have, and the figures."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from safetensors import safe_open

from deploy.evaluation.experiments.peers.vllm_throughput import EngineRuns, measure

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str


class Engine:
    """Stands for `vllm.LLM`: each request gets as many tokens as it asks for."""

    settings: dict[str, Any]
    passes: list[list[LoRARequest] | None]

    def __init__(self, **settings: Any) -> None:
        type(self).settings, type(self).passes = settings, []

    def generate(
        self, prompts: list[Any], sampling: list[Any], *, use_tqdm: bool, lora_request: list[LoRARequest] | None
    ) -> list[Any]:
        assert not use_tqdm
        assert len(prompts) == len(sampling) == 256
        for request in set(lora_request or ()):
            with safe_open(f"{request.lora_path}/adapter_model.safetensors", "pt") as file:
                assert len(file.keys()) == 2 * 2 * 7  # of two layers with seven products
        self.passes.append(lora_request)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * each.max_tokens)]) for each in sampling]


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module, requests = ModuleType("vllm"), ModuleType("vllm.lora.request")
    module.__dict__.update(LLM=Engine, SamplingParams=SimpleNamespace, __version__="0.0")
    requests.__dict__.update(LoRARequest=LoRARequest)
    # So that it is as before afterwards.
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    for name, part in (("vllm", module), ("vllm.lora", ModuleType("vllm.lora")), ("vllm.lora.request", requests)):
        monkeypatch.setitem(sys.modules, name, part)


def measured(shape: Path, results: Path, adapters: tuple[int, ...], weights: str = "bfloat16") -> list[str]:
    measure(EngineRuns(shape, weights, adapters, 2, results, "command"))
    found = json.loads(results.read_text(encoding="utf-8"))
    assert all(each["value"] > 0 and each["repeats"] == 2 for each in found)
    return [each["label"] for each in found]


def test_requests_use_adapters_in_turns_and_each_number_has_its_figure(shape: Path, tmp_path: Path) -> None:
    labels = measured(shape, tmp_path / "found.json", (0, 3))
    assert labels == ["vllm 0.0, bfloat16, 0 adapters", "vllm 0.0, bfloat16, 3 adapters"]
    assert [used is None for used in Engine.passes] == [True, False] * 3
    used = Engine.passes[1]
    assert used is not None
    assert [request.lora_name for request in used[:4]] == ["a0", "a1", "a2", "a0"]
    assert {request.lora_int_id for request in used} == {1, 2, 3}
    assert {name: Engine.settings[name] for name in ("enable_lora", "max_loras", "max_lora_rank")} == {
        "enable_lora": True, "max_loras": 3, "max_lora_rank": 16,
    }  # fmt: skip


def test_without_adapters_their_support_is_off(shape: Path, tmp_path: Path) -> None:
    assert measured(shape, tmp_path / "found.json", (), "gptq-128") == ["vllm 0.0, gptq-128"]
    assert Engine.passes == [None] * 3
    assert "enable_lora" not in Engine.settings
    assert Engine.settings["hf_overrides"]["quantization_config"]["quant_method"] == "gptq"
