#!/opt/pando/bin/python
"""Replacement for the C compiler in images without one: copies modules that were compiled when the image was built.

Triton calls it as `$CC source.c … -o module.so` for its one C file. services/worker/engine/kernels/gpu/prebuild.py has
stored the compiled module under the digest of the source.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path

PREBUILT = Path(os.environ.get("PANDO_PREBUILT", "/opt/pando/prebuilt"))


def main(arguments: list[str]) -> int:
    """Copy the module for the source in the arguments; return the exit status."""
    sources = [Path(argument) for argument in arguments if argument.endswith(".c")]
    if len(sources) != 1 or "-o" not in arguments[:-1]:
        sys.stderr.write("this image has no compiler, only precompiled modules\n")
        return 1
    prebuilt = PREBUILT / f"{hashlib.sha256(sources[0].read_bytes()).hexdigest()}.so"
    if not prebuilt.exists():
        sys.stderr.write(f"this image has no compiler, and no precompiled module for {sources[0]}\n")
        return 1
    shutil.copy(prebuilt, arguments[arguments.index("-o") + 1])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
