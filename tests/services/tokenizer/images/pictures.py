"""Pictures for tests, and files of them in every format and mode."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return a picture in mode RGB with soft and hard edges, so that filters make a difference."""
    random = np.random.default_rng(seed)
    rows, columns = np.indices((height, width))
    waves = np.stack([rows * 3 + columns * seed, columns * 5 + rows, rows * columns // 7], axis=-1) % 256
    noise = random.integers(0, 64, waves.shape)
    return Image.fromarray(((waves + noise) % 256).astype(np.uint8))


def file_of(image: Image.Image, name: str = "PNG", **options: Any) -> bytes:  # options of Pillow's writers
    """Return the file of a picture."""
    written = BytesIO()
    image.save(written, name, **options)
    return written.getvalue()
