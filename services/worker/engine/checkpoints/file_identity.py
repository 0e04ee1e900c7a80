"""The identity of a checkpoint's files, which does not depend on the parts that a rank reads of them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_SAMPLES: Final = 512
_SAMPLE_BYTES: Final = 16 * 1024


def identity_of_files(files: Sequence[Path]) -> str:
    """Return a SHA-256 digest of the files' sizes and of samples of each.

    Samples are the first bytes, with names, types and shapes, the last ones, and some between at equal distances. Files
    of some megabytes are read as a whole. In larger ones, a change between samples goes unnoticed; training changes all
    weights.
    """
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{size}\n".encode())
        last = max(size - _SAMPLE_BYTES, 0)
        starts = range(0, size, _SAMPLE_BYTES)
        if len(starts) > _SAMPLES:
            sampled: Sequence[int] = [last * i // (_SAMPLES - 1) for i in range(_SAMPLES)]
        else:
            sampled = starts
        with path.open("rb") as file:
            for start in sampled:
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
