"""A part that fakes of device pages have in common where they are only read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.worker.engine.execution.interface import AfterPasses, SnapshotBytes


class UnwrittenPages:
    """Nothing arrives in these pages."""

    snapshots: SnapshotBytes | None = None

    def after_passes(self) -> AfterPasses | None:
        raise AssertionError("nothing is written")

    def write_pages(self, pages: Sequence[int], content: memoryview) -> None:
        raise AssertionError("nothing is written")
