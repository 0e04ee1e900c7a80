from __future__ import annotations

import contextlib
import io

import pytest
from rich.console import Console

from common.types import RequestId
from deploy.evaluation.bench.pipeline_client import PipelineRecord
from deploy.evaluation.bench.report import following_tokens
from tests.waiting import until


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    output = io.StringIO()
    return Console(file=output, force_terminal=terminal, width=120), output


async def test_tokens_are_counted_while_requests_run() -> None:
    records = [PipelineRecord(RequestId(name), 0.0) for name in "ab"]
    shown, output = console(terminal=True)
    async with following_tokens(records, 50, shown):
        records[0].tokens, records[1].tokens = 12, 30
        await until(lambda: "42/50" in output.getvalue())


@pytest.mark.parametrize("fails", [False, True])
async def test_no_progress_is_shown_without_a_terminal(fails: bool) -> None:
    shown, output = console(terminal=False)
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        async with following_tokens([], 50, shown):
            if fails:
                raise RuntimeError
    assert output.getvalue() == ""
