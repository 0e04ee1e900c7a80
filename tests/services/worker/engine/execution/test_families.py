"""Whole models on a GPU, with its own kernels and captured passes, against `transformers` in float32 on the CPU."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.steps import EngineSpec
from deploy.models.facts import Evidence, facts_of
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.loader import load_decoder
from tests.services.worker.engine.driving import Driver, load, random_ids
from tests.services.worker.engine.families import FAMILIES, OTHERS, VOCABULARY, reference_logits, save_model
from tests.services.worker.engine.test_cuda import PROMPTS, generate
from tests.services.worker.engine.test_families import NEW_TOKENS, continued
from tests.services.worker.engine.test_families import PROMPTS as FAMILY_PROMPTS

pytestmark = pytest.mark.gpu

PROMPT = random_ids(70, VOCABULARY)
# A factor for each of the 24 pairs that heads of 64 components rotate.
_FACTORS = {"short_factor": [1 + i / 12 for i in range(24)], "long_factor": [1 + i / 3 for i in range(24)]}
# Head sizes that FlashInfer has kernels for.
OWN = {
    "qwen3 moe": {"head_dim": 64, "hidden_size": 64, "num_experts": 16, "num_experts_per_tok": 4},
    "qwen3 moe partly dense": {"head_dim": 64, "hidden_size": 64},
    "gemma3": {"head_dim": 256, "hidden_size": 64},
    "mistral windowed": {"head_dim": 128, "hidden_size": 64},
    "yarn": {"head_dim": 64, "hidden_size": 64},
    "mixtral": {"head_dim": 64, "hidden_size": 64},
    "gemma2": {"head_dim": 128, "hidden_size": 64},
    "gemma4": {"head_dim": 256, "global_head_dim": 512, "hidden_size": 64},
    # All experts: roundings would choose others, with a large effect on such small models.
    "gemma4 moe": {"head_dim": 64, "global_head_dim": 128, "hidden_size": 64, "top_k_experts": 6},
    "phi4": {
        "head_dim": 64,
        "hidden_size": 256,
        "rope_parameters": FAMILIES["phi4"][1]["rope_parameters"] | _FACTORS,
    },
    "granite moe shared": {"head_dim": 64, "hidden_size": 64},
    "olmo2": {"head_dim": 64, "hidden_size": 64},
    "glm4": {"head_dim": 64, "hidden_size": 64},
    "glm4 moe": {"head_dim": 64, "hidden_size": 64},
    "gpt-oss": {"head_dim": 64, "num_local_experts": 16, "num_experts_per_tok": 4},
    "deepseek v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "hidden_size": 64},
    "qwen3 next": {"head_dim": 64, "hidden_size": 64},
    "qwen3.5": {"head_dim": 64, "hidden_size": 64},
    # Chunks of whole pages, which FlashInfer attends to, and of others.
    "llama4": {"head_dim": 64, "hidden_size": 64, "attention_chunk_size": 32},
    "llama4 of two experts": {"head_dim": 64, "hidden_size": 64},
    # Of sizes for which FlashInfer has no kernels.
    "deepseek v2 lite": {"hidden_size": 64},
    "llama": {"head_dim": 64, "hidden_size": 64},
    "qwen2": {"head_dim": 64, "hidden_size": 64},
    "gemma": {"head_dim": 64, "hidden_size": 64},
    "granite": {"head_dim": 64, "hidden_size": 64},
    "olmo3": {"head_dim": 64, "hidden_size": 64},
    "glm": {"head_dim": 64, "hidden_size": 64},
    "ernie biased": {"head_dim": 64, "hidden_size": 64},
    "seed oss biased": {"head_dim": 64, "hidden_size": 64},
    "smollm3": {"head_dim": 64, "hidden_size": 64},
    "granite moe": {"head_dim": 64, "hidden_size": 64},
    "qwen2 moe": {"head_dim": 64, "hidden_size": 64},
    "qwen3.5 moe": {"head_dim": 64, "hidden_size": 64, "num_experts_per_tok": 6},
}
# Of those that run through `transformers`: one makes a tensor from numbers of the host in each pass.
CAPTURED = tuple(family for family in OTHERS if family != "gemma3n")
# Roundings to bfloat16 choose other experts, or stay in recurrent states, also where plain torch computes.
PRECISE = {"qwen3 next": "float16", "qwen3.5 moe": "float16", "glm4 moe": "float16"}
# Of the spread of logits: what narrow types may cost.
TOLERANCE = 0.1


def save_own(directory: Path, family: str) -> Path:
    name, options = FAMILIES[family]
    # Smaller weights than elsewhere: sharp attention would make roundings decide.
    return save_model(directory, name, {**options, **OWN[family], "initializer_range": 0.1})


def assert_nearly_greedy(directory: Path, prompt: list[int], tokens: list[int]) -> None:
    """Every token is about as likely as the likeliest one, in the reference's eyes."""
    logits = reference_logits(directory, prompt + tokens[:-1])[len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    spread = logits.max(dim=-1).values - logits.mean(dim=-1)
    assert ((logits.max(dim=-1).values - chosen) <= TOLERANCE * spread).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", OWN)
def test_logits_are_those_of_transformers_but_for_rounding(family: str, dtype: str, tmp_path: Path) -> None:
    if family.startswith(("gemma", "gpt-oss")) and dtype == "float16":
        pytest.skip("its activations overflow")
    save_own(tmp_path, family)
    limit = 0.05 if dtype == "bfloat16" else 0.01
    error = error_of_logits(tmp_path, "gpu", dtype)
    assert error < limit or error < 1.5 * error_of_logits(tmp_path, "torch", dtype)


def error_of_logits(directory: Path, backend: str, dtype: str) -> float:
    driver = Driver(load(directory, backend=backend, dtype=dtype))
    got = driver.run([(driver.open(70), PROMPT)], all_tokens=True).cpu()
    expected = reference_logits(directory, PROMPT)
    driver.runner.close()
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("family", OWN)
def test_rows_in_chunks_and_batches_continue_as_transformers_does(family: str, tmp_path: Path) -> None:
    save_own(tmp_path, family)
    generated = continued(Driver(load(tmp_path, backend="gpu", dtype=PRECISE.get(family, "bfloat16"))))
    for prompt, tokens in zip(FAMILY_PROMPTS, generated, strict=True):
        assert len(tokens) == NEW_TOKENS
        assert_nearly_greedy(tmp_path, prompt, tokens)


@pytest.mark.parametrize("family", OWN)
def test_captured_passes_continue_as_transformers_does(family: str, tmp_path: Path) -> None:
    save_own(tmp_path, family)
    generated = generate(str(tmp_path), "cuda", PRECISE.get(family, "bfloat16"))
    assert [len(tokens) for tokens in generated.values()] == [24] * len(PROMPTS)
    for row, tokens in generated.items():
        assert_nearly_greedy(tmp_path, list(PROMPTS[row]), tokens)


@pytest.mark.parametrize("family", ["gpt neox", "starcoder2", "vaultgemma"])
def test_other_families_run_through_transformers(family: str, tmp_path: Path) -> None:
    name, options = OTHERS[family]
    save_model(tmp_path, name, {**options, "initializer_range": 0.1})
    generated = continued(Driver(load(tmp_path, dtype="bfloat16")))
    for prompt, tokens in zip(FAMILY_PROMPTS, generated, strict=True):
        assert len(tokens) == NEW_TOKENS
        assert_nearly_greedy(tmp_path, prompt, tokens)


@pytest.mark.parametrize("family", CAPTURED)
def test_captured_passes_of_transformers_continue_as_it_does(family: str, tmp_path: Path) -> None:
    name, options = OTHERS[family]
    save_model(tmp_path, name, {**options, "initializer_range": 0.1})
    runner = load(tmp_path, dtype="bfloat16")
    assert runner.is_captured
    runner.close()
    for row, tokens in generate(str(tmp_path), "cuda", "bfloat16").items():
        assert len(tokens) == 24
        assert_nearly_greedy(tmp_path, list(PROMPTS[row]), tokens)


def test_models_of_transformers_that_wait_for_the_gpu_run_without_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXMLP

    unchanged = GPTNeoXMLP.forward

    def looks_at_numbers(layer: Any, hidden: torch.Tensor) -> Any:
        assert hidden.abs().max().item() < 1e9
        return unchanged(layer, hidden)

    monkeypatch.setattr(GPTNeoXMLP, "forward", looks_at_numbers)
    name, options = OTHERS["gpt neox"]
    save_model(tmp_path, name, {**options, "initializer_range": 0.1})
    with caplog.at_level(logging.WARNING):
        for row, tokens in generate(str(tmp_path), "cuda", "bfloat16").items():
            assert_nearly_greedy(tmp_path, list(PROMPTS[row]), tokens)
    assert "'gpt_neox' runs without CUDA graphs" in caplog.text
    assert "it waits for the GPU (test_families.py, line" in caplog.text


def test_gpt_oss_takes_the_memory_that_is_said_beforehand(tmp_path: Path) -> None:
    config = json.loads(Path("tests/deploy/models/configs/gpt-oss-20b.json").read_text())["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    stated = facts_of(Evidence(config=config)).memory
    assert stated is not None
    before = torch.cuda.memory_allocated()
    spec = EngineSpec(str(tmp_path), load_format="dummy", max_rows=4, max_context=512, max_step_tokens=256)
    runner = load_decoder(replace(spec, device_pages=32), lambda *_: None, RunnerOptions(device="cuda", backend="gpu"))
    pages = 33 * runner.capacity.page_size * runner.capacity.kv_bytes_per_token
    assert torch.cuda.memory_allocated() - before - pages == pytest.approx(stated["mxfp4"], rel=0.02)
    runner.close()


def test_mixtures_load_onto_the_device_without_weights() -> None:
    spec = EngineSpec("deploy/evaluation/shapes/qwen3-30b-a3b", load_format="dummy", max_rows=4, max_context=512,
                      max_step_tokens=256)  # fmt: skip
    runner = load_decoder(spec, lambda *_: None, RunnerOptions(device="cuda", backend="gpu"))
    # 30.5 billion weights of two bytes.
    assert torch.cuda.memory_allocated() > 60e9
    runner.close()
