"""gpt-oss with experts in MXFP4, from safetensors and GGUF, against `transformers` with the weights dequantised."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from common.errors import ConfigurationError
from services.worker.engine import rank_model
from services.worker.engine.backends import select_dtype
from services.worker.engine.checkpoints.dummy import DummyCheckpoint
from services.worker.engine.checkpoints.gguf_file import GgufCheckpoint
from services.worker.engine.checkpoints.safetensors_directory import read_config
from services.worker.engine.model.config_json import config_from_json
from services.worker.engine.model.tensors import CheckedTensors
from services.worker.engine.quantization.grouped import GroupedMatrix, Numbers
from services.worker.engine.quantization.mxfp4 import quantise
from tests.services.worker.engine.checkpoints.gguf_writing import write_gguf
from tests.services.worker.engine.driving import Driver, load, random_ids
from tests.services.worker.engine.families import VOCABULARY, reference_logits, save_family
from tests.services.worker.engine.mxfp4_checkpoints import save_published
from tests.services.worker.engine.quantization.fp8_checkpoints import change_config
from tests.services.worker.engine.test_families import as_rank, check_greedy, continued

if TYPE_CHECKING:
    from pathlib import Path

    from services.worker.engine.kernels.interface import KernelBackend
    from tests.services.worker.engine.parallel.ranks import Ranks

EXPERT = "mlp.experts.3.gate_proj"


@pytest.mark.parametrize("backend", ["torch", "compiled"])
def test_published_checkpoints_continue_as_transformers_does(backend: str, tmp_path: Path) -> None:
    published, wide = save_published(tmp_path)
    check_greedy(wide, continued(Driver(load(published, backend=backend))))


def test_two_ranks_cut_experts_between_blocks(ranks: Ranks, tmp_path: Path) -> None:
    published, wide = save_published(tmp_path)
    first, second = ranks.run(as_rank, 2, str(published), "compiled")
    assert first == second
    check_greedy(wide, first)


def test_more_ranks_than_blocks_are_refused(tmp_path: Path) -> None:
    published, _ = save_published(tmp_path)
    with pytest.raises(ConfigurationError, match="tensor parallelism over 3 ranks leaves some without work"):
        load(published, rank=0, world_size=3, rendezvous="127.0.0.1:1")


def test_gguf_files_in_mxfp4_give_the_logits_of_the_same_weights(tmp_path: Path) -> None:
    _, wide = save_published(tmp_path)
    path = write_gguf(
        tmp_path / "model.gguf", read_config(wide), load_file(wide / "model.safetensors"),
        GGMLQuantizationType.MXFP4, wide=("bias", "attn", "embd", "output", "ffn_gate_inp"),
    )  # fmt: skip
    runner = load(path)
    prompt = random_ids(60, VOCABULARY)
    driver = Driver(runner)
    got = driver.run([(driver.open(60), prompt)], all_tokens=True)
    # llama.cpp chooses other scales where values fill only a part of the range: the file decides.
    checkpoint = GgufCheckpoint(path)
    tensors = load_file(wide / "model.safetensors")
    for layer in range(checkpoint.config.layers):
        for i in range(6):
            of = f"model.layers.{layer}.mlp.experts.{i}"
            packed = [checkpoint.packed(f"{of}.{part}_proj.weight") for part in ("gate", "up", "down")]
            assert all(isinstance(each, GroupedMatrix) and each.numbers is Numbers.E2M1 for each in packed)
            gate, up, down = (each.widened(torch.float32) for each in packed if each is not None)
            stem = f"model.layers.{layer}.mlp.experts"
            tensors[f"{stem}.gate_up_proj"][i] = torch.stack((gate, up), dim=1).flatten(0, 1).t()
            tensors[f"{stem}.down_proj"][i] = down.t()
    save_file(tensors, wide / "model.safetensors")
    torch.testing.assert_close(got, reference_logits(wide, prompt), atol=3e-4, rtol=1e-4)


@pytest.mark.slow
def test_the_gpus_programs_continue_as_transformers_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter: decoding rows, chunks and experts together."""
    pytest.importorskip("triton", reason="its interpreter runs the programs where there is no GPU")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    from services.worker.engine.kernels.gpu.attention import TorchChunkAttention
    from services.worker.engine.kernels.gpu.backend import GpuBackend

    class Interpreted(GpuBackend):
        name = "interpreted"
        _chunk_attention = staticmethod(TorchChunkAttention)

    def interpreted(_: object, dtype: torch.dtype, device: torch.device, threads: int) -> KernelBackend:
        return Interpreted(dtype, device, max_rows=8)

    monkeypatch.setattr(rank_model, "select_backend", interpreted)
    published, wide = save_published(tmp_path)
    driver = Driver(load(published, backend="torch"))
    rows, prompts = [driver.open(40) for _ in range(2)], [random_ids(25, VOCABULARY, seed=1), random_ids(9, VOCABULARY)]
    work = [list(prompt) for prompt in prompts]
    for _ in range(3):
        logits = driver.run(list(zip(rows, work, strict=True)))
        for prompt, got in zip(prompts, logits, strict=True):
            torch.testing.assert_close(got, reference_logits(wide, prompt)[-1], atol=3e-4, rtol=1e-4)
        work = [[token] for token in logits.argmax(dim=-1).tolist()]
        for prompt, new in zip(prompts, work, strict=True):
            prompt += new


