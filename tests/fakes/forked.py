"""Programs in processes that are forked from one that has imported their libraries, as imports take most of their time.

Python's own fork server does it. What depends on the environment when it is imported is imported again.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TIMEOUT_S = 500.0
LIBRARIES = ["common.logs", "common.models.hub", "common.settings", "huggingface_hub.hf_api", "pytest", "rich.table"]
IMPORTED_AGAIN = ("huggingface_hub", "common.models", "deploy")


class ForkedProgram:
    """A running `python -m module`."""

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(LIBRARIES)
        self._folder = tempfile.TemporaryDirectory()
        self._output, self._log = (Path(self._folder.name) / name for name in ("output", "log"))
        files = str(self._output), str(self._log)
        program = (module, list(arguments), dict(environment), str(Path.cwd()))
        self._process = context.Process(target=_run, args=(files, *program), daemon=True)
        self._process.start()

    def kill(self) -> None:
        self._process.kill()
        self._process.join(TIMEOUT_S)

    def communicate(self) -> tuple[int, str, str]:
        """Wait for the end; return the exit status and what was written to standard output and standard error."""
        self._process.join(TIMEOUT_S)
        status = self._process.exitcode
        assert status is not None, f"the program has not ended: {self._log.read_text()}"
        output, log = self._output.read_text(), self._log.read_text()
        self._folder.cleanup()
        return status, output, log


def _run(
    files: tuple[str, str], module: str, arguments: list[str], environment: dict[str, str], directory: str
) -> None:
    for descriptor, path in enumerate(files, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    for name in [name for name in sys.modules if name.startswith(IMPORTED_AGAIN)]:
        del sys.modules[name]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
