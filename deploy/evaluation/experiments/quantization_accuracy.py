"""Predictions with quantised weights beside those with weights as they are; see `quantization.py`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from common.errors import ConfigurationError
from common.models import resolve_model
from common.steps import EngineSpec
from common.tokenization import load_text_model
from deploy.evaluation.bench.results import write_results
from deploy.evaluation.experiments.gguf_quantization import kind_of, quantise
from deploy.evaluation.experiments.precision import TEXTS, Comparison, compare
from deploy.evaluation.experiments.quantization_methods import choose
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.checkpoints.opening import open_checkpoint
from services.worker.engine.loader import load_decoder
from services.worker.engine.transformers_models.checkpoint import TransformersCheckpoint
from tests.services.worker.engine.checkpoints.gguf_writing import write_gguf
from tests.services.worker.engine.driving import Driver
from tests.services.worker.engine.quantization.stored_formats import SCHEMES, store_quantised

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from gguf import GGMLQuantizationType
    from numpy.typing import NDArray

    from deploy.evaluation.bench.results import ResultSheet

    Ids = Sequence[Sequence[int]]
    from services.worker.engine.model.config import ModelConfig

ROOT = Path(__file__).parents[3]
PROMPT_TOKENS = 64
WIDE, FP8, FP8_KV = "wide", "fp8", "fp8 keys and values"
# After the name of a scheme: weights are chosen by a published method.
CALIBRATED = ", calibrated"
# Before a kind of GGUF's blocks, or `Q4_K_M`: the matrices are stored in a GGUF file.
GGUF = "gguf "
# What it is calibrated with: other texts than those that are predicted.
CALIBRATION_TEXTS = (
    "CONTRIBUTING.md", "docs/architecture.md", "docs/operations.md", "docs/privacy.md", "gateway/API.md",
    "common/limits.py", "deploy/RECIPES.md", "docs/observability.md",
)  # fmt: skip
CALIBRATION_TOKENS = 256
_MATRICES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_FEED_FORWARD = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True, slots=True)
class Agreement:
    """Comparison of continuations with those of wider weights."""

    same: float
    """Share of tokens that are the likeliest ones, too, after the same tokens."""
    same_until: float
    """Mean number of tokens before the first one that is another."""


class Predictor:
    """One loaded model."""

    def __init__(self, arguments: argparse.Namespace, model: str, longest: int, kind: str = WIDE) -> None:
        """Load `model` for texts of `longest` tokens."""
        rows = arguments.prompts
        spec = EngineSpec(
            model, dtype=arguments.dtype, quantization=FP8 if kind == FP8 else "auto",
            kv_dtype="fp8" if kind == FP8_KV else "auto", max_rows=rows,
            max_step_tokens=max(longest, rows * (PROMPT_TOKENS + arguments.new_tokens)),
            device_pages=max(-(-longest // 16), rows * -(-(PROMPT_TOKENS + arguments.new_tokens) // 16)) + 1,
        )  # fmt: skip
        self._runner = load_decoder(spec, lambda *_: None, RunnerOptions(device=arguments.device))

    @torch.inference_mode()
    def log_probabilities(self, texts: Ids) -> list[torch.Tensor]:
        """Return those of each text's next tokens, [tokens, vocabulary]."""
        drivers = [(Driver(self._runner), list(text)) for text in texts]
        return [
            torch.log_softmax(driver.run([(driver.open(len(text)), text)], all_tokens=True).float().cpu(), dim=-1)
            for driver, text in drivers
        ]

    @torch.inference_mode()
    def continued(self, prompts: Ids, tokens: int) -> list[list[int]]:
        """Return the greedy continuations, decoded together."""
        driver = Driver(self._runner)
        rows = [driver.open(len(prompt) + tokens) for prompt in prompts]
        work, generated = [list(prompt) for prompt in prompts], [[] for _ in prompts]  # type: list[list[int]], list[list[int]]
        for _ in range(tokens):
            chosen = driver.run(list(zip(rows, work, strict=True))).argmax(dim=-1).tolist()
            work = [[token] for token in chosen]
            for ids, token in zip(generated, chosen, strict=True):
                ids.append(token)
        return generated

    def close(self) -> None:
        """Give the memory back."""
        self._runner.close()


