"""Refuses its settings, as services do."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.stderr.write("unknown setting: worker.colour\n")
    sys.exit(2)
