"""What the test programs share: say that they live, and wait for a signal."""

from __future__ import annotations

import sys
import time
import tomllib
from pathlib import Path


def address() -> Path:
    """Return the file that this process makes when it is alive, from the settings it was given."""
    settings = tomllib.loads(Path(sys.argv[2]).read_text())
    return Path(settings["worker"]["address"])


def come_alive() -> None:
    address().touch()
    sys.stdout.write(f"{address().stem} is alive\n")
    sys.stdout.flush()


def sleep_for_ever() -> None:
    while True:
        time.sleep(60)
