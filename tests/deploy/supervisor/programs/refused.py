"""Answers probes, then finds that its configuration is refused."""

from __future__ import annotations

import sys
import time

from common.runtime import REFUSED_EXIT
from tests.deploy.supervisor.programs.common import come_alive

if __name__ == "__main__":
    come_alive()
    # So that it is seen to be alive.
    time.sleep(1)
    sys.stderr.write("worker: no experts that groups could share\n")
    sys.exit(REFUSED_EXIT)
