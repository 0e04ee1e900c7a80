"""CUDA IPC: memory of a device that another process of the same host maps."""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING

from services.worker.engine.host_tier.shared_pages import SharingError

if TYPE_CHECKING:
    from collections.abc import Iterator

_HANDLE_BYTES = 64
# CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: memory of another device is mapped if the devices reach each other.
_ENABLE_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("content", ctypes.c_ubyte * _HANDLE_BYTES),)


class CudaSharing:
    """Exports allocations of a device, and maps those of other processes into its address space.

    It calls the driver. Torch's own way (`torch.multiprocessing`) keeps memory allocated after its owner has dropped
    it, until every reader has, dead ones included; and a reader needs the owner's device among its visible ones.
    Memory of `expandable_segments` cannot be exported.
    """

    def __init__(self, device_index: int) -> None:
        """Share memory of this device, which torch has initialised."""
        self._device_index = device_index

    def export(self, address: int) -> tuple[bytes, int]:
        """Return the handle of the allocation with this address, and the address's offset from its start in bytes.

        Raises:
            SharingError: the allocation cannot be shared.
        """
        begin, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        with self._context():
            self._call("cuMemGetAddressRange_v2", ctypes.byref(begin), ctypes.byref(size), ctypes.c_uint64(address))
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), begin)
        return bytes(handle.content), address - begin.value

    def open(self, handle: bytes) -> int:
        """Map another process's allocation; return its address here.

        Raises:
            SharingError: its owner has freed it, or this device does not reach it, or the processes are in containers
                that keep them apart.
        """
        if len(handle) != _HANDLE_BYTES:
            raise SharingError(f"a handle has {_HANDLE_BYTES} bytes, not {len(handle)}")
        address = ctypes.c_uint64()
        with self._context():
            copied = _Handle.from_buffer_copy(handle)
            flags = ctypes.c_uint(_ENABLE_PEER_ACCESS)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), copied, flags)
        return address.value

    def close(self, address: int) -> None:
        """Unmap what `open` has mapped at this address.

        Raises:
            SharingError: it is not mapped.
        """
        with self._context():
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        """Make the context that torch uses on the device current in this thread."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(self._device_index))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        try:
            self._call("cuCtxPushCurrent_v2", context)
            try:
                yield
            finally:
                self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        finally:
            self._call("cuDevicePrimaryCtxRelease_v2", device)

    def _call(self, function: str, *arguments: object) -> None:
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise SharingError(str(error)) from error
        code = getattr(driver, function)(*arguments)
        if code:
            text = ctypes.c_char_p()
            driver.cuGetErrorString(code, ctypes.byref(text))
            raise SharingError(f"{function}: {(text.value or b'').decode() or f'error {code}'}")