def measure_accuracy(arguments: argparse.Namespace, sheet: Callable[[str, str], ResultSheet]) -> list[ResultSheet]:
    """Print and return the figures."""
    paths = arguments.texts or [ROOT / name for name in TEXTS]
    texts, prompts = read_texts(arguments.model, paths, arguments.tokens, arguments.prompts)
    longest = max(map(len, texts))
    results = sheet(Path(arguments.model).name, f"{arguments.dtype}, {arguments.tokens} tokens")
    wide = Predictor(arguments, arguments.model, longest)
    expected, continuations = wide.log_probabilities(texts), wide.continued(prompts, arguments.new_tokens)
    wide.close()
    show(WIDE, compare(texts, expected, expected), results)
    whole = [[*prompt, *ids[:-1]] for prompt, ids in zip(prompts, continuations, strict=True)]
    for kind in (FP8, *arguments.formats):
        with TemporaryDirectory(prefix="pando-copy-") as folder:
            is_same = kind in (FP8, FP8_KV)
            path = Path(folder) / ("model.gguf" if kind.startswith(GGUF) else "model")
            model = arguments.model if is_same else str(write_copy(arguments.model, kind, path))
            predictor = Predictor(arguments, model, longest, kind)
        predicted, agreement = (
            predictor.log_probabilities(texts),
            agree(predictor.log_probabilities(whole), continuations),
        )
        predictor.close()
        show(kind, compare(texts, predicted, expected), results)
        for metric, value, unit in (
            (f"{kind}: greedy tokens that are the same", 100 * agreement.same, "%"),
            (f"{kind}: tokens until the first other one", agreement.same_until, "tokens"),
        ):
            print(f"{metric}: {value:.2f} {unit}", flush=True)  # noqa: T201
            results.add(metric, value, unit)
        if arguments.json is not None:  # formats take minutes: what is measured stays if the rest is not
            write_results(arguments.json, results.results)
    return [results]


def read_texts(model: str, paths: Sequence[Path], tokens: int, prompts: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ids of the texts' beginnings, and prompts that are cut out of them evenly."""
    tokenizer = load_text_model(resolve_model(model)).tokenizer
    texts = [tokenizer.encode(path.read_text()).ids[:tokens] for path in paths]
    flat = [token for text in texts for token in text]
    step = max(1, (len(flat) - PROMPT_TOKENS) // prompts)
    return texts, [flat[i * step : i * step + PROMPT_TOKENS] for i in range(prompts)]


def agree(predicted: Sequence[torch.Tensor], continuations: Ids) -> Agreement:
    """Compare the likeliest tokens after prompts and their continuations with these."""
    same: list[torch.Tensor] = []
    for log_probabilities, ids in zip(predicted, continuations, strict=True):
        same.append(log_probabilities[-len(ids) :].argmax(dim=-1) == torch.tensor(ids))
    until = [float(each.long().cumprod(0).sum()) for each in same]
    return Agreement(float(torch.cat(same).double().mean()), sum(until) / len(until))


def show(kind: str, comparison: Comparison, results: ResultSheet) -> None:
    """Print and keep what texts' predictions give."""
    print(f"{kind:5} {comparison}")  # noqa: T201
    results.add(f"{kind}: negative log likelihood", comparison.likelihood, "nats")
    results.add(f"{kind}: perplexity", math.exp(comparison.likelihood), "")
    if kind != WIDE:
        results.add(f"{kind}: divergence", comparison.divergence, "nats")
        results.add(f"{kind}: likeliest tokens that are the same", 100 * comparison.same, "%")


def write_copy(model: str, scheme: str, path: Path) -> Path:
    """Write the model to `path`, in a scheme of the tests', also with `CALIBRATED`, or one with `GGUF`; return that.

    Raises:
        ConfigurationError: it is no plain Llama.
    """
    checkpoint = open_checkpoint(model, "auto")
    config = checkpoint.config
    if isinstance(checkpoint, TransformersCheckpoint) or config.family != "llama" or config.rotary.frequency_divisors:
        raise ConfigurationError(f"{model}: only a Llama without scaled rotary embedding is copied")
    names = ["model.embed_tokens", "model.norm", *([] if config.tied_embeddings else ["lm_head"])]
    parts = (*_MATRICES, *_FEED_FORWARD, *_NORMS)
    names += [f"model.layers.{layer}.{part}" for layer in range(config.layers) for part in parts]
    tensors = {f"{name}.weight": checkpoint.read(f"{name}.weight").contiguous() for name in names}
    if scheme.startswith(GGUF):
        return _write_gguf(path, config, tensors, scheme.removeprefix(GGUF))
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(_described(config)), encoding="utf-8")
    chosen = {}
    if scheme.endswith(CALIBRATED):
        scheme = scheme.removesuffix(CALIBRATED)
        texts, _ = read_texts(model, [ROOT / name for name in CALIBRATION_TEXTS], CALIBRATION_TOKENS, 1)
        chosen = choose(path, scheme, texts)
    store_quantised(path, SCHEMES[scheme], chosen=chosen)
    return path


def _write_gguf(path: Path, config: ModelConfig, tensors: Mapping[str, torch.Tensor], mixture: str) -> Path:
    def blocks(name: str, values: NDArray[np.float32]) -> tuple[GGMLQuantizationType, NDArray[np.uint8]]:
        kind = kind_of(mixture, name, values.shape[-1], config.layers, is_tied=config.tied_embeddings)
        return kind, quantise(values, kind)

    return write_gguf(path, config, {name: tensor.float() for name, tensor in tensors.items()}, blocks_for=blocks)


def _described(config: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": config.vocabulary_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.query_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rotary.theta,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": "bfloat16",
    }
