"""Entry point of every supervised process: it makes sure to be killed with the supervisor, then runs the service.

Run as `python -m deploy.supervisor.child PARENT_PID MODULE [ARGUMENTS…]`.
"""

from __future__ import annotations

import os
import runpy
import sys

from common.child_process import die_with_parent


def main() -> None:
    """Make the kernel kill this process when its parent dies, and run the module as `__main__`.

    A service that returns has closed everything, so the process ends with `os._exit`: the interpreter's own shutdown
    takes up to two seconds with torch.
    """
    parent, module, arguments = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    die_with_parent(parent)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
