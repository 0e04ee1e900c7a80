"""Families that have no implementation here, against `transformers` itself."""

from __future__ import annotations

import importlib.util
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch

from common.errors import ConfigurationError
from tests.services.worker.engine.driving import Driver, load, random_ids
from tests.services.worker.engine.families import VOCABULARY, reference_logits, save_model
from tests.services.worker.engine.test_families import check_greedy, continued

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = random_ids(70, VOCABULARY)
GPT2: dict[str, Any] = {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 512}
# What each has that Llama has not is said where it is not in its name.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "starcoder2": ("Starcoder2", {"sliding_window": 20}),  # layer norms and biases
    "cohere": ("Cohere", {"logit_scale": 0.5}),  # attention beside the feed-forward layer, pairs rotated side by side
    "stablelm": ("StableLm", {"hidden_size": 64, "partial_rotary_factor": 0.5}),  # layer norms
    "vaultgemma": ("VaultGemma", {"sliding_window": 20}),  # capped scores, every other layer with a window
    "cohere2": (
        "Cohere2",
        {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "gpt neox": ("GPTNeoX", {}),  # attention beside the feed-forward layer
    "gpt2": ("GPT2", GPT2),  # learned positions
    "opt": ("OPT", {"ffn_dim": 80, "word_embed_proj_dim": 48}),  # a decoder within its model
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64}),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "bloom": ("Bloom", {"n_head": 4, "n_layer": 3}, "takes no position_ids"),
    "mamba": ("Mamba", {}, "takes no position_ids"),
    "bert": ("Bert", {"is_decoder": False}, "looks ahead"),
}


@pytest.mark.parametrize("family", OTHERS)
def test_logits_and_greedy_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    save_model(tmp_path, *OTHERS[family])
    runner = load(tmp_path)
    driver = Driver(runner)
    logits = driver.run([(driver.open(70), PROMPT)], all_tokens=True)
    torch.testing.assert_close(logits, reference_logits(tmp_path, PROMPT), atol=5e-4, rtol=1e-4)
    check_greedy(tmp_path, continued(driver))
    runner.close()


def test_rows_share_the_pages_of_a_prefix(tmp_path: Path) -> None:
    save_model(tmp_path, *OTHERS["cohere"])
    driver = Driver(load(tmp_path))
    expected = [driver.run([(driver.open(40), [*PROMPT[:32], extra])]) for extra in (3, 4)]
    first = driver.open(40)
    driver.run([(first, PROMPT[:32])])
    rows = [driver.open(40) for _ in range(2)]
    for row in rows:
        row.pages[:2] = first.pages[:2]
        row.computed = PROMPT[:32]
    got = driver.run([(rows[0], [3]), (rows[1], [4])])
    torch.testing.assert_close(got, torch.cat(expected), atol=1e-4, rtol=1e-4)


def test_a_warning_says_that_it_is_slower(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_model(tmp_path, *OTHERS["gpt2"])
    with caplog.at_level(logging.WARNING):
        load(tmp_path, load_format="dummy")
    assert "'gpt2' here: it runs through transformers with Pando's attention, slower" in caplog.text


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_logits_stay_close_to_the_reference(dtype: str, tmp_path: Path) -> None:
    save_model(tmp_path, *OTHERS["cohere"])
    driver = Driver(load(tmp_path, dtype=dtype))
    got = driver.run([(driver.open(70), PROMPT)], all_tokens=True)
    expected = reference_logits(tmp_path, PROMPT)
    assert 0 < (got - expected).norm() / expected.norm() < 0.1


@pytest.mark.parametrize("family", REFUSED)
def test_families_that_need_other_attention_are_refused(family: str, tmp_path: Path) -> None:
    name, options, complaint = REFUSED[family]
    save_model(tmp_path, name, options)
    with pytest.raises(ConfigurationError, match=complaint):
        load(tmp_path)


def test_attention_that_cannot_be_replaced_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "falcon", "hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 9}'
    )
    with pytest.raises(
        ConfigurationError, match="'falcon' cannot be served through transformers: its attention cannot"
    ):
        load(tmp_path, load_format="dummy")


def test_several_ranks_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path, *OTHERS["starcoder2"])
    with pytest.raises(ConfigurationError, match="'starcoder2' runs through transformers, on one rank"):
        load(tmp_path, world_size=2, rendezvous="127.0.0.1:1")


def test_quantised_weights_are_refused_by_the_name_of_their_key(tmp_path: Path) -> None:
    config = {"model_type": "starcoder2", "quantization_config": {"quant_method": "awq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match="quantization_config: weights quantised by 'awq'"):
        load(tmp_path, load_format="dummy")


def test_the_error_of_an_unknown_family_names_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "hyperion"}')
    with pytest.raises(ConfigurationError, match="'hyperion' is neither one of Pando's own nor known to transformers"):
        load(tmp_path, load_format="dummy")


def test_without_the_library_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path, *OTHERS["starcoder2"])
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "transformers" else find(name, *rest)
    )
    with pytest.raises(ConfigurationError, match=r"pip install '\.\[transformers\]'"):
        load(tmp_path)
