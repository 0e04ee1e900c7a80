"""First code of every supervised process: tie its life to the supervisor's, then become the service.

Run as `python -m deploy.supervisor.child PARENT_PID MODULE [ARGUMENTS…]`.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask the kernel to kill this process when its parent dies, and run the module as `__main__`."""
    parent, module, arguments = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    die_with_parent(parent)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def die_with_parent(parent: int) -> None:
    """Have this process killed when `parent` ends, also when that one is killed itself; Linux only, elsewhere nothing.

    It is done here and not before exec: code between fork and exec would need a real fork of a process that runs gRPC.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        sys.exit(f"the supervisor (pid {parent}) is gone")


if __name__ == "__main__":
    main()
