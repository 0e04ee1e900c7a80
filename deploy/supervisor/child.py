"""Entry point of every supervised process: it makes sure to be killed with the supervisor, then runs the service.

Run as `python -m deploy.supervisor.child PARENT_PID [--ignore-sigterm] MODULE [ARGUMENTS…]`. With the option, only
SIGINT asks the process to end: systemd sends SIGTERM to all processes of a unit at once, but services end in order.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys

from common.child_process import die_with_parent

IGNORE_SIGTERM = "--ignore-sigterm"


def main() -> None:
    """Make the kernel kill this process when its parent dies, and run the module as `__main__`.

    A service that returns has closed everything, so the process ends with `os._exit`: the interpreter's own shutdown
    takes up to two seconds with torch.
    """
    parent, arguments = int(sys.argv[1]), sys.argv[2:]
    die_with_parent(parent)
    if arguments[0] == IGNORE_SIGTERM:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        arguments.pop(0)
    sys.argv = arguments
    with contextlib.suppress(KeyboardInterrupt):  # a request to end before the service handles it
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
