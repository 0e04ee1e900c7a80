"""Products of tokens with the low-rank factors of the adapters in their slots, in tiles of tokens with one adapter.

Factors are found by addresses in a table on the device, and the tokens of each adapter are sorted there, too. So the
same launches serve any adapters of any ranks, which is what CUDA graphs need. Inputs are shrunk by one program, and a
second one expands them and adds them to the base product, before the activation where there is one. A graph has room
for more tiles than are used; programs of unused ones end at once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
import triton

from services.worker.engine.kernels.gpu.adapter_programs import (
    HEAD,
    OF_PART,
    expand,
    expand_and_gate,
    look_up,
    shrink,
    sort_tokens,
)
from services.worker.engine.kernels.gpu.dependent_launch import launch_options
from services.worker.engine.kernels.gpu.elementwise import ACTIVATIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.worker.engine.adapters.sites import PartFactors
    from services.worker.engine.model.config import Activation

# Lines of `b` begin and end at multiples of these outputs, and rows of `a` of a part at multiples of these ranks, so
# that 16 bytes are loaded at once.
OUTPUTS_AT_ONCE: Final = 16
RANKS_AT_ONCE: Final = 4
# Of shrunk inputs' rows, in numbers.
_ROW_OF_RANKS = 32

# Up to so many tokens, tiles are the smallest that tensor cores take.
_FEW_TOKENS = 256
_FEW_ROWS, _MANY_ROWS = 16, 64
# Of few tokens, so many are sorted by one program, and tiles of so many lines are made at a time.
_SORTED_BY_ONE, _LINES_AT_ONCE = 32, 32
# Ranks at a time of the second product.
_RANKS = 16
# Of many tokens, only as many programs share a token's inputs as give each multiprocessor some work.
_SHRINKING_ON_EACH = 2


@dataclass(frozen=True, slots=True)
class _Shrinking:
    """How the first product is cut into programs: each has a share of a tile's inputs, `depth` of them at a time."""

    ranks: int
    """At a time."""
    depth: int
    warps: int
    stages: int
    shares: int = 8
    """At most so many programs share a token's inputs."""
    least: int = 512
    """Inputs of a share, at least."""


@dataclass(frozen=True, slots=True)
class _Expansion:
    """How the second product is cut into programs: each has a share of a tile's blocks of `block` columns.

    Programs wait for memory mostly, so there are as many as find room together, equally many for each used tile.
    """

    block: int
    programs: int
    """On each multiprocessor; of many tokens, columns of a tile that each program has if all tiles are used."""
    warps: int
    stages: int
    registers: int | None = None
    """Most of a thread, so that more programs find room."""


# Of few tokens with one matrix and with several together, and of many.
_FEW_OF_ONE, _FEW_OF_SEVERAL = _Shrinking(16, 256, 2, 3), _Shrinking(64, 128, 4, 3)
_MANY_OF_ONE, _MANY_OF_SEVERAL = _Shrinking(32, 128, 4, 3), _Shrinking(64, 128, 4, 3)
# Of few tokens and of many; and of gated products, where a block has columns of both halves.
_FEW, _MANY = _Expansion(128, 4, 4, 3, registers=128), _Expansion(128, 512, 4, 3)
_FEW_GATED, _MANY_GATED = _Expansion(128, 4, 4, 3, registers=128), _Expansion(64, 512, 8, 1, registers=80)
# Of a machine without a GPU, where Triton's interpreter runs.
_INTERPRETED_MULTIPROCESSORS = 8
_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") != "0"


