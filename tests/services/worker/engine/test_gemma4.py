"""Gemma 4: checkpoints as they are published, and pools of layers with different heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import transformers

from common.transfers import TransferDirection
from common.types import RowSlot
from services.worker.engine.checkpoints.opening import open_checkpoint
from tests.services.worker.engine.driving import Driver, load, random_ids
from tests.services.worker.engine.families import FAMILIES, VOCABULARY, reference_logits, save_family, save_model
from tests.services.worker.engine.host_tier.test_tier import PROMPT as HOST_PROMPT
from tests.services.worker.engine.host_tier.test_tier import Engine
from tests.services.worker.engine.scenario import chunk, open_row
from tests.services.worker.engine.test_families import check_greedy, continued

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = random_ids(45, VOCABULARY)
VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def logits_of(directory: Path) -> torch.Tensor:
    runner = load(directory)
    driver = Driver(runner)
    logits = driver.run([(driver.open(len(PROMPT)), PROMPT)], all_tokens=True)
    runner.close()
    return logits


@pytest.mark.parametrize("family", ["gemma4", "gemma4 moe"])
def test_the_text_model_beside_a_vision_tower_is_served(family: str, tmp_path: Path) -> None:
    alone, whole = save_family(tmp_path / "alone", family), tmp_path / "whole"
    text = transformers.AutoModelForCausalLM.from_pretrained(alone)
    config = transformers.Gemma4Config(text_config=text.config.to_dict(), vision_config=VISION)
    both = transformers.Gemma4ForConditionalGeneration(config)
    both.model.language_model.load_state_dict(text.model.state_dict())
    both.save_pretrained(whole)
    checkpoint = open_checkpoint(str(whole), "auto")
    assert checkpoint.config.family == "gemma4_text"
    torch.testing.assert_close(logits_of(whole), reference_logits(alone, PROMPT), atol=5e-4, rtol=1e-4)


def test_layers_with_other_heads_share_pages_of_one_pool(tmp_path: Path) -> None:
    runner = load(save_family(tmp_path, "gemma4"), window_ratio=0.0)
    assert not runner.pool.window_pages
    # Two layers with two heads of 16 components, one with one of 48; keys and values in float32.
    assert runner.capacity.kv_bytes_per_token == 2 * 4 * (2 * 2 * 16 + 48)
    check_greedy(tmp_path, continued(Driver(runner)))
    runner.close()


def test_layers_whose_heads_compiled_attention_cannot_serve_lie_in_memory_as_the_others(tmp_path: Path) -> None:
    name, options = FAMILIES["gemma4"]
    runner = load(save_model(tmp_path, name, {**options, "global_head_dim": 34}), backend="compiled")
    assert {layer.keys.shape[1:] for layer in runner.pool.layers} == {(16, 2, 16), (16, 1, 34)}, "token by token"
    check_greedy(tmp_path, continued(Driver(runner)))
    runner.close()


@pytest.mark.parametrize("kv_dtype", ["float32", "fp8"])
@pytest.mark.parametrize("family", ["gemma4", "gemma4 moe"])
def test_rows_continue_the_same_from_the_host_tier(family: str, kv_dtype: str, tmp_path: Path) -> None:
    engine = Engine(save_family(tmp_path, family), kv_dtype=kv_dtype)
    cold = engine.generate([0, 1, 2, 3, 4])
    engine.move(TransferDirection.DEVICE_TO_HOST, [0, 1, 2], [9, 4, 5])
    device, host = engine.engine.device_pages, engine.engine.host_pages
    assert device is not None
    assert host is not None
    assert host.page_bytes == 16 * engine.capacity.kv_bytes_per_token
    # Workers of other groups read what the host tier keeps.
    held = device.form.held
    content = device.read_pages([0, 1, 2], held)
    assert content == b"".join(host.read_page(page) for page in (9, 4, 5))
    engine.run(opens=(open_row(1, HOST_PROMPT[::-1], [0, 1, 2, 3, 4], total=70),), prefills=(chunk(1, 0, 64),))
    engine.run(closes=(RowSlot(1),))
    engine.move(TransferDirection.HOST_TO_DEVICE, [20, 7, 13], [9, 4, 5])
    assert engine.generate([20, 7, 13, 8, 9], computed=48) == cold
    assert device.read_pages([20, 7, 13], held) == content != device.read_pages([0, 1, 2], held)
