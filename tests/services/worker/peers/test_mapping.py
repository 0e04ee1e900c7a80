"""Pages are copied from memory that another worker lends: real gRPC and leases on both sides, but fake memory."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np
import pytest

from common.errors import InvalidRequestError, PermissionDeniedError
from services.worker.engine.host_tier.shared_pages import SLICES_AT_ONCE
from services.worker.peers import mapping
from services.worker.peers.leases import MappedRead, MappedReads, Permission, ReaderWaits, this_host
from services.worker.peers.mapped_reading import BEATS
from services.worker.peers.mapping import COPY_THREADS
from services.worker.stream_pages import StreamDevicePages
from tests.services.worker.peers.mapped_memory import IMPATIENT, LEASE, LINGER_S, PAGES, WINDOW, Bench, Device, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    await bench.server.start()
    yield bench
    bench.copies.gate.set()
    await bench.reader.close()
    await bench.server.stop(0)
    assert bench.sharing.open_handles == [], "what was mapped is unmapped in the end"


ORDER = np.random.default_rng(0).permutation(PAGES).tolist()


async def test_pages_are_copied_from_mapped_memory_and_it_is_mapped_once(bench: Bench) -> None:
    for _ in range(2):
        assert (await bench.fetch(ORDER)).done_pages == PAGES
    assert bench.host.pages == bench.content(ORDER)
    assert bench.service.calls == ["map", "permit"]
    assert bench.sharing.open_handles == [b"a", b"b"]


async def test_pages_are_copied_to_the_device_whether_or_not_the_host_tier_is_ready(bench: Bench) -> None:
    bench.copies.is_ready = False
    assert (await bench.fetch(ORDER, StreamDevicePages(bench.device))).done_pages == PAGES
    assert bench.host.pages == bench.content(ORDER)
    assert bench.service.calls == ["map", "permit"]
    assert bench.copies.waits == 1


async def test_a_lender_does_not_wait_for_the_passes_of_its_reader(bench: Bench) -> None:
    bench.leases.waits = IMPATIENT
    bench.copies.passes_s = 2 * LINGER_S
    assert (await bench.fetch(ORDER, StreamDevicePages(bench.device))).done_pages == PAGES
    assert bench.service.calls == ["map", "permit"], "it has not taken the reader for gone"


async def test_nothing_is_copied_to_the_device_after_the_stream_of_plans_has_ended(bench: Bench) -> None:
    pages = StreamDevicePages(bench.device)
    pages.close()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await bench.fetch(ORDER, pages)
    assert bench.copies.begun == []


async def test_no_more_is_copied_than_was_permitted(bench: Bench) -> None:
    fetching = await bench.fetch_slowly(ORDER)
    assert sorted(bench.copies.begun) == sorted(ORDER[:WINDOW])
    bench.copies.gate.set()
    assert (await fetching).done_pages == PAGES


@pytest.mark.parametrize("reason", ["it shares nothing", "it is elsewhere", "it cannot be mapped", "the host tier"])
async def test_memory_that_cannot_be_mapped_is_read_as_bytes(
    bench: Bench, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.shrink_pages()
    bench.device.can_share = reason != "it shares nothing"
    if reason == "it is elsewhere":
        monkeypatch.setattr(mapping, "this_host", lambda: "another")
    if reason == "it cannot be mapped":
        bench.sharing.refuses.add(b"b")
    bench.copies.is_ready = reason != "the host tier"
    for _ in range(2):
        assert (await bench.fetch(ORDER)).done_pages == PAGES
    assert bench.host.pages == bench.content(ORDER)
    # It is asked once.
    assert bench.service.calls == [*(["map"] if bench.copies.is_ready else []), "read", "read"]
    assert bench.copies.begun == []
    assert bench.sharing.open_handles == []


async def test_ranks_of_other_hosts_read_over_nixl_in_small_slices(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapping, "this_host", lambda: "another")
    bench.device = Device(over_nixl=True)
    bench.copies.reads_over_nixl = True
    assert (await bench.fetch(ORDER, StreamDevicePages(bench.device))).done_pages == PAGES
    assert bench.host.pages == bench.content(ORDER)
    assert bench.service.calls == ["map", "permit"]
    assert bench.copies.largest == bench.copies.slice_pages, "the end of a lease waits for the slices under way"


@pytest.mark.parametrize("who", ["lender", "reader"])
async def test_ranks_that_do_not_both_use_nixl_send_pages_between_hosts(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    monkeypatch.setattr(mapping, "this_host", lambda: "another")
    bench.device = Device(over_nixl=who == "lender")
    bench.shrink_pages()
    bench.copies.reads_over_nixl = who == "reader"
    assert (await bench.fetch(ORDER)).done_pages == PAGES
    assert bench.host.pages == bench.content(ORDER)
    assert bench.service.calls == ["map", "read"]


async def test_pages_are_sent_for_a_while_once_a_read_over_nixl_has_broken(bench: Bench) -> None:
    bench.device = Device(over_nixl=True)
    bench.shrink_pages()
    bench.copies.reads_over_nixl = bench.copies.is_broken = True
    assert (await bench.fetch(ORDER)).done_pages == 0
    bench.copies.is_broken = False
    for _ in range(2):
        assert (await bench.fetch(ORDER)).done_pages == PAGES
    assert bench.host.pages == bench.content(ORDER)
    assert bench.service.calls == ["map", "permit", "read", "read"]
    await until(lambda: bench.sharing.open_handles == [])


async def test_a_read_over_nixl_that_has_broken_holds_the_pages_for_a_while(bench: Bench) -> None:
    bench.leases.waits = IMPATIENT
    bench.device = Device(over_nixl=True)
    bench.copies.reads_over_nixl = bench.copies.is_broken = True
    with mock.patch.object(MappedRead, "end", autospec=True) as end:
        assert (await bench.fetch(ORDER)).done_pages == 0
        async with asyncio.timeout(30):
            await bench.leases.revoke(LEASE)
    assert not end.called, "the network may still read what it was asked for"


async def test_a_lease_ends_after_the_copies_that_were_permitted_and_before_others(bench: Bench) -> None:
    fetching = await bench.fetch_slowly(ORDER)
    revoking = [asyncio.create_task(bench.leases.revoke(LEASE)) for _ in range(2)]
    await asyncio.sleep(0.1)
    assert not any(each.done() for each in revoking)
    bench.copies.gate.set()
    await asyncio.gather(*revoking)
    assert bench.copies.running == 0
    assert len(bench.leases) == 0
    # None of these pages was confirmed while the lease held.
    assert (await fetching).done_pages == 0
    assert len(bench.copies.begun) == WINDOW


async def test_pages_confirmed_before_the_lease_ended_count(bench: Bench) -> None:
    memory = bench.device.lend(lambda: None)
    assert memory is not None
    read = bench.leases.begin_read(LEASE, memory.name, range(PAGES))
    assert read.permission == Permission(WINDOW, 0)
    assert read.report(2) == Permission(WINDOW + 2, 2)
    revoking = asyncio.create_task(bench.leases.revoke(LEASE))
    await asyncio.sleep(0)
    assert read.report(5) == Permission(WINDOW + 2, 2)
    assert not revoking.done()
    with pytest.raises(PermissionDeniedError):
        read.report(WINDOW + 2)
    assert read.permission == Permission(WINDOW + 2, 2)
    await revoking


async def test_pages_that_may_have_been_overwritten_during_the_copy_do_not_count(bench: Bench) -> None:
    fetching = await bench.fetch_slowly(ORDER)
    bench.leases.revoke_all()
    bench.device.version = 1
    bench.copies.gate.set()
    assert (await fetching).done_pages == 0


@pytest.mark.parametrize("report", [0, 3, WINDOW + 4, None])
async def test_a_reader_that_reports_wrongly_or_no_more_holds_the_pages_for_a_while(
    bench: Bench, report: int | None
) -> None:
    bench.leases.waits = IMPATIENT
    memory = bench.device.lend(lambda: None)
    assert memory is not None
    read = bench.leases.begin_read(LEASE, memory.name, range(PAGES))
    read.report(3)
    if report is None:
        await until(lambda: read.is_over)
    else:
        with pytest.raises(InvalidRequestError):
            read.report(report)
    revoking = asyncio.create_task(bench.leases.revoke(LEASE))
    await asyncio.sleep(0)
    assert not revoking.done()
    with pytest.raises(InvalidRequestError):
        read.report(WINDOW)
    async with asyncio.timeout(30):
        await revoking


async def test_reads_beside_each_other_share_a_call_and_do_not_wait_for_one_another(bench: Bench) -> None:
    slow = await bench.fetch_slowly(ORDER)
    held, bench.copies.gate = bench.copies.gate, threading.Event()
    bench.copies.gate.set()
    # More than there are slices at a time.
    quick = [bench.fetch(ORDER[:WINDOW]) for _ in range(COPY_THREADS)]
    assert [ack.done_pages for ack in await asyncio.gather(*quick)] == [WINDOW] * COPY_THREADS
    assert not slow.done()
    held.set()
    assert (await slow).done_pages == PAGES
    assert bench.service.calls == ["map", "permit"]


async def test_a_read_that_took_too_long_breaks_no_other_one(bench: Bench) -> None:
    bench.leases.waits = IMPATIENT
    slow = await bench.fetch_slowly(ORDER)
    held, lease = bench.copies.gate, bench.leases._leases[LEASE]
    # The lender has given it up.
    await until(lambda: not lease.reading)
    other = await bench.fetch_slowly(ORDER, beside=SLICES_AT_ONCE)
    held.set()
    await until(lambda: "read" in bench.service.calls)
    bench.copies.gate.set()
    assert (await other).done_pages == PAGES
    assert bench.service.calls == ["map", "permit", "read"]
    slow.cancel()


async def test_a_read_whose_copies_take_longer_than_the_lender_waits_for_silent_readers_goes_on(bench: Bench) -> None:
    bench.leases.waits = ReaderWaits(silence_s=2, linger_s=0, copying_s=60)
    with mock.patch.object(MappedReads, "go_on", autospec=True, side_effect=MappedReads.go_on) as go_on:
        fetching = await bench.fetch_slowly(ORDER)
        lease = bench.leases._leases[LEASE]
        # More beats than there are in the wait for a silent reader.
        await until(lambda: go_on.call_count > BEATS)
        assert lease.reading == 1
        revoking = asyncio.create_task(bench.leases.revoke(LEASE))
        await asyncio.sleep(0)
        assert not revoking.done(), "the pages are still being read"
        bench.copies.gate.set()
        assert (await fetching).done_pages == 0
        await revoking


async def test_copies_that_go_on_for_too_long_hold_the_pages_no_longer(bench: Bench) -> None:
    memory = bench.device.lend(lambda: None)
    assert memory is not None
    bench.leases.waits = ReaderWaits(silence_s=10, linger_s=5, copying_s=25)
    loop = asyncio.get_running_loop()
    clock = mock.Mock(side_effect=[0.0, 0.0, 8.0, 16.0, 24.0, 24.0, 24.0])
    with mock.patch.object(loop, "call_at") as call_at, mock.patch.object(loop, "time", clock):
        read = bench.leases.begin_read(LEASE, memory.name, range(PAGES))
        for _ in range(3):
            read.go_on()
        assert [call.args[0] for call in call_at.call_args_list] == [10, 18, 25, 25]
        read.report(3)
        assert call_at.call_args.args == (34, read.break_off)
        read.end()
        read.go_on()
        assert call_at.call_count == 5, "it is over"


async def test_a_lender_of_an_earlier_version_hears_of_reports_only(bench: Bench) -> None:
    bench.leases.waits = IMPATIENT
    with (
        mock.patch.object(MappedReads, "silence_ms", 0),
        mock.patch.object(MappedReads, "go_on", autospec=True, side_effect=AssertionError) as go_on,
    ):
        fetching = await bench.fetch_slowly(ORDER)
        lease = bench.leases._leases[LEASE]
        await until(lambda: not lease.reading)
        assert not go_on.called
        bench.copies.gate.set()
        assert (await fetching).done_pages == 0


async def test_copies_take_no_threads_from_others(bench: Bench) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    fetching = await bench.fetch_slowly(ORDER)
    async with asyncio.timeout(30):
        await asyncio.to_thread(int)
    bench.copies.gate.set()
    assert (await fetching).done_pages == PAGES


async def test_a_read_that_is_given_up_holds_the_pages_no_longer_than_its_copies(bench: Bench) -> None:
    fetching = await bench.fetch_slowly(ORDER)
    closing = asyncio.create_task(asyncio.to_thread(bench.pages.close))
    await until(lambda: bench.pages._is_closed)
    bench.copies.gate.set()
    await closing
    await until(lambda: not bench.reader._tasks)
    async with asyncio.timeout(30):
        await bench.leases.revoke(LEASE)
    assert not fetching.done(), "a stream of plans that has ended gets no acknowledgement"
    fetching.cancel()


async def test_a_call_that_breaks_is_replaced_for_the_next_read(bench: Bench) -> None:
    assert (await bench.fetch(ORDER)).done_pages == PAGES
    mapped = await bench.reader._mappings._peers[bench.address].mapping
    assert mapped is not None
    fetching = await bench.fetch_slowly(ORDER)
    mapped.reads(bench.reader._channel(bench.address)).close()
    bench.copies.gate.set()
    assert (await fetching).done_pages == 0
    assert (await bench.fetch(ORDER)).done_pages == PAGES
    assert bench.service.calls == ["map", "permit", "permit"]


async def test_a_reader_that_goes_away_during_a_copy_holds_the_pages_for_a_while(bench: Bench) -> None:
    bench.leases.waits = IMPATIENT
    fetching = await bench.fetch_slowly(ORDER)
    closing = asyncio.create_task(bench.reader.close())
    await asyncio.sleep(0.05)
    revoking = asyncio.create_task(bench.leases.revoke(LEASE))
    await asyncio.sleep(0.05)
    assert not revoking.done()
    bench.copies.gate.set()
    async with asyncio.timeout(30):
        await asyncio.gather(closing, revoking)
    fetching.cancel()


async def test_memory_is_unmapped_after_the_copies_and_before_its_owner_frees_it(bench: Bench) -> None:
    fetching = await bench.fetch_slowly(ORDER)
    closing = asyncio.create_task(asyncio.to_thread(bench.device.borrowers.close))
    await asyncio.sleep(0.1)
    assert not closing.done()
    bench.copies.gate.set()
    assert await closing
    assert bench.sharing.open_handles == []
    # Copies that would have begun later have not.
    assert (await fetching).done_pages < PAGES
    bench.device = Device()
    assert (await bench.fetch(ORDER)).done_pages == PAGES
    assert bench.service.calls == ["map", "permit", "map", "permit"]


async def test_a_peer_that_has_loaded_again_is_mapped_again(bench: Bench) -> None:
    assert (await bench.fetch([1])).done_pages == 1
    bench.device = Device()
    bench.shrink_pages()
    bench.device.shared_name = b"n" * 16
    assert (await bench.fetch([2])).done_pages == 1
    assert (await bench.fetch([3])).done_pages == 1
    assert bench.service.calls == ["map", "permit", "read", "map", "permit"]


async def test_a_peer_that_dies_is_unmapped_and_its_successor_mapped(bench: Bench) -> None:
    fetching = await bench.fetch_slowly(ORDER)
    await bench.server.stop(0)
    bench.copies.gate.set()
    assert (await fetching).done_pages == 0
    await until(lambda: bench.sharing.open_handles == [])
    bench.serve()
    await bench.server.start()
    async with asyncio.timeout(30):
        while (await bench.fetch(ORDER)).done_pages < PAGES:  # noqa: ASYNC110  (nothing notifies)
            await asyncio.sleep(0.05)
    assert "read" not in bench.service.calls


async def test_host_pages_are_written_no_more_once_the_stream_of_plans_has_ended(bench: Bench) -> None:
    fetching = await bench.fetch_slowly(ORDER)
    closing = asyncio.create_task(asyncio.to_thread(bench.pages.close))
    await asyncio.sleep(0.1)
    assert not closing.done()
    bench.copies.gate.set()
    await closing
    written = list(bench.host.pages)
    bench.device.version = 1
    # Neither an acknowledgement nor another copy follows.
    done, _ = await asyncio.wait([fetching], timeout=0.3)
    assert not done
    assert bench.host.pages == written
    fetching.cancel()


async def test_memory_is_lent_for_a_lease_only(bench: Bench) -> None:
    with pytest.raises(PermissionDeniedError):
        await anext(bench.leases.lend(b"n" * 16, this_host()))
    with pytest.raises(InvalidRequestError, match="on another host"):
        await anext(bench.leases.lend(LEASE, "another"))
    loan = bench.leases.lend(LEASE, this_host())
    memory = await anext(loan)
    assert memory is not None
    for lease, pages in ((b"n" * 16, [1]), (LEASE, [PAGES])):
        with pytest.raises(PermissionDeniedError):
            bench.leases.begin_read(lease, memory.name, pages)
    await loan.aclose()
    assert bench.device.borrowers.close()


async def test_a_number_names_one_read_of_a_call(bench: Bench) -> None:
    memory = bench.device.lend(lambda: None)
    assert memory is not None
    reads = MappedReads(bench.leases)
    with pytest.raises(InvalidRequestError, match="no such read"):
        reads.report(0, 1)
    reads.begin(0, LEASE, memory.name, range(PAGES))
    with pytest.raises(InvalidRequestError, match="begun already"):
        reads.begin(0, LEASE, memory.name, range(PAGES))
    assert reads.begin(1, LEASE, memory.name, [4]) == Permission(1, 0)
    assert reads.report(1, 1) == Permission(1, 1)
    reads.end(0)
    async with asyncio.timeout(30):
        await bench.leases.revoke(LEASE)
