"""NIXL: memory of this process that ranks on any host read over the network, past Python, and reads from theirs.

An agent that lends exists for each pool that is lent; one agent of the process reads. Both are made at their first use.
NIXL authenticates no reader: those that have an agent's metadata can read, and write, what it has registered.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import logging
import secrets
import struct
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from common.errors import ConfigurationError
from services.worker.engine.host_tier.shared_pages import BrokenReadError, SharingError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

log = logging.getLogger(__name__)

# One package for each version of CUDA; on CPUs, either does.
PACKAGES = {"13": "nixl_cu13", "12": "nixl_cu12"}
MISSING = "worker.peer_transfers=nixl, but NIXL is not installed: pip install nixl-cu13, or nixl-cu12 with CUDA 12"
# After this long a read counts as broken. Its lender hears meanwhile that it goes on.
READ_S = 5.0
# How often the end of a read is looked for: a slice takes milliseconds.
_POLL_S = 0.0001
# Longest wait of an agent's own thread in microseconds. With 0, the package's default, it keeps a core busy.
_WAIT_US = 1000
# Before an agent's metadata: whether the memory is a GPU's, the GPU's index, and the address of bytes for a first read.
_HEADER = struct.Struct("<?BQ")
_FIRST_BYTES = 64
# Addresses have 64 bits; above them is the number of the process that they belong to.
ADDRESS_BITS = 64


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of one tensor, of a GPU with this index if `is_gpu`; its size in bytes."""

    address: int
    size: int
    is_gpu: bool
    device_index: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Region:
        """Return the memory of a contiguous tensor."""
        return cls(tensor.data_ptr(), tensor.nbytes, tensor.is_cuda, tensor.device.index or 0)


@dataclass(frozen=True, slots=True)
class MemoryPieces:
    """Runs of bytes in memory of one kind: addresses and sizes in bytes, [pieces, 2] uint64."""

    rows: NDArray[np.uint64]
    is_gpu: bool = False
    device_index: int = 0

    def described(self, bindings: Any) -> Any:  # Any: the package has no types
        """Return the package's list of them."""
        devices = np.full((len(self.rows), 1), self.device_index, np.uint64)
        kind = bindings.VRAM_SEG if self.is_gpu else bindings.DRAM_SEG
        return bindings.nixlXferDList(kind, np.hstack([self.rows, devices]))


