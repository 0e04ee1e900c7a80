"""Child processes that end with their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have this process killed when `parent` ends, also when that one is killed itself; Linux only, elsewhere nothing.

    It is done here and not before exec: code between fork and exec would need a real fork of a process that runs gRPC.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        sys.exit(f"the parent (pid {parent}) is gone")
