"""First code of every supervised process: tie its life to the supervisor's, then become the service.

Run as `python -m deploy.supervisor.child PARENT_PID MODULE [ARGUMENTS…]`.
"""

from __future__ import annotations

import os
import runpy
import sys

from common.orphans import die_with_parent


def main() -> None:
    """Ask the kernel to kill this process when its parent dies, and run the module as `__main__`.

    A service that returns has finished and closed everything. What the interpreter would then take apart piece by
    piece, which takes it up to two seconds with torch, the kernel takes back at once.
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
