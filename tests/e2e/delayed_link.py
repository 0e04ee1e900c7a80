"""A link of a network with latency, for kernels without netem: two TAP devices, and a thread that carries frames."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

TUN = Path("/dev/net/tun")
# From linux/if_tun.h.
_SET_INTERFACE, _TAP, _NO_HEADER = 0x400454CA, 0x0002, 0x1000
# More than an Ethernet frame with 1,500 bytes takes.
_FRAME_BYTES = 4096


@contextlib.contextmanager
def delayed_link(first: str, second: str, delay_s: float) -> Iterator[None]:
    """Make two network interfaces; what is sent to either leaves the other one `delay_s` later.

    They vanish at the end, whichever network namespaces they are in by then.

    Raises:
        OSError: this process may not make interfaces.
    """
    with contextlib.ExitStack() as stack:
        devices = [_open_interface(stack, name) for name in (first, second)]
        ended, ending = os.pipe()
        stack.callback(os.close, ended)
        carrying = threading.Thread(target=_carry, args=(devices, ended, delay_s), daemon=True)
        carrying.start()
        try:
            yield
        finally:
            os.close(ending)
            carrying.join()


def _open_interface(stack: contextlib.ExitStack, name: str) -> int:
    device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    stack.callback(os.close, device)
    fcntl.ioctl(device, _SET_INTERFACE, struct.pack("16sH22x", name.encode(), _TAP | _NO_HEADER))
    return device


def _carry(devices: list[int], ended: int, delay_s: float) -> None:
    """Carry frames until the other end of `ended` is closed."""
    others = dict(zip(devices, reversed(devices), strict=True))
    frames: deque[tuple[float, int, bytes]] = deque()
    while True:
        wait_s = max(0.0, frames[0][0] - time.monotonic()) if frames else None
        readable, _, _ = select.select([*devices, ended], [], [], wait_s)
        if ended in readable:
            return
        for device in readable:
            # An interface that is down has nothing to read.
            with contextlib.suppress(OSError):
                frames.append((time.monotonic() + delay_s, others[device], os.read(device, _FRAME_BYTES)))
        while frames and frames[0][0] <= time.monotonic():
            _, device, frame = frames.popleft()
            # Frames to an interface that is down, or that has no room for them, are lost.
            with contextlib.suppress(OSError):
                os.write(device, frame)
