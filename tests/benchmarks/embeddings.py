"""Embeddings per second: the bundled encoder through all services, beside reference implementations in this process.

`python -m tests.benchmarks.embeddings` starts a deployment of its own and measures it and its peers in turn, with the
same texts and the same number of threads. `sentence-transformers` takes part if it is installed.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import importlib.util
import random
import shlex
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import httpx
import numpy as np
import torch
from rich.table import Table

from common.models import resolve
from deploy.bench.deployments import LaunchedDeployment
from deploy.bench.figures import Spread
from deploy.bench.report import output_console
from deploy.bench.results import Provenance, ResultSheet, write_results

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from numpy.typing import NDArray

MODEL = "all-minilm-l6-v2"
# Each is one token.
WORDS = (
    "the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "with", "as", "his", "they", "be",
    "house", "tree", "river", "engine", "music", "market", "winter", "paper", "light", "voice", "number", "window",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Load:
    """How texts are asked for: so many in one request, so many requests at a time."""

    name: str
    batch: int
    concurrency: int


LOADS = (Load("64 texts a request, 4 requests at a time", 64, 4), Load("one by one, 32 at a time", 1, 32))


class Peer(Protocol):
    """Another implementation, called in this process."""

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings of all texts, [texts, components] of length 1."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.embeddings", description=__doc__)
    parser.add_argument("--texts", type=int, default=512, help="how many (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement (%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the deployment")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args(argv)
    texts = make_texts(arguments.texts)
    rows: list[tuple[str, Spread, float]] = []
    peers = make_peers()
    expected = peers["transformers"](texts)
    with LaunchedDeployment(None, arguments.set, [f"model.reference={MODEL}"]) as launched:
        for load in LOADS:
            measured = repeat(arguments.repeats, lambda load=load: asyncio.run(ask(launched.url, texts, load)))
            rows.append((f"Pando, {load.name}", measured[0], difference(measured[1], expected)))
        # Beside a server that is idle, which takes no time.
        for name, peer in peers.items():
            measured = repeat(arguments.repeats, lambda peer=peer: peer(texts))
            rows.append((name, measured[0], difference(measured[1], expected)))
    show(rows, len(texts))
    if arguments.json is not None:
        command = shlex.join([parser.prog, *(sys.argv[1:] if argv is None else argv)])
        write(arguments.json, rows, len(texts), replace(Provenance.collect(()), command=command))
    return 0


def make_texts(count: int) -> list[str]:
    """Return texts of 4 to 120 words, short ones more often, the same at every call."""
    generator = random.Random(0)
    return [" ".join(generator.choices(WORDS, k=round(4 * 30 ** generator.random()))) for _ in range(count)]


def repeat(count: int, run: Callable[[], NDArray[np.float32]]) -> tuple[Spread, NDArray[np.float32]]:
    """Return the seconds that `run` takes, after one run that does not count, and what it returned."""
    result = run()
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - started)
    return Spread.of(seconds), result


async def ask(url: str, texts: Sequence[str], load: Load) -> NDArray[np.float32]:
    """Return the embeddings of all texts from the server at `url`."""
    limit = asyncio.Semaphore(load.concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as client:

        async def part(first: int) -> list[str]:
            body = {"model": MODEL, "input": texts[first : first + load.batch], "encoding_format": "base64"}
            async with limit:
                answer = await client.post("/v1/embeddings", json=body)
            answer.raise_for_status()
            return [entry["embedding"] for entry in answer.json()["data"]]

        parts: Sequence[Awaitable[list[str]]] = [part(first) for first in range(0, len(texts), load.batch)]
        encoded = [embedding for embeddings in await asyncio.gather(*parts) for embedding in embeddings]
    return np.stack([decoded(embedding) for embedding in encoded])


def decoded(embedding: str) -> NDArray[np.float32]:
    """Return an embedding that came as base64."""
    return np.frombuffer(base64.b64decode(embedding), "<f4")


def make_peers() -> dict[str, Peer]:
    """Return the implementations that are installed, loaded."""
    path = str(resolve(MODEL).path)
    peers: dict[str, Peer] = {"transformers": Transformers(path)}
    if importlib.util.find_spec("sentence_transformers") is not None:
        # Whoever wants to compare with it installs it: it has no types here.
        sentence_transformers: Any = importlib.import_module("sentence_transformers")
        model = sentence_transformers.SentenceTransformer(path, device="cpu")
        peers["sentence-transformers"] = lambda texts: model.encode(
            list(texts), batch_size=32, normalize_embeddings=True, show_progress_bar=False
        )
    return peers


class Transformers:
    """`transformers` in float32, used as `sentence-transformers` does: batches of 32, long texts first."""

    def __init__(self, path: str) -> None:
        """Load the model."""
        import transformers

        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path)
        self._model: Any = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings of all texts."""
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        vectors = np.empty((len(texts), self._model.config.hidden_size), np.float32)
        for first in range(0, len(order), 32):
            chosen = order[first : first + 32]
            batch = self._tokenizer([texts[i] for i in chosen], padding=True, truncation=True, return_tensors="pt")
            mask = batch["attention_mask"].unsqueeze(-1)
            sums = (self._model(**batch).last_hidden_state * mask).sum(1)
            vectors[chosen] = torch.nn.functional.normalize(sums, dim=1).numpy()
        return vectors


def difference(vectors: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Return the largest difference of a component."""
    return float(np.abs(vectors - expected).max())


def show(rows: Sequence[tuple[str, Spread, float]], texts: int) -> None:
    """Print one line per measurement."""
    table = Table(title=f"{texts} texts, {torch.get_num_threads()} threads", title_justify="left")
    for name in ("", "texts/s", "from … to", "largest difference"):
        table.add_column(name, justify="left" if not name else "right")
    for name, seconds, worst in rows:
        spread = f"{texts / seconds.high:.0f} … {texts / seconds.low:.0f}"
        table.add_row(name, f"{texts / seconds.median:.0f}", spread, f"{worst:.1e}")
    output_console().print(table)


def write(path: Path, rows: Sequence[tuple[str, Spread, float]], texts: int, provenance: Provenance) -> None:
    """Keep the figures in the results file `path`."""
    for name, seconds, _ in rows:
        sheet = ResultSheet("embeddings", MODEL, 1, provenance, label=name)
        rates = Spread(texts / seconds.median, texts / seconds.high, texts / seconds.low, seconds.repeats)
        sheet.add_spread("throughput", rates, "texts/s")
        write_results(path, sheet.results)


if __name__ == "__main__":
    sys.exit(main())
