"""Memory of a worker on a CPU with packed weights; see `quantization.py`."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import httpx
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES

from common.tokenization.vocabulary import byte_alphabet
from deploy.evaluation.bench.deployments import LaunchedDeployment
from deploy.evaluation.experiments.gguf_quantization import kind_of
from services.worker.engine.checkpoints.opening import open_checkpoint
from tests.services.worker.engine.checkpoints.gguf_writing import add_metadata
from tests.services.worker.engine.quantization.random_blocks import random_blocks

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from deploy.evaluation.bench.results import ResultSheet
    from services.worker.engine.model.config import ModelConfig

PAGES = 256
TOKENS_PER_PAGE = 16
_START_S = 600.0
# Of scales: weights are about as large as those of a model.
_DEVIATIONS = {Kind.Q4_K: 2e-4, Kind.Q6_K: 4e-5}
_NORMAL, _CONTROL = 1, 3


def measure_memory(arguments: argparse.Namespace, sheet: Callable[[str, str], ResultSheet]) -> list[ResultSheet]:
    """Print and return the figures."""
    results = sheet(arguments.shape.name, arguments.kind)

    def show(metric: str, value: float, unit: str) -> None:
        print(f"{metric}: {value:.2f} {unit}", flush=True)  # noqa: T201
        results.add(metric, value, unit)

    with _file(arguments) as path:
        show("file", path.stat().st_size / 1e9, "GB")
        defaults = (
            f"model.reference={path}", "model.max_context=2048", "worker.device=cpu", f"scheduler.device_pages={PAGES}",
            "scheduler.max_rows=8", "model.kv_dtype=bfloat16",
        )  # fmt: skip
        began_at = time.monotonic()
        with LaunchedDeployment(
            arguments.config, arguments.overrides, defaults, start_timeout_s=_START_S
        ) as deployment:
            show("until it serves", time.monotonic() - began_at, "s")
            worker = next(pid for name, pid in deployment.process_ids.items() if name.startswith("worker"))
            for metric, (value, unit) in _answer(deployment.url, arguments.prompt_tokens, arguments.new_tokens).items():
                show(metric, value, unit)
            memory = memory_of(worker)
            settings = deployment.settings
    show("resident, at the peak", memory["VmHWM"] / 1e9, "GB")
    show("resident, after an answer", memory["VmRSS"] / 1e9, "GB")
    show("of that mapped from files", memory["RssFile"] / 1e9, "GB")
    if settings.model.kv_dtype == "bfloat16" and settings.scheduler.device_pages is not None:
        tokens = settings.scheduler.device_pages * TOKENS_PER_PAGE
        show(f"of that keys and values of {tokens} tokens", tokens * _token_bytes(arguments.shape) / 1e9, "GB")
    return [results]


def _token_bytes(shape: Path) -> int:
    """Return the bytes of a token's keys and values in bfloat16."""
    config = open_checkpoint(str(shape), "dummy").config
    return 2 * config.layers * config.kv_heads * config.head_dim * 2