class NixlAgents:
    """The agents of this process; see `MemorySharing` for `open` and `close`. Any thread may call the methods."""

    def __init__(self, bindings: Any = None, read_s: float = READ_S) -> None:  # Any: the package has no types
        """Use the installed package, or `bindings`; a read is given up after `read_s` seconds.

        Raises:
            ConfigurationError: no package is installed, or it cannot be loaded.
        """
        self._bindings = bindings or _import_bindings()
        self._read_s = read_s
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        # Of opened memory, by number.
        self._handles: dict[int, bytes] = {}
        # Memory of this process in which reads may arrive.
        self._regions: set[Region] = set()
        self._reader: _Reader | None = None

    def lend(self, tensors: Sequence[torch.Tensor]) -> NixlLoan:
        """Let other processes read contiguous tensors of one device.

        Raises:
            SharingError: they cannot be registered.
        """
        return NixlLoan(self._bindings, tensors)

    def register(self, tensors: Iterable[torch.Tensor]) -> tuple[Region, ...]:
        """Let reads arrive in contiguous tensors, until `unregister`."""
        regions = tuple(Region.of(tensor) for tensor in tensors)
        with self._changed:
            self._end_reader()
            self._regions.update(regions)
        return regions

    def unregister(self, regions: Iterable[Region]) -> None:
        """Undo `register`; reads that are under way end before."""
        with self._changed:
            self._end_reader()
            self._regions.difference_update(regions)

    def open(self, handle: bytes) -> int:
        """Read some bytes of another process; return what `read` takes for it, which is added to addresses there.

        Raises:
            SharingError: it cannot be reached.
        """
        kind = _Lent.of(handle)
        of = MemoryPieces(np.array([(kind.first_address, _FIRST_BYTES)], np.uint64), kind.is_gpu, kind.device_index)
        # By an agent of its own: if it cannot be reached, reads of others do not break.
        with contextlib.closing(_Reader(self._bindings, ())) as first:
            first.read(handle, first.scratch, of, self._read_s)
        with self._changed:
            number = next(self._numbers)
            self._handles[number] = handle
        return number << ADDRESS_BITS

    def close(self, address: int) -> None:
        """Forget what `open` has returned."""
        with self._changed:
            handle = self._handles.pop(address >> ADDRESS_BITS, None)
            if handle is not None and handle not in self._handles.values() and self._reader is not None:
                self._reader.forget(handle)

    def read(self, base: int, into: MemoryPieces, of: MemoryPieces) -> None:
        """Read pieces of memory that `open` has returned `base` for into as many here.

        When this returns or raises, nothing is written here any more.

        Raises:
            BrokenReadError: the other process does not answer, or the memory is not lent any more.
        """
        with self._used_reader() as reader:
            handle = self._handles.get(base >> ADDRESS_BITS)
            if handle is None:
                raise BrokenReadError("the memory is not open any more")
            kind = _Lent.of(handle)
            of = replace(of, is_gpu=kind.is_gpu, device_index=kind.device_index)
            reader.read(handle, into, of, self._read_s)

    @contextlib.contextmanager
    def _used_reader(self) -> Iterator[_Reader]:
        """Give the agent that reads. After an error it is closed once its last read has noticed, and they all fail.

        Otherwise reads that were given up could write to pages that hold something else by then.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._reader is None or not self._reader.is_ending)
            if self._reader is None:
                self._reader = _Reader(self._bindings, self._regions)
            reader = self._reader
            reader.users += 1
        try:
            yield reader
        except BrokenReadError:
            reader.is_ending = True
            raise
        finally:
            with self._changed:
                reader.users -= 1
                self._changed.notify_all()
                if reader.is_ending:
                    self._end_reader()

    def _end_reader(self) -> None:
        """Close the agent that reads, once no read is under way; the caller holds the lock."""
        reader = self._reader
        if reader is None:
            return
        reader.is_ending = True
        self._changed.wait_for(lambda: not reader.users)
        if self._reader is reader:
            self._reader = None
            reader.close()
        self._changed.notify_all()


class NixlLoan:
    """Tensors that other processes can read by `handle`, until `close`."""

    def __init__(self, bindings: Any, tensors: Sequence[torch.Tensor]) -> None:  # Any: the package has no types
        """Register contiguous tensors of one device.

        Raises:
            SharingError: the package cannot.
        """
        # For a first read, on the same device.
        self._first = torch.zeros(_FIRST_BYTES, dtype=torch.uint8, device=tensors[0].device)
        region = Region.of(self._first)
        with _translated():
            self._agent: _Agent | None = _Agent(bindings, [region, *map(Region.of, tensors)])
            metadata = self._agent.native.getLocalMD()
        self.handle = _Lent(region.is_gpu, region.device_index, region.address).packed() + metadata

    def close(self) -> None:
        """Let the agent go. Once this has returned, it reads the tensors no more, for however late a reader."""
        if self._agent is not None:
            self._agent.close()
            self._agent = None


class _Agent:
    """One of the package's agents, with memory that it has registered, and a thread that serves other agents."""

    def __init__(self, bindings: Any, regions: Iterable[Region]) -> None:  # Any: the package has no types
        config = bindings.nixlAgentConfig()
        config.useProgThread, config.useListenThread = True, False
        config.syncMode, config.pthrDelay = bindings.NIXL_THREAD_SYNC_STRICT, _WAIT_US
        self.name = f"pando-{secrets.token_hex(16)}"
        self.native = bindings.nixlAgent(self.name, config)
        self.backend = self.native.createBackend("UCX", {})
        self._registered = []
        for is_gpu, kind in ((False, bindings.DRAM_SEG), (True, bindings.VRAM_SEG)):
            rows = [(each.address, each.size, each.device_index) for each in regions if each.is_gpu is is_gpu]
            if rows:
                registered = bindings.nixlRegDList(kind, np.array(rows, np.uint64))
                self.native.registerMem(registered, [self.backend])
                self._registered.append(registered)

    def close(self) -> None:
        """Unregister the memory, and end thread and connections: the native agent goes with its last reference."""
        try:
            for registered in self._registered:
                self.native.deregisterMem(registered, [self.backend])
        except Exception as error:  # noqa: BLE001  (the package has errors of its own; the agent goes nonetheless)
            log.warning("NIXL does not unregister memory: %s", error)
        self.native = None


