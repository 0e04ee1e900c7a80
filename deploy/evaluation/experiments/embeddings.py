"""Embeddings per second: the bundled encoder through all services, beside reference implementations in this process.

`python -m deploy.evaluation.experiments.embeddings` starts a deployment of its own and measures it and its
peers in turn, with the same texts and the same number of threads. `sentence-transformers` takes part if it is
installed. Processor time is that of all services, or of this process; it says more than the rate where others use the
machine, too.
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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import httpx
import numpy as np
import psutil
import torch
from rich.table import Table

from common.models import resolve_model
from deploy.evaluation.bench.deployments import LaunchedDeployment
from deploy.evaluation.bench.figures import Spread
from deploy.evaluation.bench.report import output_console
from deploy.evaluation.bench.results import Provenance, ResultSheet, write_results

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
    """Load by requests for embeddings: so many texts in one, so many requests at a time."""

    name: str
    batch: int
    concurrency: int


LOADS = (Load("64 texts a request, 4 requests at a time", 64, 4), Load("one by one, 32 at a time", 1, 32))


@dataclass(frozen=True, slots=True)
class EmbeddingsResult:
    """One implementation under one load: seconds for all texts, and the largest difference from the reference."""

    name: str
    seconds: Spread
    processor_seconds: Spread
    difference: float


class Peer(Protocol):
    """Another implementation, called in this process."""

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings of all texts, [texts, components] of length 1."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m deploy.evaluation.experiments.embeddings", description=__doc__)
    parser.add_argument("--texts", type=int, default=512, help="how many (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement (%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the deployment")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args(argv)
    texts = make_texts(arguments.texts)
    peers = make_peers()
    stopwatch = Stopwatch(arguments.repeats, peers["transformers"](texts))
    lines: list[EmbeddingsResult] = []
    with LaunchedDeployment(None, arguments.set, [f"model.reference={MODEL}"]) as launched:
        services = [psutil.Process(process_id) for process_id in launched.process_ids.values()]
        for load in LOADS:
            run = partial(ask_all, launched.url, texts, load)
            lines.append(stopwatch.measure(f"Pando, {load.name}", run, lambda: sum(map(processor_time, services))))
        # Beside a server that is idle, which takes no time.
        for name, peer in peers.items():
            lines.append(stopwatch.measure(name, partial(peer, texts), time.process_time))
    show(lines, len(texts))
    if arguments.json is not None:
        command = f"{parser.prog} {shlex.join(sys.argv[1:] if argv is None else argv)}"
        write(arguments.json, lines, len(texts), replace(Provenance.collect(()), command=command))
    return 0


def make_texts(count: int) -> list[str]:
    """Return texts of 4 to 120 words, short ones more often, the same at every call."""
    generator = random.Random(0)
    return [" ".join(generator.choices(WORDS, k=round(4 * 30 ** generator.random()))) for _ in range(count)]


class Stopwatch:
    """Measures implementations, each several times after one run that does not count."""

    def __init__(self, repeats: int, expected: NDArray[np.float32]) -> None:
        """Compare all results with `expected`."""
        self._repeats = repeats
        self._expected = expected

    def measure(
        self, name: str, run: Callable[[], NDArray[np.float32]], processor: Callable[[], float]
    ) -> EmbeddingsResult:
        """Return the duration of `run` by the clock, and by `processor`, in seconds."""
        result = run()
        seconds, processor_seconds = [], []
        for _ in range(self._repeats):
            started, processor_started = time.perf_counter(), processor()
            result = run()
            seconds.append(time.perf_counter() - started)
            processor_seconds.append(processor() - processor_started)
        difference = float(np.abs(result - self._expected).max())
        return EmbeddingsResult(name, Spread.of(seconds), Spread.of(processor_seconds), difference)


def processor_time(process: psutil.Process) -> float:
    """Return the processor time of a process with its children, seconds."""
    return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))


def ask_all(url: str, texts: Sequence[str], load: Load) -> NDArray[np.float32]:
    """Return the embeddings of all texts from the server at `url`."""
    return asyncio.run(ask(url, texts, load))


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
    path = str(resolve_model(MODEL).path)
    peers: dict[str, Peer] = {"transformers": Transformers(path)}
    if importlib.util.find_spec("sentence_transformers") is not None:
        # An optional package without types.
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


def show(lines: Sequence[EmbeddingsResult], texts: int) -> None:
    """Print one line per measurement."""
    table = Table(title=f"{texts} texts, {torch.get_num_threads()} threads", title_justify="left")
    for name in ("", "texts/s", "from … to", "processor ms/text", "largest difference"):
        table.add_column(name, justify="left" if not name else "right")
    for line in lines:
        spread = f"{texts / line.seconds.high:.0f} … {texts / line.seconds.low:.0f}"
        processor_ms = f"{line.processor_seconds.median / texts * 1e3:.1f}"
        table.add_row(line.name, f"{texts / line.seconds.median:.0f}", spread, processor_ms, f"{line.difference:.1e}")
    output_console().print(table)


def write(path: Path, lines: Sequence[EmbeddingsResult], texts: int, provenance: Provenance) -> None:
    """Keep the figures in the results file `path`."""
    for line in lines:
        sheet = ResultSheet("embeddings", MODEL, 1, provenance, label=line.name)
        seconds, processor = line.seconds, line.processor_seconds
        rates = Spread(texts / seconds.median, texts / seconds.high, texts / seconds.low, seconds.repeats)
        scale = 1e3 / texts
        costs = Spread(processor.median * scale, processor.low * scale, processor.high * scale, processor.repeats)
        sheet.add_spread("throughput", rates, "texts/s")
        sheet.add_spread("processor time", costs, "ms/text")
        write_results(path, sheet.results)


if __name__ == "__main__":
    sys.exit(main())
