from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from common.transfers import TransferDirection
from services.worker.engine.host_tier.device_pages import STAGED_PAGES, DevicePages, page_form_of
from services.worker.engine.parallel.shards import Span
from tests.services.worker.engine.host_tier.test_sliced_transfers import KINDS, Rig

if TYPE_CHECKING:
    from services.worker.engine.kernels.interface import AttentionShape, KvLayout


@pytest.mark.parametrize(("layout", "shapes"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_have_the_bytes_of_their_backups(
    layout: KvLayout, shapes: tuple[AttentionShape, ...], dtype: torch.dtype
) -> None:
    rig, shape = Rig(layout, dtype, shapes), shapes[0]
    pages = [7, 3, *range(20, 20 + STAGED_PAGES)]
    rig.begin(1, TransferDirection.DEVICE_TO_HOST, pages, list(range(len(pages))))
    assert rig.finish() == [1]
    heads = Span(0, shape.kv_heads)
    form = page_form_of(rig.pool, layout, shape, heads, shape.kv_heads)
    assert form is not None
    device = DevicePages(rig.pool, form)
    assert form.page_bytes == rig.host.page_bytes
    assert device.read_pages(pages, heads) == b"".join(rig.host.read_page(page) for page in range(len(pages)))
    device.close()
    assert device.read_pages(pages, heads) == b""


@pytest.mark.parametrize(("layout", "shapes"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_written_pages_have_the_bytes_that_were_read_and_others_stay(
    layout: KvLayout, shapes: tuple[AttentionShape, ...], dtype: torch.dtype
) -> None:
    rig, shape = Rig(layout, dtype, shapes), shapes[0]
    heads = Span(0, shape.kv_heads)
    form = page_form_of(rig.pool, layout, shape, heads, shape.kv_heads)
    assert form is not None
    device = DevicePages(rig.pool, form)
    pages, into = [7, 3, *range(20, 20 + STAGED_PAGES)], [30, 2, *range(8, 8 + STAGED_PAGES)]
    content, before = device.read_pages(pages, heads), device.read_pages([4, 31], heads)
    assert content != device.read_pages(into, heads)
    assert device.after_passes() is None, "passes are over on a CPU"
    device.write_pages(into, memoryview(content))
    assert device.read_pages(into, heads) == content
    assert device.read_pages(pages, heads) == content
    assert device.read_pages([4, 31], heads) == before
    device.close()
    device.write_pages(into, memoryview(bytes(len(content))))