class _Reader:
    """The agent that reads. `users`: reads under way; `is_ending`: they fail."""

    def __init__(self, bindings: Any, regions: Iterable[Region]) -> None:  # Any: the package has no types
        self.users = 0
        self.is_ending = False
        self._bindings = bindings
        self._scratch = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)
        region = Region.of(self._scratch)
        self.scratch = MemoryPieces(np.array([(region.address, region.size)], np.uint64))
        with _translated():
            self._agent = _Agent(bindings, [region, *regions])
        # The other agents' names, by their handles.
        self._names: dict[bytes, str] = {}
        self._lock = threading.Lock()

    def read(self, handle: bytes, into: MemoryPieces, of: MemoryPieces, read_s: float) -> None:
        """Read pieces, and wait for the end.

        Raises:
            BrokenReadError: it may still be under way, until `close`.
        """
        bindings, end = self._bindings, time.monotonic() + read_s
        with _translated():
            ours, theirs = into.described(bindings), of.described(bindings)
            name = self._name_of(handle)
            native = self._agent.native
            transfer = native.createXferReq(bindings.NIXL_READ, ours, theirs, name, b"", [self._agent.backend])
            try:
                state = native.postXferReq(transfer, b"")
                while state == bindings.NIXL_IN_PROG:
                    if self.is_ending or time.monotonic() > end:
                        raise BrokenReadError("another read has failed" if self.is_ending else "no answer over NIXL")
                    time.sleep(_POLL_S)
                    state = native.getXferStatus(transfer)
                if state != bindings.NIXL_SUCCESS:
                    raise BrokenReadError(f"a read over NIXL ended with {state}")
            finally:
                native.releaseXferReq(transfer)
                # The last reference must be the agent's own.
                del native

    def forget(self, handle: bytes) -> None:
        """Leave another agent, from which nothing is read."""
        with self._lock:
            name = self._names.pop(handle, None)
        if name is not None:
            try:
                self._agent.native.invalidateRemoteMD(name)
            except Exception as error:  # noqa: BLE001  (the package has errors of its own; it may have ended)
                log.debug("leaving an agent: %r", error)

    def close(self) -> None:
        self._agent.close()

    def _name_of(self, handle: bytes) -> str:
        with self._lock:
            if handle not in self._names:
                loaded = self._agent.native.loadRemoteMD(handle[_HEADER.size :])
                self._names[handle] = loaded.decode() if isinstance(loaded, bytes) else loaded
            return self._names[handle]


@dataclass(frozen=True, slots=True)
class _Lent:
    """The kind of lent memory, and the address of bytes that are there for a first read."""

    is_gpu: bool
    device_index: int
    first_address: int

    @classmethod
    def of(cls, handle: bytes) -> _Lent:
        if len(handle) <= _HEADER.size:
            raise SharingError("this is no NIXL agent's metadata")
        return cls(*_HEADER.unpack_from(handle))

    def packed(self) -> bytes:
        return _HEADER.pack(self.is_gpu, self.device_index, self.first_address)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Raise errors of the package as BrokenReadError."""
    try:
        yield
    except SharingError:
        raise
    except Exception as error:  # noqa: BLE001  (the package has errors of its own)
        # Without the cause, whose frames refer to the agent.
        raise BrokenReadError(f"NIXL: {error}") from None


def _import_bindings() -> Any:  # Any: the package has no types
    names = [name for name in PACKAGES.values() if importlib.util.find_spec(name) is not None]
    if not names:
        raise ConfigurationError(MISSING)
    # Where both are installed, the one that fits torch.
    fitting = PACKAGES.get((torch.version.cuda or "13").partition(".")[0], names[0])
    name = fitting if fitting in names else names[0]
    try:
        return importlib.import_module(f"{name}._bindings")
    except ImportError as error:
        raise ConfigurationError(f"worker.peer_transfers=nixl, but {name} cannot be loaded: {error}") from error
