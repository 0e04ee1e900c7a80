"""Positions of images in three dimensions for rotary embedding (M-RoPE, Qwen2-VL, Wang et al. 2024, section 2.1).

Tokens of a text have the same coordinate on all three axes: time, height and width. Those of an image have coordinates
of their squares of patches, counted from the position after the text before it; the text after it goes on from the
largest one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from common.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from common.types import RowImage
    from services.worker.engine.plans.passes import IntArray

_AXES = 3


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
    if len(sections) != _AXES or sum(sections) != count:
        raise ConfigurationError(f"mrope_section: {sections} are not the {count} frequencies of three axes")
    if not are_mixed:
        return tuple(axis for axis, its in enumerate(sections) for _ in range(its))
    return tuple(i % _AXES if i < _AXES * sections[i % _AXES] else 0 for i in range(count))


def coordinates_of(tokens: int, images: Sequence[RowImage], merge: int) -> tuple[IntArray, int]:
    """Return the coordinates [3, tokens] of a row, and what is added to the positions of tokens after these.

    The tokens of an image are neighbours; `merge` is the side in patches of the squares that they stand for.

    Raises:
        ValueError: the grid of an image is not that of its tokens.
    """
    parts: list[IntArray] = []
    start = position = 0
    for image in images:
        before = image.offset - start
        parts.append(np.broadcast_to(np.arange(position, position + before), (_AXES, before)))
        position += before
        if len(image.grid) != _AXES:
            raise ValueError(f"an image with a grid of {len(image.grid)} axes")
        frames, height, width = image.grid[0], image.grid[1] // merge, image.grid[2] // merge
        if frames * height * width != image.length:
            raise ValueError(f"an image of {image.length} tokens with a grid of {frames} x {height} x {width}")
        parts.append(np.indices((frames, height, width)).reshape(_AXES, -1) + position)
        position += max(height, width)
        start = image.offset + image.length
    rest = tokens - start
    parts.append(np.broadcast_to(np.arange(position, position + rest), (_AXES, rest)))
    return np.concatenate(parts, axis=1), position - start
