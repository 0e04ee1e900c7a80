"""Serves until it is asked to end, and ends once the file `<address>.release` exists."""

from __future__ import annotations

import signal
import sys
import time

from tests.deploy.supervisor.programs.common import address, come_alive, sleep_for_ever


def _end(*_: object) -> None:
    sys.stdout.write(f"{address().stem} drains\n")
    sys.stdout.flush()
    while not address().with_suffix(".release").exists():
        time.sleep(0.01)
    sys.exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _end)
    come_alive()
    sleep_for_ever()
