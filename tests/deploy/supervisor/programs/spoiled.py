"""Serves at its first start; at later ones it refuses its settings."""

from __future__ import annotations

import sys

from tests.deploy.supervisor.programs.common import address, come_alive, sleep_for_ever

if __name__ == "__main__":
    if address().exists():
        sys.stderr.write("unknown setting: worker.colour\n")
        sys.exit(2)
    come_alive()
    sleep_for_ever()
