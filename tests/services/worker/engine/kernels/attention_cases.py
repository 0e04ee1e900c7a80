"""Random batches for attention back ends, and their KV pools."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from services.worker.engine.kernels.interface import AttentionShape, KvLayer, KvLayout, KvScales
from services.worker.engine.model.batch import ForwardBatch
from services.worker.engine.model.kv_pool import allocate_pool

# Windows within a page, within a block of keys, and behind what any row has.
WINDOWS = st.sampled_from([None, 0, 1, 7, 63, 64, 100, 500])


@dataclass(frozen=True, slots=True)
class Case:
    """Rows of (tokens computed before, new tokens), decoding ones first."""

    shape: AttentionShape
    rows: list[tuple[int, int]]
    seed: int
    blocks: tuple[tuple[int, int, int], ...] = ()
    """Tokens that see each other: a row, and the first and the last one's end among its new tokens."""

    @property
    def tokens(self) -> int:
        return sum(new for _, new in self.rows)

    def batch(self) -> ForwardBatch:
        """Return the batch; pages are scattered, unused entries of the table name other rows' pages."""
        size = self.shape.page_size
        generator = torch.Generator().manual_seed(self.seed)
        width = max(-(-(old + new) // size) for old, new in self.rows)
        table = torch.randperm(width * len(self.rows), generator=generator).view(len(self.rows), width)
        places = [torch.arange(old, old + new) for old, new in self.rows]
        starts = torch.tensor([0, *(new for _, new in self.rows)]).cumsum(0)
        return ForwardBatch(
            token_ids=torch.zeros(self.tokens, dtype=torch.int64),
            positions=torch.cat(places),
            query_starts=starts.int(),
            key_lengths=torch.tensor([old + new for old, new in self.rows], dtype=torch.int32),
            page_table=table.int(),
            write_slots=torch.cat([table[i, place // size] * size + place % size for i, place in enumerate(places)]),
            sample_indices=starts[1:] - 1,
            decode_rows=sum(new == 1 for _, new in self.rows),
            max_query_length=max(new for _, new in self.rows),
            max_key_length=max(old + new for old, new in self.rows),
            blocks=torch.tensor(
                [
                    (row, int(starts[row]) + first, int(starts[row]) + end, self.rows[row][0] + end)
                    for row, first, end in self.blocks
                ],
                dtype=torch.int32,
            )
            if self.blocks
            else None,
        )

    def layer(self, layout: KvLayout, dtype: torch.dtype) -> KvLayer:
        """Return random KV, the same values in every layout."""
        pages = sum(max(-(-(old + new) // self.shape.page_size) for old, new in self.rows) for _ in self.rows)
        plain = allocate_pool(self.shape, 1, pages, KvLayout.TOKEN_MAJOR, dtype=dtype, device=torch.device("cpu"))
        generator = torch.Generator().manual_seed(self.seed + 1)
        layer = plain.layers[0]
        for tensor in layer.stored:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        scales = self.scales() if dtype == torch.float8_e4m3fn else None
        match layout:
            case KvLayout.TOKEN_MAJOR:
                return KvLayer(layer.keys, layer.values, scales=scales)
            case KvLayout.LANES:
                keys = layer.keys.permute(0, 2, 3, 1)
            case KvLayout.HEAD_MAJOR:
                keys = layer.keys.transpose(1, 2)
        return KvLayer(keys.contiguous(), layer.values.transpose(1, 2).contiguous(), scales=scales)

    def scales(self) -> KvScales:
        """Return scales of FP8, some of them powers of two, by which the largest numbers do not fit."""
        generator = torch.Generator().manual_seed(self.seed + 4)
        keys, values = torch.rand(2, self.shape.kv_heads, generator=generator)
        return KvScales(0.003 + keys / 100, torch.exp2((values * 14).round() - 9))

    def sinks(self) -> torch.Tensor | None:
        """Return random sinks, or None: every third case without blocks has some."""
        if self.seed % 3 or self.blocks:
            return None
        return torch.randn(self.shape.query_heads, generator=torch.Generator().manual_seed(self.seed + 3)) * 3

    def qkv(self) -> torch.Tensor:
        """Return random projections."""
        width = self.shape.query_width + self.shape.stored_width
        return torch.randn(self.tokens, width, generator=torch.Generator().manual_seed(self.seed + 2))


def token_major(layer: KvLayer, layout: KvLayout) -> KvLayer:
    """Return `layer` as [pages, page_size, kv_heads, head_dim]."""
    if layout is KvLayout.TOKEN_MAJOR:
        return layer
    return KvLayer(layer.keys.permute(0, 3, 1, 2), layer.values.permute(0, 2, 1, 3), scales=layer.scales)


def widened(layer: KvLayer) -> KvLayer:
    """Return [pages, page_size, kv_heads, head_dim] in FP8 as float32."""
    assert layer.scales is not None
    scales = layer.scales.keys[:, None], layer.scales.values[:, None]
    return KvLayer(layer.keys.float() * scales[0], layer.values.float() * scales[1])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any shape that compiled attention takes, and any mix of rows."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 4, 7, 30]))
    head_dim, page_size = draw(st.sampled_from([16, 32, 48, 64, 80, 128, 256])), draw(st.sampled_from([16, 32, 64]))
    decoding = draw(st.lists(st.integers(0, 200), max_size=4))
    chunks = draw(st.lists(st.tuples(st.integers(0, 150), st.integers(2, 70)), min_size=not decoding, max_size=2))
    window = draw(WINDOWS)
    shape = AttentionShape(
        kv_heads * group, kv_heads, head_dim, page_size, window, draw(st.sampled_from([None, 0.3])),
        is_chunked=window is not None and draw(st.booleans()),
    )  # fmt: skip
    blocks = draw(blocks_of(len(decoding), chunks))
    return Case(shape, [*((old, 1) for old in decoding), *chunks], draw(st.integers(0, 2**31)), blocks)


@st.composite
def blocks_of(draw: st.DrawFn, decoding: int, chunks: list[tuple[int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Return blocks of tokens in some of the chunks, which come after `decoding` rows: none, one or two in each."""
    blocks = []
    for row, (_, new) in enumerate(chunks, decoding):
        borders = sorted(draw(st.sets(st.integers(0, new), max_size=4)))
        blocks += [(row, first, end) for first, end in zip(borders[::2], borders[1::2], strict=False)]
    return tuple(blocks)
