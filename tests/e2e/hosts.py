"""Hosts that share nothing but a network: network namespaces, each with an address of its own, joined by a bridge."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.e2e.delayed_link import TUN, delayed_link

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


# Interfaces of a namespace that was taken away may stay for a moment, so names are not used again.
_TAGS = (f"p{os.getpid() % 100_000}x{number}" for number in itertools.count())


class NoHostsError(Exception):
    """This machine lets nobody make namespaces; the message says why."""


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace, its address as all others see it, and its own network interface."""

    name: str
    address: str
    interface: str

    @property
    def network(self) -> str:
        """The first three bytes of all hosts' addresses; the machine that made them is number 1."""
        return self.address.rpartition(".")[0]

    @property
    def prefix(self) -> tuple[str, ...]:
        """What goes before a command that is to run there."""
        return ("ip", "netns", "exec", self.name)

    def round_trip_s(self) -> float:
        """Return the seconds until this host has refused a connection."""
        started = time.monotonic()
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection((self.address, 1), timeout=60):
            pass
        return time.monotonic() - started

    def is_reachable(self) -> bool:
        """Whether this host answers within a second, and be it by refusing a connection."""
        try:
            socket.create_connection((self.address, 1), timeout=1).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return True

    def sent_bytes(self) -> int:
        """Return the bytes that have left this host."""
        command = ["ip", "-n", self.name, "-s", "-j", "link", "show", self.interface]
        shown = subprocess.run(command, check=True, capture_output=True, text=True)
        return int(json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"])

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """Take this host from the network."""
        _run("-n", self.name, "link", "set", self.interface, "down")
        try:
            yield
        finally:
            _run("-n", self.name, "link", "set", self.interface, "up")


@contextmanager
def hosts(count: int, megabits: int | None = None, delay_ms: int = 0) -> Iterator[list[Host]]:
    """Make `count` hosts that this process reaches, too, and take them away.

    In both directions, `megabits` per second go through the network interface of each, `delay_ms` after they were sent;
    None: as many as it can.

    Raises:
        NoHostsError: not here.
    """
    needed = ["ip", *(["tc"] if megabits is not None or delay_ms else [])]
    if not all(map(shutil.which, needed)) or os.geteuid() != 0:
        raise NoHostsError(f"network namespaces take root and the commands {', '.join(needed)}")
    # Names and addresses of this process, as several may run here.
    tag, net = next(_TAGS), f"10.{200 + os.getpid() % 50}.{os.getpid() % 250}"
    with ExitStack() as stack:
        bridge = f"{tag}br"
        _make(stack, ("link", "add", bridge, "type", "bridge"), ("link", "del", bridge))
        _run("addr", "add", f"{net}.1/24", "dev", bridge)
        _run("link", "set", bridge, "up")
        made = []
        for number in range(2, count + 2):
            name, inner, outer = f"{tag}n{number}", f"{tag}i{number}", f"{tag}o{number}"
            _make(stack, ("netns", "add", name), ("netns", "del", name))
            delays = bool(delay_ms) and _has_netem(name)
            if delay_ms and not delays:
                _delay_by_hand(stack, outer, inner, name, delay_ms)
            else:
                _run("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", name)
            _run("link", "set", outer, "master", bridge, "up")
            for command in (("addr", "add", f"{net}.{number}/24", "dev", inner), ("link", "set", inner, "up")):
                _run("-n", name, *command)
            _run("-n", name, "link", "set", "lo", "up")
            for namespace, device in (((), outer), (("-n", name), inner)):
                _slow_down(namespace, device, megabits, delay_ms if delays else 0)
            made.append(Host(name, f"{net}.{number}", inner))
        yield made


def _has_netem(namespace: str) -> bool:
    """Whether the kernel delays packets (CONFIG_NET_SCH_NETEM); tried at an interface that nothing uses yet."""
    try:
        _run("-n", namespace, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms", tool="tc")
    except NoHostsError:
        return False
    _run("-n", namespace, "qdisc", "del", "dev", "lo", "root", tool="tc")
    return True


def _delay_by_hand(stack: ExitStack, outer: str, inner: str, namespace: str, delay_ms: int) -> None:
    """Join a namespace to this one by a link that this process delays."""
    try:
        stack.enter_context(delayed_link(outer, inner, delay_ms / 1000))
    except OSError as error:
        raise NoHostsError(f"delays take a kernel with netem (CONFIG_NET_SCH_NETEM), or {TUN}: {error}") from error
    _run("link", "set", inner, "netns", namespace)


def _slow_down(namespace: Sequence[str], device: str, megabits: int | None, delay_ms: int) -> None:
    """Give what leaves an interface its delay, and then its rate."""
    parent: tuple[str, ...] = ("root",)
    if delay_ms:
        delay = ("netem", "delay", f"{delay_ms}ms", "limit", "10000")
        _run(*namespace, "qdisc", "add", "dev", device, *parent, "handle", "1:", *delay, tool="tc")
        parent = ("parent", "1:1")
    if megabits is not None:
        rate = ("tbf", "rate", f"{megabits}mbit", "burst", "64kb", "latency", "400ms")
        _run(*namespace, "qdisc", "add", "dev", device, *parent, "handle", "10:", *rate, tool="tc")


def _make(stack: ExitStack, command: tuple[str, ...], undo: tuple[str, ...]) -> None:
    _run(*command)
    stack.callback(subprocess.run, ["ip", *undo], check=False, capture_output=True)


def _run(*command: str, tool: str = "ip") -> None:
    done = subprocess.run([tool, *command], check=False, capture_output=True, text=True)
    if done.returncode:
        raise NoHostsError(f"{tool} {' '.join(command)}: {done.stderr.strip()}")
