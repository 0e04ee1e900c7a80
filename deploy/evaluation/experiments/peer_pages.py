"""Reading a prompt's KV pages from another group: `python -m deploy.evaluation.experiments.peer_pages`.

A process on one GPU lends pages of the shape of Llama-3.1-8B, 2 MiB each; this one, on another, reads them in random
order into its host tier and to its GPU: sent over gRPC as bytes, and copied from memory that it maps. For comparison:
plain copies of as many bytes between the GPUs and to page-locked host memory, and mapped pages that are only collected
on this GPU. As in serving, several reads may be under way at the same time (`--in-flight`), each of as many pages;
their rate is that of all together. A read of one page shows the time that all reads take, however few their pages.

    python -m deploy.evaluation.experiments.peer_pages --pages 512 --in-flight 1 4

On CPUs, the other process lends pages in its memory: sent over gRPC, and read over NIXL by TCP, as between hosts. Needs
the extra `nixl`, but no GPU.

    python -m deploy.evaluation.experiments.peer_pages --device cpu --pages 256 --in-flight 1
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.table import Table

from common.logs import configure_logging
from common.settings.shared import LogSettings
from deploy.evaluation.bench.figures import Spread
from deploy.evaluation.bench.report import output_console
from deploy.evaluation.bench.results import Provenance, ResultSheet, write_results
from services.worker.engine.host_tier.nixl_agents import NixlAgents
from tests.services.worker.peers.lender import PoolShape, Reader, address_in, start_lender

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BENCHMARK = "peer-pages"
READER, LENDER = 0, 1
PAGE_BYTES = 2 << 20
ONE_PAGE = "one page"
# Of each client where several read: enough that the beginning and the end, where fewer do, count little.
READS_EACH = 8
# UCX's transports between processes of different hosts without RDMA.
NETWORK = {"UCX_TLS": "tcp"}


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the arguments, measure, print a table and write JSON."""
    parser = argparse.ArgumentParser(prog="python -m deploy.evaluation.experiments.peer_pages", description=__doc__)
    parser.add_argument("--pages", type=int, default=512, help="of 16 tokens each")
    parser.add_argument("--repeats", type=int, default=10, help="fewer for gRPC")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 4], help="reads at the same time, without gRPC")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args(argv)
    on_cpus = arguments.device == "cpu"
    if not on_cpus and torch.cuda.device_count() <= LENDER:
        parser.error("two GPUs are needed")
    found = asyncio.run(measure(arguments.pages, arguments.repeats, arguments.in_flight, on_cpus=on_cpus))
    gigabytes = arguments.pages * PAGE_BYTES / 1e9
    table = Table(title=f"{arguments.pages} pages of 2 MiB, {gigabytes:.2f} GB", title_justify="left")
    for name in ("way", "ms", "GB/s"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for way, seconds in found.items():
        rate = "" if way == ONE_PAGE else f"{gigabytes / seconds.median:.1f}"
        table.add_row(way, f"{seconds.median * 1e3:.2f}", rate)
    output_console().print(table)
    if arguments.json is not None:
        command = shlex.join([parser.prog, *(sys.argv[1:] if argv is None else argv)])
        sheet = ResultSheet(
            BENCHMARK, "llama-3.1-8b", 1, replace(Provenance.collect(()), command=command), f"{arguments.pages} pages"
        )
        for way, seconds in found.items():
            if way == ONE_PAGE:
                times = (1e3 * seconds.median, 1e3 * seconds.low, 1e3 * seconds.high)
                sheet.add_spread(way, Spread(*times, seconds.repeats), "ms")
                continue
            rates = Spread(
                gigabytes / seconds.median, gigabytes / seconds.high, gigabytes / seconds.low, seconds.repeats
            )
            sheet.add_spread(way, rates, "GB/s")
        write_results(arguments.json, sheet.results)


async def measure(count: int, repeats: int, in_flight: Sequence[int], *, on_cpus: bool) -> dict[str, Spread]:
    """Return the seconds for `count` pages by each way, between two processes on GPUs or CPUs.

    Of reads at the same time, those of all divided by their number, `in_flight`.
    """
    configure_logging("reader", LogSettings())
    shape = PoolShape(pages=count)
    with tempfile.TemporaryDirectory() as folder:
        address = address_in(Path(folder))
        if on_cpus:
            os.environ.update(NETWORK)
            mapped, direct = "read over NIXL", "read over NIXL to the device's pages"
            device = torch.device("cpu")
            lender = start_lender(address, shape, device, NETWORK, over_nixl=True)
            reader = Reader(address, shape, device, NixlAgents())
        else:
            mapped, direct = "copied by the GPU", "copied to this GPU's pages"
            lender = start_lender(address, shape, LENDER)
            reader = Reader(address, shape, torch.device("cuda", READER))
        try:
            await reader.start()
            pages = np.random.default_rng(0).permutation(count).tolist()
            found = {
                "sent over gRPC": await timed_reads(reader, pages, min(3, repeats), maps=False, to_device=False),
                ONE_PAGE: await timed_reads(reader, pages[:1], 10 * repeats, maps=True, to_device=True),
            }
            for reads in in_flight:
                beside = "" if reads == 1 else f", {reads} reads in flight"
                for way, to_device in ((mapped, False), (direct, True)):
                    found[way + beside] = await timed_reads(
                        reader, pages, repeats, maps=True, to_device=to_device, in_flight=reads
                    )
            assert reader.has_mapped, "the second way was taken"
            return found if on_cpus else {**found, **measure_copies(reader, pages, repeats)}
        finally:
            await reader.close()
            lender.kill()
            lender.join()


async def timed_reads(
    reader: Reader, pages: list[int], times: int, *, maps: bool, to_device: bool, in_flight: int = 1
) -> Spread:
    """Return the seconds for all pages; those of each of `in_flight` clients, which read one time after the other."""

    async def read_all(places: int) -> None:
        # Pages of this side are overwritten by several reads: their content is not looked at.
        for _ in range(places):
            ack = await reader.read(pages, maps=maps, to_device=to_device)
            assert ack.done_pages == len(pages), "all pages can be read"

    await reader.read(pages[:20], maps=maps, to_device=to_device)
    seconds = []
    each = 1 if in_flight == 1 else READS_EACH
    for _ in range(times):
        started = time.perf_counter()
        await asyncio.gather(*(read_all(each) for _ in range(in_flight)))
        seconds.append((time.perf_counter() - started) / (in_flight * each))
    return Spread.of(seconds)


def measure_copies(reader: Reader, pages: Sequence[int], repeats: int) -> dict[str, Spread]:
    """Return the seconds for as many bytes by plain copies, and for collecting mapped pages on this GPU."""
    # Imported here because it needs Triton.
    from services.worker.engine.kernels.gpu.page_moves import ProgramPageMover

    here, there = torch.device("cuda", READER), torch.device("cuda", LENDER)
    held = torch.empty((len(pages), *reader.host.memory.shape[1:]), dtype=reader.host.memory.dtype, device=here)
    other = torch.empty_like(held, device=there)
    mapping = reader.reader._mappings._peers[reader.address].mapping.result()
    assert mapping is not None, "checked before"
    mover = ProgramPageMover(mapping.pages.addresses, mapping.pages.memory.tensor_page_bytes, here)
    indices = torch.tensor(pages, device=here)
    return {
        "collected on this GPU": timed(lambda: mover.gather(indices, held), repeats),
        "plain copy between GPUs": timed(lambda: held.copy_(other), repeats),
        "plain copy to the host": timed(lambda: reader.host.memory.copy_(held, non_blocking=True), repeats),
    }


def timed(run: Callable[[], object], repeats: int) -> Spread:
    """Return the seconds that `run` takes on the device."""
    seconds = []
    for index in range(repeats + 1):
        torch.cuda.synchronize(READER)
        started = time.perf_counter()
        run()
        torch.cuda.synchronize(READER)
        if index:  # the first compiles programs
            seconds.append(time.perf_counter() - started)
    return Spread.of(seconds)


if __name__ == "__main__":
    main()
