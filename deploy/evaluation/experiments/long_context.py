"""A long prompt beside rows that decode: `python -m deploy.evaluation.experiments.long_context`.

The prompt is prefilled in chunks, in passes with the rows that decode; then its pages are copied to the host and loaded
again, each into the place of another, and the tokens after the prompt must be the same. Reported are the time to the
prompt's first token (TTFT), the time between tokens (ITL) of the other rows meanwhile and afterwards, and the copies.

By default a random model of two narrow layers, with YaRN from 32,768 to 131,072 tokens. On a GPU, with any config.json:

    python -m deploy.evaluation.experiments.long_context --device cuda --model deploy/evaluation/shapes/qwen3-14b \
        --rope-parameters '{"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}'
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from common.steps import EngineSpec
from common.transfers import Transfer, TransferDirection, TransferId
from deploy.evaluation.bench.figures import Spread
from deploy.evaluation.bench.report import output_console
from deploy.evaluation.bench.results import Provenance, Result, ResultSheet, write_results
from services.worker.engine.host import limit_spinning

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from services.worker.engine.model.batch import ForwardBatch
    from services.worker.engine.model_runner import ModelRunner

LOAD, BACKUP = TransferDirection.HOST_TO_DEVICE, TransferDirection.DEVICE_TO_HOST
BENCHMARK = "long-context"
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
# The last layer computes sampled tokens only, so two are the least that attend to all of a prompt.
TINY: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "torch_dtype": "float32",
}  # fmt: skip
# Tokens of the rows that decode, before the prompt arrives.
CONTEXT = 64


@dataclass
class LongRow:
    """A sequence, its pages, and the tokens whose keys and values are computed."""

    pages: list[int]
    token_ids: list[int]
    computed: int = 0

    def work(self, count: int) -> list[int]:
        """Return the next `count` tokens to compute."""
        return self.token_ids[self.computed : self.computed + count]


@dataclass
class LongContextFigures:
    """Milliseconds, and the tokens that followed the prompt."""

    ttft_ms: float
    itl_beside_prefill_ms: list[float]
    itl_afterwards_ms: list[float]
    backup_ms: float
    load_ms: float
    bytes_copied: int
    tokens: list[int] = field(default_factory=list)
    tokens_after_load: list[int] = field(default_factory=list)


class LongContextBench:
    """A loaded model with a host tier for the whole prompt."""

    def __init__(self, spec: EngineSpec, *, length: int, rows: int, new_tokens: int, device: str, threads: int) -> None:
        """Load it for a prompt of `length` tokens beside `rows`; pages and context of `spec` are replaced."""
        from services.worker.engine.backends import RunnerOptions
        from services.worker.engine.loader import load_decoder

        page_size, chunk = spec.page_size, spec.max_step_tokens
        self._chunk, self._new_tokens = chunk - rows, new_tokens
        passes = -(-length // self._chunk) + 2 * new_tokens + 2
        of_row = -(-(CONTEXT + passes) // page_size)
        of_prompt = -(-(length + new_tokens) // page_size)
        spec = replace(
            spec, device_pages=rows * of_row + of_prompt, host_pages=of_prompt, max_context=length + new_tokens,
            max_rows=rows + 1,
        )  # fmt: skip
        self.runner: ModelRunner = load_decoder(spec, lambda *_: None, RunnerOptions(device=device, threads=threads))
        if self.runner.capacity.max_context < length + new_tokens:
            raise SystemExit(f"the model's context is {self.runner.capacity.max_context:,} tokens: --rope-parameters")
        random = np.random.default_rng(0)
        vocabulary = self.runner.capacity.vocabulary_size
        self._rows = [
            LongRow(list(range(i * of_row, (i + 1) * of_row)), random.integers(vocabulary, size=CONTEXT).tolist())
            for i in range(rows)
        ]
        first = rows * of_row
        self._prompt = LongRow(list(range(first, first + of_prompt)), random.integers(vocabulary, size=length).tolist())

    def run(self) -> LongContextFigures:
        """Measure once."""
        for row in self._rows:
            self._step([(row, CONTEXT)])
        prompt, length, beside = self._prompt, len(self._prompt.token_ids), []
        while prompt.computed < length:
            beside.append(self._step([*((row, 1) for row in self._rows), (prompt, self._chunk)]))
        afterwards = self._decode()
        generated = prompt.token_ids[length:]
        count = -(-length // self.runner.capacity.page_size)
        backup_ms = self._copy(BACKUP, prompt.pages[:count])
        # Every page into the place of another one.
        prompt.pages = prompt.pages[::-1]
        load_ms = self._copy(LOAD, prompt.pages[:count])
        prompt.token_ids, prompt.computed = prompt.token_ids[: length + 1], length
        self._decode()
        host = self.runner.host_pool
        assert host is not None
        return LongContextFigures(
            sum(beside), beside, afterwards, backup_ms, load_ms, count * host.page_bytes, generated,
            prompt.token_ids[length:],
        )  # fmt: skip

    def _decode(self) -> list[float]:
        """Append tokens to all rows."""
        rows = [*self._rows, self._prompt]
        return [self._step([(row, 1) for row in rows]) for _ in range(self._new_tokens - 1)]

    def _step(self, work: Sequence[tuple[LongRow, int]]) -> float:
        """Run a pass as an engine does, to the tokens' arrival; return its milliseconds."""
        started = time.perf_counter()
        chosen = self.runner.forward(self._batch(work)).argmax(dim=-1).tolist()
        ended = time.perf_counter()
        for (row, count), token in zip(work, chosen, strict=True):
            row.computed += len(row.work(count))
            if row.computed == len(row.token_ids):
                row.token_ids.append(token)
        return (ended - started) * 1e3

    def _batch(self, work: Sequence[tuple[LongRow, int]]) -> ForwardBatch:
        import torch

        from services.worker.engine.model.batch import ForwardBatch

        size, device = self.runner.capacity.page_size, self.runner.device
        counts = [len(row.work(count)) for row, count in work]
        places = [
            torch.arange(row.computed, row.computed + count) for (row, _), count in zip(work, counts, strict=True)
        ]
        tables = [torch.tensor(row.pages, dtype=torch.int32) for row, _ in work]
        slots = [table[place // size].long() * size + place % size for table, place in zip(tables, places, strict=True)]
        starts = torch.tensor([0, *counts]).cumsum(0)
        lengths = [row.computed + count for (row, _), count in zip(work, counts, strict=True)]

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device)

        return ForwardBatch(
            token_ids=moved(torch.tensor([token for row, count in work for token in row.work(count)])),
            positions=moved(torch.cat(places)),
            query_starts=moved(starts.int()),
            key_lengths=moved(torch.tensor(lengths, dtype=torch.int32)),
            page_table=moved(torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)),
            write_slots=moved(torch.cat(slots)),
            sample_indices=moved(starts[1:] - 1),
            decode_rows=sum(count == 1 for count in counts),
            max_query_length=max(counts),
            max_key_length=max(lengths),
        )

    def _copy(self, direction: TransferDirection, device_pages: list[int]) -> float:
        transfers = self.runner.transfers
        assert transfers is not None
        started = time.perf_counter()
        host_pages = np.arange(len(device_pages), dtype=np.int32)
        number = TransferId(1 if direction is BACKUP else 2)
        transfers.begin([Transfer(number, direction, np.array(device_pages, np.int32), host_pages)])
        while not transfers.wait():
            pass
        return (time.perf_counter() - started) * 1e3


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write what was asked for."""
    name = "python -m deploy.evaluation.experiments.long_context"
    parser = argparse.ArgumentParser(prog=name, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="a directory with a config.json (a random model of two layers)")
    parser.add_argument("--load-format", default="dummy", help="auto, safetensors or dummy (%(default)s)")
    parser.add_argument("--rope-parameters", type=json.loads, help="in place of the config's, as model.rope_parameters")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--length", type=int, default=131_072 - 64, help="tokens of the prompt (%(default)s)")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a pass (%(default)s)")
    parser.add_argument("--rows", type=int, default=4, help="that decode meanwhile (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=32, help="after the prompt (%(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args(argv)
    limit_spinning()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
        rope = arguments.rope_parameters or ({} if arguments.model else YARN)
        spec = EngineSpec(
            arguments.model or directory, load_format=arguments.load_format, dtype=arguments.dtype,
            max_step_tokens=arguments.chunk, rope_parameters=json.dumps(rope),
        )  # fmt: skip
        figures = LongContextBench(
            spec, length=arguments.length, rows=arguments.rows, new_tokens=arguments.new_tokens,
            device=arguments.device, threads=arguments.threads,
        ).run()  # fmt: skip
    command = shlex.join([*parser.prog.split(), *(sys.argv[1:] if argv is None else argv)])
    provenance = replace(Provenance.collect(()), command=command)
    device = "cuda" if arguments.device == "cuda" else "cpu"
    label = f"{device}, {arguments.length} tokens, {arguments.rows} rows"
    found = results(figures, arguments.model or "two layers", label, provenance)
    printed = Table(title=label, title_justify="left")
    for column in ("figure", "value", "lowest", "highest"):
        printed.add_column(column)
    for result in found:
        low, high = (f"{each:,.2f}" if each is not None else "" for each in (result.low, result.high))
        printed.add_row(result.metric, f"{result.value:,.2f} {result.unit}", low, high)
    output_console().print(printed)
    if arguments.json is not None:
        write_results(arguments.json, found)
    if figures.tokens != figures.tokens_after_load:
        raise SystemExit("the tokens after loading the prompt's pages differ from those before")


def results(figures: LongContextFigures, model: str, label: str, provenance: Provenance) -> list[Result]:
    """Return everything in the form that is kept."""
    sheet = ResultSheet(BENCHMARK, model, 1, provenance, label)
    sheet.add("TTFT", figures.ttft_ms, "ms")
    sheet.add_spread("ITL beside the prefill", Spread.of(figures.itl_beside_prefill_ms), "ms")
    sheet.add_spread("ITL afterwards", Spread.of(figures.itl_afterwards_ms), "ms")
    sheet.add("backup", figures.backup_ms, "ms")
    sheet.add("load", figures.load_ms, "ms")
    sheet.add("load bandwidth", figures.bytes_copied / figures.load_ms / 1e6, "GB/s")
    return sheet.results


if __name__ == "__main__":
    main()
