"""Moving scattered pages of all layers as one program: to and from one run of memory, and between pools."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.worker.engine.model.kv_pool import KvPool

_BLOCK = 1024


@triton.jit(do_not_specialize_on_alignment=["pages"])
def _move(bases, pages, staging, words, GATHERS: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1).to(tl.int64)
    of_page = tl.load(bases + half).to(tl.pointer_type(tl.int64)) + tl.load(pages + index) * words
    of_staging = staging + (index * tl.num_programs(1) + half) * words
    for start in range(0, words, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < words
        if GATHERS:
            tl.store(of_staging + at, tl.load(of_page + at, mask=inside), mask=inside)
        else:
            tl.store(of_page + at, tl.load(of_staging + at, mask=inside), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["pages", "into"])
def _copy(sources, pages, bases, into, words, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1).to(tl.int64)
    of_source = tl.load(sources + half).to(tl.pointer_type(tl.int64)) + tl.load(pages + index) * words
    of_page = tl.load(bases + half).to(tl.pointer_type(tl.int64)) + tl.load(into + index) * words
    for start in range(0, words, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < words
        tl.store(of_page + at, tl.load(of_source + at, mask=inside), mask=inside)


class ProgramPageMover:
    """See `PageMover`; a page of a layer is moved in words of 8 bytes."""

    def __init__(self, addresses: Sequence[int], page_bytes: int, device: torch.device) -> None:
        """Move pages of tensors at `addresses`, which `device` reaches; each page has `page_bytes` bytes in each."""
        self._bases = torch.tensor(addresses, device=device)
        self._words = page_bytes // 8

    @staticmethod
    def of_pool(pool: KvPool) -> ProgramPageMover:
        """Move pages of a pool of this process."""
        tensors = [tensor for layer in pool.layers for tensor in layer.stored]
        assert all(tensor.is_contiguous() for tensor in tensors), "a page of a layer is one run"
        addresses = [tensor.data_ptr() for tensor in tensors]
        return ProgramPageMover(addresses, tensors[0][0].nbytes, tensors[0].device)

    @staticmethod
    def fits(pool: KvPool) -> bool:
        """Whether pages of `pool` consist of whole words, as many in every layer."""
        sizes = {tensor[0].nbytes for layer in pool.layers for tensor in layer.stored}
        return len(sizes) == 1 and sizes.pop() % 8 == 0

    def gather(self, pages: torch.Tensor, staging: torch.Tensor) -> None:
        self._launch(pages, staging, gathers=True)

    def scatter(self, pages: torch.Tensor, staging: torch.Tensor) -> None:
        self._launch(pages, staging, gathers=False)

    def copy_from(self, source: ProgramPageMover, pages: torch.Tensor, into: torch.Tensor) -> None:
        """Copy pages, [pages] int64, of the tensors of `source`, as many and of the same form, `into` those here."""
        grid = (pages.shape[0], self._bases.shape[0])
        _copy[grid](source._bases, pages, self._bases, into, self._words, BLOCK=_BLOCK, num_warps=4)

    def _launch(self, pages: torch.Tensor, staging: torch.Tensor, *, gathers: bool) -> None:
        grid = (pages.shape[0], self._bases.shape[0])
        words = staging.view(torch.int64)
        _move[grid](self._bases, pages, words, self._words, GATHERS=gathers, BLOCK=_BLOCK, num_warps=4)
