"""Programs of gated delta nets, by the formulas in `kernels/torch/delta_net.py`: for a token a row, and for blocks.

Columns of a projected token are queries, keys, values, output gates, and of each value head a strength and a decay.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _silu(inputs):
    return inputs / (1.0 + tl.exp(-inputs))


@triton.jit
def _strength_and_decay(projected, decay_scales, decay_bias, head, inside, HEADS: tl.constexpr):
    """Return the strength of tokens, and the logarithm of their decay; of those not `inside`, both are 0."""
    strength = tl.load(projected + head, mask=inside, other=0.0).to(tl.float32)
    decay = tl.load(projected + HEADS + head, mask=inside, other=0.0).to(tl.float32) + tl.load(decay_bias + head)
    # The logarithm of 1 + exp(x) is x where it is large.
    softplus = tl.where(decay > 20.0, decay, tl.log(1.0 + tl.exp(tl.minimum(decay, 20.0))))
    strength = 1.0 / (1.0 + tl.exp(-strength))
    return tl.where(inside, strength, 0.0), tl.where(inside, softplus * tl.load(decay_scales + head), 0.0)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def filter_tokens(
    projected, inputs, filters, slots, convolved, stride, width,
    KERNEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Convolve one token of a row with those before it, which move on by one. Grid: rows, blocks of columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    kept = inputs + tl.load(slots + row).to(tl.int64) * (KERNEL - 1) * width + columns
    new = tl.load(projected + row * stride + columns, mask=inside, other=0.0)
    total = new.to(tl.float32) * tl.load(filters + (KERNEL - 1) * width + columns, mask=inside, other=0.0).to(
        tl.float32
    )
    for i in tl.static_range(KERNEL - 1):
        old = tl.load(kept + i * width, mask=inside, other=0.0)
        total += old.to(tl.float32) * tl.load(filters + i * width + columns, mask=inside, other=0.0).to(tl.float32)
        if i > 0:
            tl.store(kept + (i - 1) * width, old, mask=inside)
    tl.store(kept + (KERNEL - 2) * width, new, mask=inside)
    element = convolved.dtype.element_ty
    tl.store(convolved + row * width + columns, _silu(total).to(element), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def take_tokens(
    convolved, projected, matrices, slots, decay_scales, decay_bias, attended, stride,
    HEADS: tl.constexpr, PER_KEY: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Take one token of a row into some columns of a head's state. Grid: rows, value heads, blocks of columns.

    `attended` is [rows, values] float32.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    keys: tl.constexpr = HEADS // PER_KEY * KEY_DIM
    values: tl.constexpr = HEADS * VALUE_DIM
    width: tl.constexpr = 2 * keys + values
    at_key, at_value = tl.arange(0, KEY_BLOCK), tl.program_id(2) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    in_key, in_value = at_key < KEY_DIM, at_value < VALUE_DIM
    place = matrices + (tl.load(slots + row).to(tl.int64) * HEADS + head) * KEY_DIM * VALUE_DIM
    place = place + at_key[:, None] * VALUE_DIM + at_value[None, :]
    inside = in_key[:, None] & in_value[None, :]
    state = tl.load(place, mask=inside, other=0.0)
    token = convolved + row * width
    query = tl.load(token + head // PER_KEY * KEY_DIM + at_key, mask=in_key, other=0.0).to(tl.float32)
    key = tl.load(token + keys + head // PER_KEY * KEY_DIM + at_key, mask=in_key, other=0.0).to(tl.float32)
    value = tl.load(token + 2 * keys + head * VALUE_DIM + at_value, mask=in_value, other=0.0).to(tl.float32)
    query *= tl.rsqrt(tl.sum(query * query, axis=0) + LEAST) * (KEY_DIM**-0.5)
    key *= tl.rsqrt(tl.sum(key * key, axis=0) + LEAST)
    given = projected + row * stride + width + values
    strength, decay = _strength_and_decay(given, decay_scales, decay_bias, head, row >= 0, HEADS=HEADS)
    state *= tl.exp(decay)
    known = tl.sum(state * key[:, None], axis=0)
    state += key[:, None] * ((value - known) * strength)[None, :]
    tl.store(place, state, mask=inside)
    seen = tl.sum(state * query[:, None], axis=0)
    tl.store(attended + row * values + head * VALUE_DIM + at_value, seen, mask=in_value)


# Of a block: its first token, how many, the first token of its chunk, the chunk's slot, and whether it begins there.
BLOCK_COLUMNS = tl.constexpr(5)
# Of a chunk: its first token, how many, its slot, whether it begins there, and its first block.
CHUNK_COLUMNS = tl.constexpr(5)


@triton.jit(do_not_specialize_on_alignment=["blocks_of_batch"])
def filter_blocks(
    projected, inputs, filters, blocks_of_batch, convolved, stride, width,
    KERNEL: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Convolve the tokens of a block with those before them. Grid: blocks, blocks of columns."""
    entry = blocks_of_batch + tl.program_id(0) * BLOCK_COLUMNS
    first, count = tl.load(entry).to(tl.int64), tl.load(entry + 1)
    start, slot, begins = tl.load(entry + 2).to(tl.int64), tl.load(entry + 3).to(tl.int64), tl.load(entry + 4)
    tokens, columns = first + tl.arange(0, TOKENS), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token, inside = tl.arange(0, TOKENS) < count, columns < width
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    for i in tl.static_range(KERNEL):
        sources = tokens + (i - (KERNEL - 1))
        is_new = sources >= start
        mask = is_token[:, None] & inside[None, :]
        new = projected + sources[:, None] * stride + columns[None, :]
        factors = tl.load(filters + i * width + columns, mask=inside, other=0.0).to(tl.float32)
        taken = tl.load(new, mask=mask & is_new[:, None], other=0.0).to(tl.float32)
        if i < KERNEL - 1:
            lines = slot * (KERNEL - 1) + (sources - start + (KERNEL - 1))
            old = inputs + lines[:, None] * width + columns[None, :]
            is_old = (sources < start) & (begins == 0)
            taken += tl.load(old, mask=mask & is_old[:, None], other=0.0).to(tl.float32)
        total += taken * factors[None, :]
    element = convolved.dtype.element_ty
    made = _silu(total).to(element)
    tl.store(convolved + tokens[:, None] * width + columns[None, :], made, mask=is_token[:, None] & inside[None, :])


