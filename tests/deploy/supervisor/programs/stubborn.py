"""Ignores SIGINT."""

from __future__ import annotations

import signal

from tests.deploy.supervisor.programs.common import come_alive, sleep_for_ever

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    come_alive()
    sleep_for_ever()
