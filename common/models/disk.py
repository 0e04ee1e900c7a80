"""The disk of the cache of models: room for a download, and failures to write there."""

from __future__ import annotations

import errno
import shutil
from typing import TYPE_CHECKING, Final

from common.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

_MAKE_ROOM: Final = "delete models (`pando models list`, `pando models remove NAME`), or set HF_HOME to a larger disk"
_CONTINUES: Final = "the next download continues where this one stopped"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_UNWRITABLE: Final = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)


def check_space(model: str, folder: Path, needed: int) -> None:
    """Refuse a download of `needed` bytes below `folder`, which need not exist yet, if they do not fit.

    Raises:
        ConfigurationError: there is too little room.
    """
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ConfigurationError(
            f"model {model}: {needed / 1e9:.1f} GB are to be downloaded, and {folder} has {free / 1e9:.1f} GB free; "
            f"{_MAKE_ROOM}"
        )


def explain_disk(error: BaseException, folder: Path) -> str | None:
    """Describe a failure to write into the cache at `folder` and its remedy; None if `error` is another one."""
    if not isinstance(error, OSError):
        return None
    if error.errno in _FULL:
        return f"the disk of the cache ({folder}) is full; {_MAKE_ROOM}; {_CONTINUES}"
    if error.errno == errno.EFBIG:
        return (
            f"a file is larger than the disk of the cache ({folder}) or `ulimit -f` permits; set HF_HOME to another "
            f"disk, or raise the limit; {_CONTINUES}"
        )
    if error.errno in _UNWRITABLE and error.filename is not None:
        return f"the cache cannot be written ({error}); set HF_HOME to a directory of yours"
    return None