@dataclass(frozen=True, slots=True)
class TokenTiles:
    """The tokens of a pass in tiles of those with one adapter; how many there are follows from the tokens' number."""

    order: torch.Tensor  # [tokens] int64, those without an adapter first, then by slot
    # [tiles, 4] int32: line of a table, first and stop in `order`, and how many tiles are used, in all of them; those
    # without an adapter first, unused ones last
    tiles: torch.Tensor
    rows: int
    """Most tokens of a tile."""

    @property
    def are_few(self) -> bool:
        """Whether programs are cut for few tokens."""
        return self.rows == _FEW_ROWS

    @classmethod
    def of(cls, slots: torch.Tensor, count: int) -> TokenTiles:
        """Sort tokens [tokens] int32 with slots below `count`, or -1 for none, without waiting for the device."""
        tokens, device = slots.shape[0], slots.device
        rows = _FEW_ROWS if tokens <= _FEW_TOKENS else _MANY_ROWS
        most = _most_tiles(tokens, rows, count + 1)
        if rows == _FEW_ROWS:
            order = torch.empty(tokens, dtype=torch.int64, device=device)
            places = torch.empty(most, 4, dtype=torch.int32, device=device)
            sort_tokens[(triton.cdiv(tokens, _SORTED_BY_ONE),)](
                slots, order, places, tokens, most,
                ADAPTERS=count, ROWS=rows, MOST=_FEW_TOKENS, OWN=_SORTED_BY_ONE, LINES=_LINES_AT_ONCE,
            )  # fmt: skip
            return cls(order, places, rows)
        return cls._by_counting(slots, count, rows, most)

    @classmethod
    def of_pairs(cls, slots: torch.Tensor, expert_ids: torch.Tensor, lines: int) -> TokenTiles:
        """Sort pairs of a token and the experts that it has chosen, [tokens, chosen] int64, token by token.

        `slots` are the tokens', as in `of`. Expert i has `lines` lines of a table from line i * lines on: that of no
        adapter, and those of the slots. Only line 0 is used for tokens without an adapter.
        """
        of_pair = torch.where(slots[:, None] < 0, 0, expert_ids * lines + slots[:, None] + 1).flatten()
        pairs = of_pair.shape[0]
        rows = _FEW_ROWS if pairs <= _FEW_TOKENS else _MANY_ROWS
        # Of the lines, most are unused: what is counted are runs of the same line.
        line, order = of_pair.sort(stable=True)
        run = torch.nn.functional.pad((line[1:] != line[:-1]).cumsum(0), (1, 0))
        sizes = torch.zeros_like(line).index_add_(0, run, torch.ones_like(line))
        line_of = torch.zeros_like(line).scatter_(0, run, line)
        return cls(order, _places(sizes, line_of, rows, _most_tiles(pairs, rows, pairs)), rows)

    @classmethod
    def _by_counting(cls, slots: torch.Tensor, count: int, rows: int, most: int) -> TokenTiles:
        lines = slots + 1
        every = torch.arange(count + 1, dtype=torch.int32, device=slots.device)
        sizes = (lines[None, :] == every[:, None]).sum(1)
        return cls(lines.sort(stable=True).indices, _places(sizes, every, rows, most), rows)


