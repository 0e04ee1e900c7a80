"""The part of NIXL's bindings that Pando uses, for agents of one process: reads are copies of memory."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass
class FakeList:
    """Rows of address, bytes and device; of a kind of memory."""

    kind: str
    rows: NDArray[np.uint64]


class FakeBindings:
    """The module. While `gate` is cleared, reads do not end; `broken` names agents that do not answer any more."""

    DRAM_SEG, VRAM_SEG, NIXL_READ = "dram", "vram", "read"
    NIXL_SUCCESS, NIXL_IN_PROG, NIXL_ERR_BACKEND = "success", "in progress", "backend"
    NIXL_THREAD_SYNC_STRICT = "strict"
    nixlXferDList = nixlRegDList = FakeList  # noqa: N815  (as the package names them)

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.agents: dict[str, FakeAgent] = {}
        self.broken: set[str] = set()
        # Agents of whom looking for the end of a read takes until `released`.
        self.held: set[str] = set()
        self.released = threading.Event()
        self.running = 0

    def nixlAgentConfig(self) -> SimpleNamespace:
        return SimpleNamespace()

    def nixlAgent(self, name: str, _config: SimpleNamespace) -> FakeAgent:
        self.agents[name] = agent = FakeAgent(name, self)
        return agent


@dataclass
class FakeAgent:
    """An agent, and the memory that it has registered: begins and ends."""

    name: str
    world: FakeBindings
    registered: list[tuple[int, int]] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    transfers: dict[int, tuple[FakeList, FakeList, str]] = field(default_factory=dict)

    def createBackend(self, _name: str, _options: dict[str, str]) -> int:
        return 1

    def registerMem(self, memory: FakeList, _backends: list[int]) -> None:
        self.registered += [(int(begin), int(begin + size)) for begin, size, _ in memory.rows]

    def deregisterMem(self, memory: FakeList, _backends: list[int]) -> None:
        for begin, size, _ in memory.rows:
            self.registered.remove((int(begin), int(begin + size)))

    def getLocalMD(self) -> bytes:
        return self.name.encode()

    def loadRemoteMD(self, metadata: bytes) -> bytes:
        if metadata.decode() not in self.world.agents:
            raise ValueError("no such agent")
        self.known.add(metadata.decode())
        return metadata

    def invalidateRemoteMD(self, name: str) -> None:
        self.known.remove(name)

    def createXferReq(
        self, _way: str, ours: FakeList, theirs: FakeList, name: str, _message: bytes, _backends: list[int]
    ) -> int:
        assert len(ours.rows) == len(theirs.rows)
        assert ours.rows[:, 1].tolist() == theirs.rows[:, 1].tolist()
        self._check(ours)
        if name not in self.known:
            raise ValueError("metadata is not loaded")
        number = len(self.transfers)
        self.transfers[number] = (ours, theirs, name)
        return number

    def postXferReq(self, _number: int, _message: bytes) -> str:
        self.world.running += 1
        return self.world.NIXL_IN_PROG

    def getXferStatus(self, number: int) -> str:
        ours, theirs, name = self.transfers[number]
        if name in self.world.held:
            assert self.world.released.wait(30)
        if name in self.world.broken:
            return self.world.NIXL_ERR_BACKEND
        if not self.world.gate.is_set():
            return self.world.NIXL_IN_PROG
        try:
            self.world.agents[name]._check(theirs)
        except ValueError:
            return self.world.NIXL_ERR_BACKEND
        for (into, size, _), (of, _, _) in zip(ours.rows.tolist(), theirs.rows.tolist(), strict=True):
            ctypes.memmove(into, of, size)
        return self.world.NIXL_SUCCESS

    def releaseXferReq(self, _number: int) -> None:
        self.world.running -= 1

    def _check(self, memory: FakeList) -> None:
        for begin, size, _ in memory.rows.tolist():
            if not any(first <= begin and begin + size <= end for first, end in self.registered):
                raise ValueError("memory is not registered")