def memory_of(process: int) -> dict[str, int]:
    """Return the bytes that Linux counts of a process."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
    return {
        name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if "kB" in rest
    }


@contextmanager
def _file(arguments: argparse.Namespace) -> Iterator[Path]:
    if arguments.file is not None:
        if not arguments.file.exists():
            write_dummy(arguments.file, arguments.shape, arguments.kind)
        yield arguments.file
        return
    with TemporaryDirectory(prefix="pando-gguf-") as folder:
        yield write_dummy(
            Path(folder) / f"{arguments.shape.name}-{arguments.kind}.gguf", arguments.shape, arguments.kind
        )


def write_dummy(path: Path, shape: Path, mixture: str) -> Path:
    """Write a file with random blocks, one matrix at a time, and a vocabulary of bytes; return its path."""
    config = open_checkpoint(str(shape), "dummy").config
    writer = GGUFWriter(path, "llama")
    add_metadata(writer, config)
    _add_vocabulary(writer, config.vocabulary_size)
    vectors, matrices = _vectors(config), dict(_matrices(config))
    kinds = {
        name: kind_of(mixture, name, columns, config.layers, is_tied=config.tied_embeddings)
        for name, (_, columns) in matrices.items()
    }
    for name, values in vectors.items():
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
    for name, (rows, columns) in matrices.items():
        width, size = GGML_QUANT_SIZES[kinds[name]]
        count = rows * columns // width * size
        writer.add_tensor_info(name, (rows, columns), np.dtype(np.float32), count, raw_dtype=kinds[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for values in vectors.values():
        writer.write_tensor_data(values)
    for seed, (name, (rows, columns)) in enumerate(matrices.items()):
        kind = kinds[name]
        blocks = columns // GGML_QUANT_SIZES[kind][0]
        data = random_blocks(kind.name, rows, blocks, seed=seed, deviation=_DEVIATIONS.get(kind, 2e-3))
        writer.write_tensor_data(data.numpy())
    writer.close()
    return path


def _vectors(config: ModelConfig) -> dict[str, NDArray[np.float32]]:
    norms = [f"blk.{layer}.{part}.weight" for layer in range(config.layers) for part in ("attn_norm", "ffn_norm")]
    vectors = {name: np.ones(config.hidden_size, np.float32) for name in (*norms, "output_norm.weight")}
    if config.rotary.frequency_divisors:
        vectors["rope_freqs.weight"] = np.array(config.rotary.frequency_divisors, np.float32)
    return vectors


def _matrices(config: ModelConfig) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield names in the file, outputs and inputs."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
    yield "token_embd.weight", (config.vocabulary_size, hidden)
    for layer in range(config.layers):
        shapes = {
            "attn_q": (query, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden), "attn_output": (hidden, query),
            "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner),
        }  # fmt: skip
        for part, shape in shapes.items():
            yield f"blk.{layer}.{part}.weight", shape
    if not config.tied_embeddings:
        yield "output.weight", (config.vocabulary_size, hidden)


def _add_vocabulary(writer: GGUFWriter, size: int) -> None:
    """Add one token for each byte, and others that no text has."""
    letters = list(byte_alphabet().values())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([*letters, *(f"<{i}>" for i in range(len(letters), size))])
    writer.add_token_types([_NORMAL] * (size - 1) + [_CONTROL])
    writer.add_token_merges([])
    writer.add_bos_token_id(size - 1)
    writer.add_add_bos_token(True)


def _answer(url: str, prompt_tokens: int, new_tokens: int) -> dict[str, tuple[float, str]]:
    """Return the speeds of a request, after a short one."""
    with httpx.Client(base_url=url, timeout=_START_S, trust_env=False) as http:
        model = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        body = {"model": model, "temperature": 0, "ignore_eos": True}
        http.post("/v1/completions", json={**body, "prompt": "a", "max_tokens": 2}).raise_for_status()
        prompt = "".join(chr(ord("a") + i % 26) for i in range(prompt_tokens - 1))
        started, times = time.monotonic(), list[float]()
        wanted = {**body, "prompt": prompt, "max_tokens": new_tokens, "stream": True, "return_token_ids": True}
        with http.stream("POST", "/v1/completions", json=wanted) as response:
            response.raise_for_status()
            counts = []
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if not line.startswith("data: ") or data == "[DONE]":
                    continue
                choices = json.loads(data)["choices"]
                ids = choices[0].get("token_ids") if choices else None
                if ids:
                    times.append(time.monotonic())
                    counts.append(len(ids))
    assert sum(counts) == new_tokens, counts
    return {
        "prompt": (prompt_tokens / (times[0] - started), "tok/s"),
        "answer, 1 row": ((new_tokens - counts[0]) / (times[-1] - times[0]), "tok/s"),
    }
