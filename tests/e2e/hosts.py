"""Hosts that share nothing but a network: network namespaces, each with an address of its own, joined by a bridge."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class NoHostsError(Exception):
    """This machine lets nobody make namespaces; the message says why."""


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace, and its address as all others see it."""

    name: str
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """What goes before a command that is to run there."""
        return ("ip", "netns", "exec", self.name)


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Make `count` hosts that this process reaches, too, and take them away.

    Raises:
        NoHostsError: not here.
    """
    if shutil.which("ip") is None or os.geteuid() != 0:
        raise NoHostsError("network namespaces take root and the command ip")
    # Names and addresses of this process, as several may run here.
    tag, net = f"p{os.getpid() % 100_000}", f"10.{200 + os.getpid() % 50}.{os.getpid() % 250}"
    with ExitStack() as stack:
        bridge = f"{tag}br"
        _make(stack, ("link", "add", bridge, "type", "bridge"), ("link", "del", bridge))
        _run("addr", "add", f"{net}.1/24", "dev", bridge)
        _run("link", "set", bridge, "up")
        made = []
        for number in range(2, count + 2):
            name, inner, outer = f"{tag}n{number}", f"{tag}i{number}", f"{tag}o{number}"
            _make(stack, ("netns", "add", name), ("netns", "del", name))
            _run("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", name)
            _run("link", "set", outer, "master", bridge, "up")
            for command in (("addr", "add", f"{net}.{number}/24", "dev", inner), ("link", "set", inner, "up")):
                _run("-n", name, *command)
            _run("-n", name, "link", "set", "lo", "up")
            made.append(Host(name, f"{net}.{number}"))
        yield made


def _make(stack: ExitStack, command: tuple[str, ...], undo: tuple[str, ...]) -> None:
    _run(*command)
    stack.callback(subprocess.run, ["ip", *undo], check=False, capture_output=True)


def _run(*command: str) -> None:
    done = subprocess.run(["ip", *command], check=False, capture_output=True, text=True)
    if done.returncode:
        raise NoHostsError(f"ip {' '.join(command)}: {done.stderr.strip()}")
