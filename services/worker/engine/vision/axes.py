"""Positions of images in three dimensions for rotary embedding (M-RoPE, Qwen2-VL, Wang et al. 2024, section 2.1).

Tokens of a text have the same coordinate on all three axes: time, height and width. Those of an image have coordinates
of their squares of patches, counted from the position after the text before it; the text after it goes on from the
largest one, as in training. (Since version 5, `transformers` counts the text of a prompt after a long video from the
larger side of its frames, but generated tokens from the largest coordinate: a token then has one position as output and
another one in the next prompt, and cannot be found in a cache of prefixes.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from common.errors import ConfigurationError
from common.images import runs_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from common.types import RowImage, TokenIds
    from services.worker.engine.plans.passes import IntArray

# Time, height and width.
AXES = 3


def read_axes(text: Mapping[str, Any], default: tuple[int, ...], *, are_mixed: bool = False) -> tuple[int, ...]:
    """Return the axis whose coordinate each frequency [head_dim / 2] of a decoder's rotary embedding takes.

    Args:
        text: the decoder's part of a config.json.
        default: how many frequencies each axis has, where files do not say so.
        are_mixed: whether axes take turns (Qwen3-VL), the first one having the rest; else their frequencies are
            neighbours.
    """
    parameters = text.get("rope_parameters") or text.get("rope_scaling") or {}
    sections = parameters.get("mrope_section") or default
    count = (text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]) // 2
    if len(sections) != AXES or sum(sections) != count:
        raise ConfigurationError(f"mrope_section: {sections} are not the {count} frequencies of three axes")
    if not are_mixed:
        return tuple(axis for axis, its in enumerate(sections) for _ in range(its))
    return tuple(i % AXES if i < AXES * sections[i % AXES] else 0 for i in range(count))


def coordinates_of(token_ids: TokenIds, images: Sequence[RowImage], merge: int) -> tuple[IntArray, int]:
    """Return the coordinates [3, tokens] of a row, and what is added to the positions of tokens after these.

    Tokens below 0 are those of images; `merge` is the side in patches of the squares that they stand for. Those of an
    image are neighbours. So are those of a video, or those of each step in time, if there is text between the steps,
    which are counted like images then.

    Raises:
        ValueError: the grid of an image is not that of its tokens, or coordinates are larger than positions, of which
            rotary embedding has no more than the context.
    """
    below: IntArray = np.flatnonzero(token_ids < 0)
    parts: list[IntArray] = []
    start = position = taken = 0
    for image in images:
        runs = runs_of(below[taken : taken + image.length])
        taken += image.length
        for (first, end), grid, times in zip(runs, *_grids(image, runs, merge), strict=True):
            before = first - start
            parts.append(np.broadcast_to(np.arange(position, position + before), (AXES, before)))
            coordinates = np.indices(grid).reshape(AXES, -1)
            coordinates[0] = np.repeat(times, grid[1] * grid[2])
            parts.append(coordinates + position + before)
            start, position = end, int(parts[-1].max()) + 1
            if position > end:
                raise ValueError(f"a grid with coordinates up to {position - 1}, beyond its {end} tokens")
    rest = token_ids.size - start
    parts.append(np.broadcast_to(np.arange(position, position + rest), (AXES, rest)))
    return np.concatenate(parts, axis=1), position - start


def _grids(
    image: RowImage, runs: Sequence[tuple[int, int]], merge: int
) -> tuple[list[tuple[int, int, int]], list[list[int]]]:
    """Return the squares in time, height and width of each run of an image's tokens, and its coordinates in time."""
    if len(image.grid) < AXES:
        raise ValueError(f"an image with a grid of {len(image.grid)} axes")
    steps, height, width = image.grid[0], image.grid[1] // merge, image.grid[2] // merge
    times = list(image.grid[AXES:]) or list(range(steps))
    is_whole = len(runs) == 1
    size = steps * height * width if is_whole else height * width
    if len(times) != steps or len(runs) not in (1, steps) or any(end - first != size for first, end in runs):
        raise ValueError(f"an image of {image.length} tokens with a grid of {steps} x {height} x {width}")
    if is_whole:
        return [(steps, height, width)], [times]
    return [(1, height, width)] * steps, [[0]] * steps
