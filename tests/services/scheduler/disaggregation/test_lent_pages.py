"""Pages of a lease are neither free nor granted again until all workers have confirmed that it has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from services.scheduler.loop import SchedulerLoop
from services.scheduler.rank import RankConnection
from tests.services.scheduler.disaggregation.test_two_groups import Groups
from tests.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from services.scheduler.core.core import SchedulerCore


async def test_no_lent_page_is_free_when_a_worker_is_asked_to_end_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores: list[SchedulerCore] = []
    faults: list[tuple[int, list[str]]] = []
    submit, revoke = SchedulerLoop.submit_prefill, RankConnection.revoke_pages

    def submit_and_note(loop: SchedulerLoop, *arguments: Any) -> Any:
        assert loop.core is not None
        cores.append(loop.core)
        return submit(loop, *arguments)

    async def check_and_revoke(rank: RankConnection, lease: bytes) -> None:
        cores[0].memory.flush()
        lent = cores[0].exports.lent
        faults.append((min(len(lent), 1), lent.faults(1000)))
        await revoke(rank, lease)

    monkeypatch.setattr(SchedulerLoop, "submit_prefill", submit_and_note)
    monkeypatch.setattr(RankConnection, "revoke_pages", check_and_revoke)
    groups = Groups(tmp_path)
    await groups.start()
    try:
        for name in ("one", "two"):
            await groups.run(name, [ord(name[0]), *range(50, 100)])
        await groups.released()
        await until(lambda: not len(cores[0].exports.lent))
    finally:
        await groups.stop()
    # Of two requests at two ranks.
    assert faults == [(1, [])] * 4