@triton.jit(do_not_specialize_on_alignment=["chunks_of_batch"])
def keep_inputs(
    projected, inputs, chunks_of_batch, stride, width,
    KERNEL: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Keep the last tokens of a chunk for the convolution of those that follow. Grid: chunks, blocks of columns."""
    entry = chunks_of_batch + tl.program_id(0) * CHUNK_COLUMNS
    start, count = tl.load(entry).to(tl.int64), tl.load(entry + 1)
    slot, begins = tl.load(entry + 2).to(tl.int64), tl.load(entry + 3)
    columns, lines = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, LINES)
    inside = (lines < KERNEL - 1)[:, None] & (columns < width)[None, :]
    # The token of each line in the chunk; those before it are in lines that lie behind their new ones.
    tokens = count - (KERNEL - 1) + lines
    kept = inputs + slot * (KERNEL - 1) * width + columns[None, :]
    is_new = (tokens >= 0)[:, None]
    new = tl.load(projected + (start + tokens)[:, None] * stride + columns[None, :], mask=inside & is_new, other=0.0)
    is_old = (tokens < 0) & (begins == 0)
    old = tl.load(kept + (tokens + (KERNEL - 1))[:, None] * width, mask=inside & is_old[:, None], other=0.0)
    # All threads have read before one writes.
    tl.debug_barrier()
    tl.store(kept + lines[:, None] * width, tl.where(is_new, new, old), mask=inside)


@triton.jit
def _invert(system, TOKENS: tl.constexpr, SUBBLOCK: tl.constexpr):
    """Return the inverse of 1 + `system` [TOKENS, TOKENS], which is 0 on and above the diagonal.

    TOKENS is at most 4 times SUBBLOCK. Subblocks on the diagonal are inverted by substitution, all at once; D, which
    consists of them, leaves D (1 + system) = 1 + N, whose inverse is (1 - N) (1 + N^2), as N^4 = 0. Powers of the
    whole system have no such bound: with equal keys they reach 10^17.
    """
    count: tl.constexpr = TOKENS // SUBBLOCK
    lines, within = tl.arange(0, count), tl.arange(0, SUBBLOCK)
    is_diagonal = (lines[:, None] == lines[None, :])[:, None, :, None]
    parts = tl.reshape(system, (count, SUBBLOCK, count, SUBBLOCK))
    inverses = -tl.sum(tl.where(is_diagonal, parts, 0.0), axis=2)
    # Line i of an inverse follows from those before it.
    for i in range(1, SUBBLOCK):
        is_line = (within == i)[None, :, None]
        line = tl.sum(tl.where(is_line, inverses, 0.0), axis=1)
        line += tl.sum(line[:, :, None] * inverses, axis=1)
        inverses = tl.where(is_line, line[:, None, :], inverses)
    inverses += tl.where(within[:, None] == within[None, :], 1.0, 0.0)[None, :, :]
    diagonal = tl.reshape(tl.where(is_diagonal, inverses[:, :, None, :], 0.0), (TOKENS, TOKENS))
    below = tl.reshape(tl.where(is_diagonal, 0.0, parts), (TOKENS, TOKENS))
    rest = tl.dot(diagonal, below, input_precision="tf32x3")
    squared = tl.dot(rest, rest, input_precision="tf32x3")
    inverse = diagonal + tl.dot(squared, diagonal, input_precision="tf32x3")
    return inverse - tl.dot(rest, inverse, input_precision="tf32x3")


@triton.jit(do_not_specialize_on_alignment=["blocks_of_batch"])
def solve_blocks(
    convolved, projected, decay_scales, decay_bias, blocks_of_batch, inverses, scores, factors, stride,
    HEADS: tl.constexpr, PER_KEY: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr, TOKENS: tl.constexpr, SUBBLOCK: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Compute what a block does to itself: the inverse of its system, and its scores. Grid: blocks, value heads.

    `inverses` and `scores` are [blocks, heads, TOKENS, TOKENS] float32, `factors` [blocks, heads, 4, TOKENS]: of each
    token the logarithm of the decay since the block's beginning, the strength, and what normalises query and key.
    """
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    keys: tl.constexpr = HEADS // PER_KEY * KEY_DIM
    values: tl.constexpr = HEADS * VALUE_DIM
    width: tl.constexpr = 2 * keys + values
    first = tl.load(blocks_of_batch + block * BLOCK_COLUMNS).to(tl.int64)
    count = tl.load(blocks_of_batch + block * BLOCK_COLUMNS + 1)
    numbers, at_key = tl.arange(0, TOKENS), tl.arange(0, KEY_BLOCK)
    is_token = numbers < count
    inside = is_token[:, None] & (at_key < KEY_DIM)[None, :]
    heads = convolved + (first + numbers)[:, None] * width + head // PER_KEY * KEY_DIM + at_key[None, :]
    query = tl.load(heads, mask=inside, other=0.0).to(tl.float32)
    key = tl.load(heads + keys, mask=inside, other=0.0).to(tl.float32)
    query_scale = tl.rsqrt(tl.sum(query * query, axis=1) + LEAST) * (KEY_DIM**-0.5)
    key_scale = tl.rsqrt(tl.sum(key * key, axis=1) + LEAST)
    query *= query_scale[:, None]
    key *= key_scale[:, None]
    given = projected + (first + numbers) * stride + width + values
    strength, decay = _strength_and_decay(given, decay_scales, decay_bias, head, is_token, HEADS=HEADS)
    since = tl.cumsum(decay, axis=0)
    is_earlier = numbers[:, None] > numbers[None, :]
    is_seen = numbers[:, None] >= numbers[None, :]
    # Sums fall, so no exponential of what is used exceeds 1.
    between = tl.exp(tl.where(is_seen, since[:, None] - since[None, :], 0.0))
    transposed = tl.trans(key)
    system = tl.dot(key, transposed) * between * strength[:, None]
    score = tl.where(is_seen, tl.dot(query, transposed) * between, 0.0)
    inverse = _invert(tl.where(is_earlier, system, 0.0), TOKENS, SUBBLOCK)
    at = block * HEADS + head
    square = at * TOKENS * TOKENS + numbers[:, None] * TOKENS + numbers[None, :]
    tl.store(inverses + square, inverse)
    tl.store(scores + square, score)
    factor = factors + at * 4 * TOKENS + numbers
    tl.store(factor, since)
    tl.store(factor + TOKENS, strength)
    tl.store(factor + 2 * TOKENS, query_scale)
    tl.store(factor + 3 * TOKENS, key_scale)


@triton.jit(do_not_specialize_on_alignment=["chunks_of_batch"])
def take_blocks(
    convolved, matrices, chunks_of_batch, inverses, scores, factors, attended,
    HEADS: tl.constexpr, PER_KEY: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Take the blocks of a chunk, one after the other, into some columns of a head's state.

    Grid: chunks, value heads, blocks of a value's columns. `attended` is [tokens, values] float32.
    """
    entry, head = chunks_of_batch + tl.program_id(0) * CHUNK_COLUMNS, tl.program_id(1)
    start, count = tl.load(entry).to(tl.int64), tl.load(entry + 1)
    slot, begins, block = tl.load(entry + 2).to(tl.int64), tl.load(entry + 3), tl.load(entry + 4).to(tl.int64)
    keys: tl.constexpr = HEADS // PER_KEY * KEY_DIM
    values: tl.constexpr = HEADS * VALUE_DIM
    width: tl.constexpr = 2 * keys + values
    numbers, at_key = tl.arange(0, TOKENS), tl.arange(0, KEY_BLOCK)
    at_value = tl.program_id(2) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    in_key, in_value = at_key < KEY_DIM, at_value < VALUE_DIM
    place = matrices + (slot * HEADS + head) * KEY_DIM * VALUE_DIM + at_key[:, None] * VALUE_DIM + at_value[None, :]
    of_state = in_key[:, None] & in_value[None, :]
    state = tl.load(place, mask=of_state & (begins == 0), other=0.0)
    for done in range(0, count, TOKENS):
        is_token = done + numbers < count
        tokens = start + done + numbers
        inside = is_token[:, None] & in_key[None, :]
        heads = convolved + tokens[:, None] * width + head // PER_KEY * KEY_DIM + at_key[None, :]
        query = tl.load(heads, mask=inside, other=0.0).to(tl.float32)
        key = tl.load(heads + keys, mask=inside, other=0.0).to(tl.float32)
        of_value = is_token[:, None] & in_value[None, :]
        value = convolved + tokens[:, None] * width + 2 * keys + head * VALUE_DIM + at_value[None, :]
        value = tl.load(value, mask=of_value, other=0.0).to(tl.float32)
        at = block * HEADS + head
        square = at * TOKENS * TOKENS + numbers[:, None] * TOKENS + numbers[None, :]
        factor = factors + at * 4 * TOKENS
        since, last = tl.load(factor + numbers), tl.load(factor + TOKENS - 1)
        strength = tl.load(factor + TOKENS + numbers)
        query_scale, key_scale = tl.load(factor + 2 * TOKENS + numbers), tl.load(factor + 3 * TOKENS + numbers)
        from_start = tl.exp(since)
        wanted = strength[:, None] * (value - (from_start * key_scale)[:, None] * tl.dot(key, state))
        corrections = tl.dot(tl.load(inverses + square), wanted)
        seen = (from_start * query_scale)[:, None] * tl.dot(query, state)
        seen += tl.dot(tl.load(scores + square), corrections)
        tl.store(attended + tokens[:, None] * values + head * VALUE_DIM + at_value[None, :], seen, mask=of_value)
        to_end = corrections * (key_scale * tl.exp(last - since))[:, None]
        state = state * tl.exp(last) + tl.dot(tl.trans(key), to_end)
        block += 1
    tl.store(place, state, mask=of_state)


@triton.jit(do_not_specialize=["first_token"])
def finish_tokens(
    attended, projected, norm, outputs, first_token, stride, width, epsilon,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalise heads of a token and multiply them by their gates. Grid: tokens, blocks of value heads."""
    token = tl.program_id(0).to(tl.int64) + first_token
    heads, at_value = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK), tl.arange(0, VALUE_BLOCK)
    in_value = at_value < VALUE_DIM
    inside = (heads < HEADS)[:, None] & in_value[None, :]
    columns = heads[:, None] * VALUE_DIM + at_value[None, :]
    wide = tl.load(attended + token * HEADS * VALUE_DIM + columns, mask=inside, other=0.0)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / VALUE_DIM + epsilon)
    gate = tl.load(projected + token * stride + width + columns, mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(norm + at_value, mask=in_value, other=0.0)
    made = wide * scale[:, None] * factors[None, :] * _silu(gate)
    tl.store(outputs + token * HEADS * VALUE_DIM + columns, made.to(outputs.dtype.element_ty), mask=inside)