def test_dummy_weights_are_in_mxfp4_too(tmp_path: Path) -> None:
    published, _ = save_published(tmp_path)
    (published / "model.safetensors").unlink()
    prompt, logits = random_ids(40, VOCABULARY), []
    for backend in ("torch", "compiled"):
        driver = Driver(load(published, backend=backend, load_format="dummy"))
        logits.append(driver.run([(driver.open(40), prompt)]))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
    tensors = CheckedTensors(DummyCheckpoint(read_config(published)), torch.device("cpu"), quantise)
    experts, others = (tensors.matrix(f"model.layers.1.{name}.weight") for name in (EXPERT, "self_attn.q_proj"))
    assert isinstance(experts, GroupedMatrix)
    assert isinstance(others, torch.Tensor)


def test_float16_is_refused_on_gpus_and_replaced_where_files_are_in_it(tmp_path: Path) -> None:
    for config in (
        read_config(save_family(tmp_path, "gpt-oss")),
        config_from_json({"model_type": "gpt_oss", "torch_dtype": "float16"}),
    ):
        assert config.overflows_float16
        with pytest.raises(ConfigurationError, match="activations of gpt_oss overflow in float16; use dtype=bfloat16"):
            select_dtype("float16", config, torch.device("cuda"), None)
    assert config.dtype == "float16"
    assert select_dtype("auto", config, torch.device("cuda"), None) == torch.bfloat16


@pytest.mark.parametrize(("option", "value"), [("swiglu_limit", 5.0), ("swiglu_alpha", 1.0)])
def test_other_activations_are_refused(option: str, value: float, tmp_path: Path) -> None:
    save_family(tmp_path, "gpt-oss")
    change_config(tmp_path, **{option: value})
    with pytest.raises(ConfigurationError, match=f"{option}: {value} is not supported"):
        load(tmp_path)


def test_what_files_omit_is_that_of_transformers() -> None:
    from transformers import GptOssConfig

    stated = json.loads(GptOssConfig().to_json_string())
    assert config_from_json({"model_type": "gpt_oss"}) == config_from_json({**stated, "model_type": "gpt_oss"})
    read = config_from_json({"model_type": "gpt_oss"})
    assert (read.windows[:3], read.has_sinks, read.rotary.amplitude > 1) == ((128, None, 128), True, True)


@pytest.mark.parametrize("stated", [[200002, 199999], [200002, 199999, 200012]])
def test_calls_end_outputs_also_where_files_do_not_say_so(stated: list[int]) -> None:
    read = config_from_json({"model_type": "gpt_oss"}, {"eos_token_id": stated})
    assert read.eos_token_ids == (200002, 199999, 200012)