def _most_tiles(tokens: int, rows: int, lines: int) -> int:
    """Return the largest number of tiles of `rows` tokens, if tokens have up to `lines` lines."""
    return min(tokens, tokens // rows + min(tokens, lines))


def _places(sizes: torch.Tensor, lines: torch.Tensor, rows: int, most: int) -> torch.Tensor:
    """Return the tiles [most, 4] of `TokenTiles` of runs of sorted tokens: their sizes and lines, ascending [runs]."""
    stops, tiles = sizes.cumsum(0), (sizes + rows - 1) // rows
    ends = tiles.cumsum(0)
    number = torch.arange(most, device=sizes.device)
    run = torch.searchsorted(ends, number, right=True).clamp(max=len(sizes) - 1)
    is_used = number < ends[-1]
    first = stops[run] - sizes[run] + (number - ends[run] + tiles[run]) * rows
    stop = torch.minimum(first + rows, stops[run])
    used = ends[-1].expand(most)
    return torch.stack((lines[run] * is_used, first * is_used, stop * is_used, used), dim=1).to(torch.int32)


@dataclass(frozen=True, slots=True)
class PartLines:
    """Factors of one matrix of a product, as programs read them: `b` [ranks, outputs], of outputs from `first` on.

    Lines of `b` contain zeros where the matrix has no outputs.
    """

    first: int
    ranks: slice
    b: torch.Tensor


def lay_out(a: torch.Tensor, parts: Sequence[PartFactors]) -> tuple[torch.Tensor, tuple[PartLines, ...]]:
    """Return `a` [ranks of all parts, in] and the parts' factors as programs read them."""
    blocks, lines, begin = [], [], 0
    for part in parts:
        line = _lines(part.first, begin, part.b)
        rest = line.b.shape[0] - part.b.shape[1]
        blocks += [a[part.ranks], a.new_zeros(rest, a.shape[1])]
        lines.append(line)
        begin = line.ranks.stop
    return (a if begin == a.shape[0] else torch.cat(blocks)), tuple(lines)


def lay_out_embedding(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, tuple[PartLines, ...]]:
    """Return `a` [vocabulary, ranks] and `b` [hidden, ranks] as programs read them."""
    line = _lines(0, 0, b)
    return torch.nn.functional.pad(a, (0, line.ranks.stop - a.shape[1])), (line,)


def _lines(first: int, first_rank: int, b: torch.Tensor) -> PartLines:
    outputs, ranks = b.shape
    before = first % OUTPUTS_AT_ONCE
    height, width = _multiple(ranks, RANKS_AT_ONCE), _multiple(before + outputs, OUTPUTS_AT_ONCE)
    turned = b.new_zeros(height, width)
    turned[:ranks, before : before + outputs] = b.t()
    return PartLines(first - before, slice(first_rank, first_rank + height), turned)


def table_columns(parts: int) -> int:
    """Return the number of columns of a table for products of up to `parts` matrices."""
    return int(HEAD.value + parts * OF_PART.value)


def table_line(a: torch.Tensor, parts: Sequence[PartLines], columns: int) -> list[int]:
    """Return a table's line of `columns` for factors as `lay_out` or `lay_out_embedding` returns them."""
    line = [a.data_ptr(), parts[-1].ranks.stop]
    for part in parts:
        ranks, outputs = part.b.shape
        line += [part.b.data_ptr(), part.first, outputs, part.ranks.start, ranks]
    return line + [0] * (columns - len(line))


def shrunk_inputs(
    tiles: TokenTiles, table: torch.Tensor, parts: int, most_ranks: int, inputs: torch.Tensor
) -> torch.Tensor:
    """Return the products of inputs [tokens, in] with `a`, as the two functions below take them.

    Args:
        tiles: the tokens.
        table: [1 + slots, columns] int64, the factors of one product.
        parts: matrices above each other in the product.
        most_ranks: at least as many as any line of the table has.
        inputs: of the type of factors and outputs.
    """
    inputs, form, partial = _before_shrinking(tiles, parts, most_ranks, inputs)
    _shrink_into(partial, tiles, table, form, inputs, _overlap(tiles))
    return partial


class ShrinkingBeside:
    """Shrinks inputs of few tokens on a stream of its own, beside what runs in the context; see `shrunk_inputs`.

    When the context ends, the current stream waits for it.
    """

    def __init__(
        self, side: torch.cuda.Stream, tiles: TokenTiles, table: torch.Tensor, parts: int, most_ranks: int,
        inputs: torch.Tensor,
    ) -> None:  # fmt: skip
        """Start on `side`, after all that was launched on the current stream."""
        # Memory is of the current stream, which waits before any of it can be freed.
        self._inputs, form, self.shrunk = _before_shrinking(tiles, parts, most_ranks, inputs)
        self._side = side
        side.wait_stream(torch.cuda.current_stream(inputs.device))
        with torch.cuda.stream(side):
            _shrink_into(self.shrunk, tiles, table, form, self._inputs, {"OVERLAPS": False})

    def __enter__(self) -> torch.Tensor:
        return self.shrunk

    def __exit__(self, *_: object) -> None:
        torch.cuda.current_stream(self.shrunk.device).wait_stream(self._side)


def add_products(
    tiles: TokenTiles, table: torch.Tensor, parts: int, shrunk: torch.Tensor, outputs: torch.Tensor,
    *, is_joined: bool = False,
) -> None:  # fmt: skip
    """Add the adapters' products of `shrunk` inputs to outputs [tokens, out] in place; rows are contiguous.

    If it `is_joined`, inputs were shrunk on another stream; else the program launched last must be the one that shrank
    them, as outputs may be read before it is done. See `shrunk_inputs` for the other arguments.
    """
    _expand_into(outputs, tiles, table, shrunk, parts, {"OVERLAPS": False} if is_joined else _overlap(tiles))


def gated_products(
    tiles: TokenTiles, table: torch.Tensor, parts: int, shrunk: torch.Tensor, both: torch.Tensor,
    activation: Activation, *, is_joined: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Return the gated product [tokens, width] of both halves [tokens, 2 width] with products of `shrunk` inputs.

    Tokens without an adapter are gated as they are. See `add_products` for the other arguments; `both` is contiguous.
    """
    tokens, width = both.shape[0], both.shape[1] // 2
    outputs = both.new_empty(tokens, width)
    form = _FEW_GATED if tiles.are_few else _MANY_GATED
    expand_and_gate[_programs(form, tiles, width, both.device)](
        both, outputs, tiles.order, tiles.tiles, table, shrunk, tokens, shrunk.shape[2], shrunk.shape[0], width,
        NARROW=_is_narrow(both, shrunk), ACTIVATION=ACTIVATIONS[activation],
        **_constants(form, tiles, table, shrunk, parts), **({"OVERLAPS": False} if is_joined else _overlap(tiles)),
    )  # fmt: skip
    return outputs


def add_embeddings(
    tiles: TokenTiles, table: torch.Tensor, most_ranks: int, token_ids: torch.Tensor, outputs: torch.Tensor
) -> None:
    """Add the adapters' embeddings of `token_ids` [tokens] int64 to outputs [tokens, hidden] in place.

    `table` is as in `add_products`, but `a` is [vocabulary, ranks].
    """
    partial = _partial(1, token_ids.shape[0], most_ranks, outputs.device)
    look_up[(len(tiles.tiles),)](
        token_ids, tiles.order, tiles.tiles, table, partial, outputs, partial.shape[2],
        COLUMNS=table.shape[1], ROWS=tiles.rows, RANKS=_RANKS,
    )  # fmt: skip
    _expand_into(outputs, tiles, table, partial, 1, _overlap(tiles))


def _before_shrinking(
    tiles: TokenTiles, parts: int, most_ranks: int, inputs: torch.Tensor
) -> tuple[torch.Tensor, _Shrinking, torch.Tensor]:
    """Return inputs with contiguous rows, how to cut them, and room for [shares, tokens in order, ranks] float32."""
    tokens, width = inputs.shape
    if inputs.stride(1) != 1:
        inputs = inputs.contiguous()
    # Sums do not depend on which programs run first.
    if tiles.are_few:
        form = _FEW_OF_ONE if parts == 1 else _FEW_OF_SEVERAL
        shares = form.shares
    else:
        form = _MANY_OF_ONE if parts == 1 else _MANY_OF_SEVERAL
        shares = _SHRINKING_ON_EACH * _multiprocessors(inputs.device) // triton.cdiv(tokens, _MANY_ROWS)
        shares = max(1, min(shares, form.shares))
    form = replace(form, shares=triton.cdiv(width, _share_of(width, form, shares)))
    return inputs, form, _partial(form.shares, tokens, most_ranks, inputs.device)


def _share_of(width: int, form: _Shrinking, shares: int) -> int:
    """Return the number of inputs of each program, if about so many share them."""
    return _multiple(max(form.least, -(-width // shares)), form.depth)


def _shrink_into(
    partial: torch.Tensor, tiles: TokenTiles, table: torch.Tensor, form: _Shrinking, inputs: torch.Tensor,
    overlap: dict[str, Any],
) -> None:  # fmt: skip
    tokens, width = inputs.shape
    steps = _share_of(width, form, form.shares) // form.depth
    shrink[(len(tiles.tiles), form.shares)](
        inputs, tiles.order, tiles.tiles, table, partial, tokens, partial.shape[2], steps, width, inputs.stride(0),
        COLUMNS=table.shape[1], ROWS=tiles.rows, RANKS=form.ranks, DEPTH=form.depth, EVEN=width % form.depth == 0,
        NARROW=_is_narrow(inputs, partial), num_warps=form.warps, num_stages=form.stages, **overlap,
    )  # fmt: skip


def _expand_into(
    outputs: torch.Tensor, tiles: TokenTiles, table: torch.Tensor, partial: torch.Tensor, parts: int,
    overlap: dict[str, Any],
) -> None:  # fmt: skip
    assert outputs.stride(1) == 1, "rows of outputs are contiguous"
    shares, tokens, most_ranks = partial.shape
    form = _FEW if tiles.are_few else _MANY
    expand[_programs(form, tiles, outputs.shape[1], outputs.device)](
        outputs, tiles.order, tiles.tiles, table, partial, tokens, most_ranks, shares, outputs.shape[1],
        outputs.stride(0), NARROW=_is_narrow(outputs, partial), **_constants(form, tiles, table, partial, parts),
        **overlap,
    )  # fmt: skip


def _programs(form: _Expansion, tiles: TokenTiles, width: int, device: torch.device) -> tuple[int]:
    """Return the number of programs that share the blocks of all tiles, of which the host does not know the number."""
    most = len(tiles.tiles) * triton.cdiv(width, form.block)
    if tiles.are_few:
        return (min(most, max(form.programs * _multiprocessors(device), len(tiles.tiles))),)
    return (len(tiles.tiles) * triton.cdiv(width, form.programs),)


def _constants(
    form: _Expansion, tiles: TokenTiles, table: torch.Tensor, partial: torch.Tensor, parts: int
) -> dict[str, Any]:
    """Return the constants that programs of the second product are compiled and launched with."""
    shares = triton.next_power_of_2(partial.shape[0]) if tiles.are_few else 1
    registers = {} if form.registers is None else {"maxnreg": form.registers}
    return {
        "COLUMNS": table.shape[1], "ROWS": tiles.rows, "RANKS": _RANKS, "BLOCK": form.block, "SHARES": shares,
        "PARTS": parts, "STAGES": form.stages, "num_warps": form.warps, **registers,
    }  # fmt: skip


def _overlap(tiles: TokenTiles) -> dict[str, Any]:
    """Return the arguments of a launch that say whether it overlaps with the one before."""
    return launch_options(tiles.order.shape[0], most_tokens=_FEW_TOKENS)


def _partial(shares: int, tokens: int, most_ranks: int, device: torch.device) -> torch.Tensor:
    ranks = _multiple(most_ranks, _ROW_OF_RANKS)
    return torch.empty(shares, tokens, ranks, dtype=torch.float32, device=device)


def _is_narrow(*tensors: torch.Tensor) -> bool:
    """Return whether places in all of them fit into 32 bits."""
    return all(tensor.shape[0] * tensor.stride(0) < 2**31 for tensor in tensors)


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def _multiprocessors(device: torch.device) -> int:
    if _IS_INTERPRETED:
        return _INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
