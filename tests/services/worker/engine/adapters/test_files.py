"""Adapters as files: what is read, what is refused by name, and when two of them are the same."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch

from common.errors import ConfigurationError
from services.worker.engine.adapters.active import GroupedAdapters
from services.worker.engine.adapters.files import read_adapter
from services.worker.engine.adapters.sites import adapter_bytes
from services.worker.engine.checkpoints.safetensors_directory import read_config
from tests.services.worker.engine.adapters.peft_adapters import ATTENTION, FEED_FORWARD, save_adapter
from tests.services.worker.engine.driving import load
from tests.services.worker.engine.families import save_family

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def adapter(model: Path, tmp_path: Path) -> Path:
    return save_adapter(model, tmp_path / "adapter", ATTENTION)


def configure(adapter: Path, **changes: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def change(adapter: Path, **tensors: torch.Tensor | None) -> None:
    file = adapter / "adapter_model.safetensors"
    content = safetensors.torch.load_file(file)
    for name, tensor in tensors.items():
        key = next((key for key in content if key.endswith(name)), name)
        content.pop(key, None)
        if tensor is not None:
            content[key] = tensor
    safetensors.torch.save_file(content, file)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"peft_type": "LOHA"}, "'LOHA'"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"alora_invocation_tokens": [1]}, "aLoRA"),
        ({"lora_alpha": "much"}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "not finite"),
        ({"alpha_pattern": {"q_proj": float("inf")}}, "not finite"),
        ({"alpha_pattern": {"(": 4}}, "alpha_pattern"),
        ({"alpha_pattern": {"q_proj(?=x)": 4}}, "alpha_pattern"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(adapter: Path, changes: dict[str, Any], reason: str) -> None:
    configure(adapter, **changes)
    with pytest.raises(ConfigurationError, match=reason):
        read_adapter(adapter)


def test_damaged_files_are_refused(adapter: Path) -> None:
    content = (adapter / "adapter_model.safetensors").read_bytes()
    change(adapter, **{"layers.0.self_attn.q_proj.lora_B.weight": None})
    with pytest.raises(ConfigurationError, match="two factors"):
        read_adapter(adapter)
    (adapter / "adapter_model.safetensors").write_bytes(content)
    for value in (torch.nan, torch.inf, -torch.inf):
        factor = torch.randn(64, 8)
        factor[7, 3] = value
        change(adapter, **{"layers.0.self_attn.q_proj.lora_B.weight": factor})
        with pytest.raises(ConfigurationError, match=r"q_proj\.lora_B"):
            read_adapter(adapter)
    (adapter / "adapter_model.safetensors").write_bytes(content[:-100])
    with pytest.raises(ConfigurationError, match=r"adapter_model\.safetensors"):
        read_adapter(adapter)
    (adapter / "adapter_model.safetensors").write_bytes(content)
    change(
        adapter,
        **{
            "layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(0, 48),
            "layers.0.self_attn.q_proj.lora_B.weight": torch.zeros(64, 0),
        },
    )
    with pytest.raises(ConfigurationError, match="two factors"):
        read_adapter(adapter)
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / "adapter_model.bin").touch()
    with pytest.raises(ConfigurationError, match="pickles"):
        read_adapter(adapter)


def test_a_digest_stands_for_all_that_decides_about_results(adapter: Path) -> None:
    first = read_adapter(adapter).digest
    assert read_adapter(adapter).digest == first
    configure(adapter, base_model_name_or_path="elsewhere", inference_mode=True)
    assert read_adapter(adapter).digest == first
    digests = {first}
    for changes in ({"lora_alpha": 17}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 3}}):
        configure(adapter, **changes)
        digests.add(read_adapter(adapter).digest)
    change(adapter, **{"layers.0.self_attn.q_proj.lora_A.weight": torch.ones(8, 48)})
    digests.add(read_adapter(adapter).digest)
    assert len(digests) == 5
    orders = [{"q_proj": 256, "self_attn.q_proj": 1}, {"self_attn.q_proj": 1, "q_proj": 256}]
    for patterns in orders:
        configure(adapter, alpha_pattern=patterns)
        digests.add(read_adapter(adapter).digest)
    assert len(digests) == 7, "of patterns the first one that matches counts"


def test_an_expression_of_a_file_takes_linear_time(adapter: Path) -> None:
    """Backtracking would take longer than the universe is old."""
    configure(adapter, alpha_pattern={"(([a-z0-9_.]+)+)+!": 4})
    assert read_adapter(adapter).modules


def test_a_file_that_becomes_shorter_after_it_was_read_is_not_needed(adapter: Path) -> None:
    read = read_adapter(adapter)
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    assert all(torch.isfinite(each.a).all() for each in read.modules.values())


def test_a_pipe_in_place_of_a_file_is_refused(adapter: Path) -> None:
    (adapter / "adapter_config.json").unlink()
    os.mkfifo(adapter / "adapter_config.json")
    with pytest.raises(ConfigurationError, match="is no file"):
        read_adapter(adapter)


def test_an_adapter_that_does_not_fit_the_model_is_refused(adapter: Path, model: Path, tmp_path: Path) -> None:
    runner = load(model, adapter_slots=1)
    assert runner.adapters is not None
    other = save_family(tmp_path / "other", "mistral")
    with pytest.raises(ConfigurationError, match=r"_proj' is made for a matrix"):
        runner.adapters.read(save_adapter(other, tmp_path / "of other", ATTENTION))
    change(adapter, **{"base_model.model.vision.lora_A.weight": torch.ones(8, 4)})
    change(adapter, **{"base_model.model.vision.lora_B.weight": torch.ones(4, 8)})
    with pytest.raises(ConfigurationError, match="'vision'"):
        runner.adapters.read(adapter)


def test_files_that_changed_since_they_were_read_are_noticed(adapter: Path, model: Path) -> None:
    runner = load(model, adapter_slots=1)
    assert runner.adapters is not None
    digest = runner.adapters.read(adapter).digest
    assert runner.adapters.read(adapter, digest).digest == digest
    configure(adapter, lora_alpha=3)
    with pytest.raises(ConfigurationError, match="changed"):
        runner.adapters.read(adapter, digest)


def test_a_model_without_slots_has_no_place_for_adapters(model: Path) -> None:
    assert load(model).adapters is None


@pytest.mark.parametrize("family", ["llama", "phi4"])
def test_the_memory_kept_for_a_slot_is_that_of_an_adapter_of_all_products(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = GroupedAdapters(1)
    monkeypatch.setattr("services.worker.engine.decoder_weights.select_adapter_products", lambda *_: slots)
    model = save_family(tmp_path / "model", family)
    modules = ATTENTION + FEED_FORWARD if family == "llama" else ("qkv_proj", "gate_up_proj", "o_proj", "down_proj")
    store = load(model, adapter_slots=1).adapters
    assert store is not None
    read = store.read(save_adapter(model, tmp_path / "adapter", (*modules, "lm_head"), r=8))
    assert adapter_bytes(slots.sites, read_config(model), 8, torch.float32.itemsize) == read.bytes
