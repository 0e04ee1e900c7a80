"""Ignores SIGTERM."""

from __future__ import annotations

import signal

from tests.deploy.supervisor.programs.common import come_alive, sleep_for_ever

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    come_alive()
    sleep_for_ever()
