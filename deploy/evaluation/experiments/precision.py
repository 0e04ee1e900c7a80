"""Predictions with narrower weights, compared with float32.

Run as `python -m deploy.evaluation.experiments.precision [TEXT …]`.

Every token of the texts is predicted from all before it. Printed are the mean negative log likelihood (nats per token),
the mean Kullback-Leibler divergence from float32, and how often the likeliest token is the same.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoTokenizer

from common.models import resolve_model
from tests.services.worker.engine.driving import Driver, load

if TYPE_CHECKING:
    from collections.abc import Sequence

BUNDLED = "smollm2-135m-instruct"
ROOT = Path(__file__).parents[3]
TEXTS = ("README.md", "services/scheduler/README.md", "services/scheduler/cache/README.md", "common/errors.py")
KINDS = (
    ("float32", "auto"),
    ("float32", "fp8"),
    ("bfloat16", "float32"),
    ("bfloat16", "float16"),
    ("bfloat16", "bfloat16"),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of predictions with others, over all tokens."""

    likelihood: float
    """Mean negative log likelihood, nats per token."""
    divergence: float
    """Mean Kullback-Leibler divergence from the others, nats."""
    same: float
    """Share of positions at which the likeliest token is the same, in [0, 1]."""

    def __str__(self) -> str:
        """Return one line for people."""
        return f"NLL {self.likelihood:.4f}  KL {self.divergence:.1e}  same likeliest token {self.same:.2%}"


def main() -> int:
    """Print one line per type of weights and of keys and values; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024, help="of each text, at most (%(default)s)")
    parser.add_argument("texts", nargs="*", type=Path, default=[ROOT / name for name in TEXTS])
    arguments = parser.parse_args()
    file = resolve_model(BUNDLED).path
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)
    texts = [tokenizer(path.read_text())["input_ids"][: arguments.tokens] for path in arguments.texts]
    reference: list[torch.Tensor] = []
    for dtype, kv_dtype in KINDS:
        predicted = predict(texts, dtype, kv_dtype)
        reference = reference or predicted
        print(f"weights {dtype:9} KV {kv_dtype:9} {compare(texts, predicted, reference)}")  # noqa: T201
    return 0


@torch.inference_mode()
def predict(texts: Sequence[list[int]], dtype: str, kv_dtype: str) -> list[torch.Tensor]:
    """Return the log probabilities [tokens, vocabulary] of each text's next tokens."""
    longest = max(map(len, texts))
    runner = load(BUNDLED, threads=0, dtype=dtype, kv_dtype=kv_dtype, device_pages=128, max_step_tokens=longest)
    predicted = []
    for token_ids in texts:
        driver = Driver(runner)
        logits = driver.run([(driver.open(len(token_ids)), list(token_ids))], all_tokens=True)
        predicted.append(torch.log_softmax(logits.float(), dim=-1))
    runner.close()
    return predicted


def compare(texts: Sequence[list[int]], predicted: list[torch.Tensor], reference: list[torch.Tensor]) -> Comparison:
    """Return the figures over all texts."""
    likelihood = divergence = equal = 0.0
    for token_ids, log_probabilities, exact in zip(texts, predicted, reference, strict=True):
        likelihood -= log_probabilities[:-1].gather(1, torch.tensor(token_ids[1:])[:, None]).sum().item()
        divergence += (exact.exp() * (exact - log_probabilities)).sum().item()
        equal += (log_probabilities.argmax(-1) == exact.argmax(-1)).sum().item()
    tokens = sum(map(len, texts))
    return Comparison(likelihood / (tokens - len(texts)), divergence / tokens, equal / tokens)


if __name__ == "__main__":
    raise SystemExit(main())
