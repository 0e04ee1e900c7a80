"""Dies at once, with a last word."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.stderr.write("out of luck\n")
    sys.exit(3)
