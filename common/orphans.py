"""Child processes that are killed when their parent ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when `parent` ends for any reason, SIGKILL included; no effect outside Linux.

    The child calls this itself: code between fork and exec would need a plain fork, which is unsafe in a process that
    runs gRPC.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before prctl took effect
        sys.exit(f"the parent process (pid {parent}) has ended")
