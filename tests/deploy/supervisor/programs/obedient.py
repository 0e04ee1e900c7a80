"""Serves until SIGINT, then ends and says so."""

from __future__ import annotations

import signal
import sys

from tests.deploy.supervisor.programs.common import address, come_alive, sleep_for_ever


def _end(*_: object) -> None:
    sys.stdout.write(f"{address().stem} ends\n")
    sys.exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _end)
    come_alive()
    sleep_for_ever()
