"""Errors of decoders: which are due to the file, and which to this process or its libraries."""

from __future__ import annotations

import errno
from pathlib import PurePath
from typing import Final

# Of programs, whatever a file has. Imports fail in a process that can open no files.
_OWN_ERRORS: Final = (AssertionError, AttributeError, ImportError, NameError)
# What the confinement refuses, or limits.
_OWN_NUMBERS: Final = frozenset(
    {errno.EPERM, errno.EACCES, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOSYS, errno.EBADF}
)
MOST_CHARACTERS: Final = 500


def is_own(error: Exception) -> bool:
    """Return whether an error that a decoder raised is due to this process, not to the file that it decodes."""
    if isinstance(error, _OWN_ERRORS):
        return True
    return isinstance(error, OSError) and error.errno in _OWN_NUMBERS


def described(error: Exception) -> str:
    """Return an error and where it was raised, in one line for a log; no file is read for it."""
    trace, place = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        place = f" ({PurePath(code.co_filename).name}:{trace.tb_lineno} in {code.co_name})"
        trace = trace.tb_next
    return f"{type(error).__name__}: {error}"[: MOST_CHARACTERS - len(place)] + place
