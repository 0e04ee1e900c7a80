"""Costs of encrypting stored pages and of hashing weights: `python -m deploy.evaluation.experiments.storage`.

Writes pages through a rank's storage tier to a directory and reads them back, as they are stored and, for comparison,
unencrypted; meanwhile another thread does what stands for decode steps. Then reads a safetensors file into memory of
the device, with the digest of the weights and without. The directory should be in memory, so that no disk is measured:

    python -m deploy.evaluation.experiments.storage --directory /dev/shm
    python -m deploy.evaluation.experiments.storage --directory /dev/shm --threads 8 --device cuda --weight-gigabytes 16
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shlex
import shutil
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.table import Table
from safetensors.torch import save_file

from common.transfers import Transfer, TransferAck, TransferDirection, TransferId
from deploy.evaluation.bench.figures import Spread
from deploy.evaluation.bench.report import output_console
from deploy.evaluation.bench.results import Provenance, ResultSheet, write_results
from services.worker.engine.checkpoints.safetensors_directory import WHOLE, SafetensorsTensors
from services.worker.storage.files import FileStorage
from services.worker.storage.objects import ObjectFormat
from services.worker.storage.tier import Shard, WorkerStorageTier
from services.worker.stream_pages import StreamPages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from services.worker.storage.interface import Blob


BENCHMARK = "storage"
# Pages of 16 tokens of SmolLM2-135M and of an 8B Llama, in bfloat16.
PAGE_BYTES = (368_640, 2_097_152)
# Elements of a matrix of the file of weights: 64 MiB in bfloat16.
MATRIX = (4096, 8192)
CIPHER_KEY = b"k" * 32


class MemoryPages:
    """Pages in ordinary memory."""

    states = None

    def __init__(self, page_bytes: int, count: int) -> None:
        self.page_bytes = page_bytes
        self._memory = np.random.default_rng(0).integers(0, 256, (count, page_bytes), np.uint8)

    def read_page(self, page: int) -> bytes:
        content: bytes = self._memory[page].tobytes()
        return content

    def write_page(self, page: int, content: memoryview) -> None:
        self._memory[page] = content


class PlainFormat(ObjectFormat):
    """Pages as they are, neither encrypted nor authenticated: only for comparison."""

    def encode(self, key: bytes, cipher_key: bytes, payload: bytes) -> memoryview:
        return memoryview(payload)

    def decode(self, key: bytes, cipher_key: bytes, data: Blob) -> memoryview:
        return memoryview(data)


class StorageBench:
    """A storage tier over a directory that is emptied after each run."""

    def __init__(self, arguments: argparse.Namespace, page_bytes: int) -> None:
        self._arguments = arguments
        self._count = max(8, int(arguments.gigabytes * 1e9) // page_bytes)
        self._pages = MemoryPages(page_bytes, self._count)
        self._keys = [os.urandom(32) for _ in range(self._count)]

    def run(self, form: ObjectFormat) -> dict[str, float]:
        """Write and read all pages; return GB/s and, of a second time, the median milliseconds of a step meanwhile."""
        speeds, times = self._write_and_read(form, contextlib.nullcontext), []

        def steps() -> Steps:
            times.append(Steps())
            return times[-1]

        self._write_and_read(form, steps)
        return {**speeds, **{f"step beside {name}": made.median_ms for name, made in zip(speeds, times, strict=True)}}

    def _write_and_read(
        self, form: ObjectFormat, beside: Callable[[], AbstractContextManager[object]]
    ) -> dict[str, float]:
        place = Path(tempfile.mkdtemp(prefix="pando-storage-", dir=self._arguments.directory))
        try:
            storage = FileStorage(place, 1 << 50)
            found = {}
            for name, direction in (
                ("write", TransferDirection.HOST_TO_STORAGE),
                ("read", TransferDirection.STORAGE_TO_HOST),
            ):
                with beside():
                    seconds = asyncio.run(self._move(storage, form, direction))
                found[name] = self._count * self._pages.page_bytes / seconds / 1e9
            return found
        finally:
            shutil.rmtree(place)

    async def _move(self, storage: FileStorage, form: ObjectFormat, direction: TransferDirection) -> float:
        tier = WorkerStorageTier(storage, 600.0, self._arguments.threads)
        shard, acks = Shard(StreamPages(self._pages), form), asyncio.Queue[TransferAck]()
        each = max(1, self._count // (4 * self._arguments.threads))
        firsts = range(0, self._count, each)
        started = time.perf_counter()
        for number, first in enumerate(firsts):
            pages = np.arange(first, min(first + each, self._count), dtype=np.int32)
            keys = tuple(self._keys[first : first + len(pages)])
            transfer = Transfer(
                TransferId(number), direction, host_pages=pages, object_keys=keys, cipher_key=CIPHER_KEY
            )
            tier.begin(transfer, shard, acks.put_nowait)
        done = 0
        for _ in firsts:
            done += (await acks.get()).done_pages
        seconds = time.perf_counter() - started
        assert done == self._count, f"{done} of {self._count} pages"
        await tier.close()
        return seconds


class Steps:
    """A substitute for decoding: a thread that does a millisecond or two of Python and NumPy again and again."""

    def __init__(self) -> None:
        self._is_done = threading.Event()
        self._ms: list[float] = []
        self._thread = threading.Thread(target=self._run)

    @property
    def median_ms(self) -> float:
        return statistics.median(self._ms)

    def __enter__(self) -> Steps:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        self._thread.join()

    def _run(self) -> None:
        values = np.ones(100_000)
        while not self._is_done.is_set() or not self._ms:
            started = time.perf_counter()
            for _ in range(10):
                sum(range(4_000))
                values.sum()
            self._ms.append((time.perf_counter() - started) * 1e3)


class _NoDigest:
    def add(self, name: str, block: torch.Tensor) -> None:
        """Hash nothing."""

    def hexdigest(self) -> str:
        return ""


class Loading:
    """A file of weights, read as a loader does: each tensor into a copy on the device."""

    def __init__(self, directory: Path, gigabytes: float, device: torch.device) -> None:
        self._directory, self._device = directory, device
        matrix = torch.randn(MATRIX, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        self._names = [f"layer {number}" for number in range(max(2, int(gigabytes * 1e9) // matrix.nbytes))]
        self._bytes = len(self._names) * matrix.nbytes
        save_file({name: matrix + number for number, name in enumerate(self._names)}, directory / WHOLE)

    def read(self, *, with_digest: bool) -> float:
        """Return GB/s."""
        tensors = SafetensorsTensors(self._directory)
        if not with_digest:
            tensors._digest = _NoDigest()  # type: ignore[assignment]  # only here can it be left out
        place = torch.empty(MATRIX, dtype=torch.bfloat16, device=self._device)
        started = time.perf_counter()
        for name in self._names:
            place.copy_(tensors.read(name))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        tensors.identity()
        return self._bytes / (time.perf_counter() - started) / 1e9


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m deploy.evaluation.experiments.storage", description=__doc__)
    parser.add_argument(
        "--directory", type=Path, default=None, help="where files are written; by default where temporary files are"
    )
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of pages in a run (%(default)s)")
    parser.add_argument("--weight-gigabytes", type=float, default=2.0, help="in the file of weights (%(default)s)")
    parser.add_argument("--threads", type=int, default=4, help="of the storage tier (%(default)s)")
    parser.add_argument("--device", default="cpu", help="that weights are loaded to (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args(argv)
    command = shlex.join([*parser.prog.split(), *(sys.argv[1:] if argv is None else argv)])
    provenance = replace(Provenance.collect(()), command=command)
    sheets = [
        *(measure_pages(arguments, page_bytes, provenance) for page_bytes in PAGE_BYTES),
        measure_loading(arguments, provenance),
    ]
    found = Table(
        "what", "figure", "median", "lowest", "highest", title=f"{arguments.threads} threads, {arguments.device}"
    )
    results = [result for sheet in sheets for result in sheet.results]
    for result in results:
        low, high = (f"{value:.2f}" if value is not None else "" for value in (result.low, result.high))
        found.add_row(result.label, result.metric, f"{result.value:.2f} {result.unit}", low, high)
    output_console().print(found)
    if arguments.json is not None:
        write_results(arguments.json, results)


def measure_pages(arguments: argparse.Namespace, page_bytes: int, provenance: Provenance) -> ResultSheet:
    """Measure pages of one size, encrypted and not in turn."""
    bench = StorageBench(arguments, page_bytes)
    forms = {"encrypted": ObjectFormat("benchmark", page_bytes), "plain": PlainFormat("benchmark", page_bytes)}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in forms}
    for form in forms.values():
        bench.run(form)
    for _ in range(arguments.repeats):
        for name, form in forms.items():
            runs[name].append(bench.run(form))
    label = f"pages of {page_bytes:,} bytes, {arguments.threads} threads"
    sheet = ResultSheet(BENCHMARK, "none", 1, provenance, label)
    sheet.add_spread("step alone", Spread.of([_alone() for _ in range(arguments.repeats)]), "ms")
    for name, made in runs.items():
        for metric in made[0]:
            unit = "ms" if metric.startswith("step") else "GB/s"
            sheet.add_spread(f"{metric}, {name}", Spread.of([run[metric] for run in made]), unit)
    return sheet


def _alone() -> float:
    with Steps() as steps:
        time.sleep(0.3)
    return steps.median_ms


def measure_loading(arguments: argparse.Namespace, provenance: Provenance) -> ResultSheet:
    """Measure reading weights, with their digest and without in turn."""
    place = Path(tempfile.mkdtemp(prefix="pando-weights-", dir=arguments.directory))
    try:
        loading = Loading(place, arguments.weight_gigabytes, torch.device(arguments.device))
        kinds: dict[str, Callable[[], float]] = {
            "with digest": lambda: loading.read(with_digest=True),
            "without": lambda: loading.read(with_digest=False),
        }
        speeds: dict[str, list[float]] = {name: [] for name in kinds}
        loading.read(with_digest=False)
        for _ in range(arguments.repeats):
            for name, read in kinds.items():
                speeds[name].append(read())
    finally:
        shutil.rmtree(place)
    sheet = ResultSheet(BENCHMARK, "none", 1, provenance, f"{arguments.weight_gigabytes:g} GB to {arguments.device}")
    for name, values in speeds.items():
        sheet.add_spread(f"loading weights, {name}", Spread.of(values), "GB/s")
    return sheet


if __name__ == "__main__":
    main()
