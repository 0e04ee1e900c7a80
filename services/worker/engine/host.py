"""How threads of the engine wait for each other on this host."""

from __future__ import annotations

import os


def limit_spinning() -> None:
    """Have threads that wait for each other go to sleep soon, unless the operator says otherwise.

    Call it before torch is loaded. Threads of an OpenMP region wait for each other by spinning, for as long as it
    takes. If the system puts two of them on one core, or another process takes the core, each region then costs a
    whole time slice; so spin briefly (1,000 iterations of GNU's runtime take about 0.1 ms), then sleep.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
