"""Memory of a GPU that two processes map: made and exported by one, imported by the other through a file descriptor.

It is CUDA's virtual memory API, which torch has no calls for. Invariant: memory stays mapped for as long as there is a
reference to it, and exists for as long as any process maps it or has a descriptor of it, whoever made it.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from functools import partial

__all__ = ["LIBRARY", "Driver", "DriverError", "GpuMemory", "OutOfGpuMemory"]

LIBRARY = "libcuda.so.1"

_OUT_OF_MEMORY = 2
_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
_READ, _READ_AND_WRITE = 1, 3  # CU_MEM_ACCESS_FLAGS
_HAS_MAPPING, _HAS_DESCRIPTORS = 102, 103  # CU_DEVICE_ATTRIBUTE
_UUID_BYTES = 16

_Device, _Error, _Flags = ctypes.c_int, ctypes.c_int, ctypes.c_ulonglong
_Size, _Address, _Handle = ctypes.c_size_t, ctypes.c_ulonglong, ctypes.c_ulonglong


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_ARGUMENTS: dict[str, tuple[type, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGetCount": (ctypes.c_void_p,),
    "cuDeviceGetUuid_v2": (ctypes.c_void_p, _Device),
    "cuDeviceGetAttribute": (ctypes.c_void_p, ctypes.c_int, _Device),
    "cuMemGetAllocationGranularity": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int),
    "cuMemCreate": (ctypes.c_void_p, _Size, ctypes.c_void_p, _Flags),
    "cuMemExportToShareableHandle": (ctypes.c_void_p, _Handle, ctypes.c_int, _Flags),
    "cuMemImportFromShareableHandle": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int),
    "cuMemAddressReserve": (ctypes.c_void_p, _Size, _Size, _Address, _Flags),
    "cuMemMap": (_Address, _Size, _Size, _Handle, _Flags),
    "cuMemSetAccess": (_Address, _Size, ctypes.c_void_p, _Size),
    "cuMemUnmap": (_Address, _Size),
    "cuMemAddressFree": (_Address, _Size),
    "cuMemRelease": (_Handle,),
}


class DriverError(Exception):
    """A call of the driver failed, or cannot be made; the message names both."""


class OutOfGpuMemory(DriverError):
    """The GPU has not that much memory left."""


class GpuMemory:
    """`descriptor` is what another process imports it by, of memory that this one made; it is closed with it."""

    def __init__(self, place: tuple[int, int], end: Callable[[], None], descriptor: int | None = None) -> None:
        """`place` is address and size; `end` is called once, when it is released or nothing refers to it."""
        self.address, self.size_bytes = place
        self.descriptor = descriptor
        self._end = weakref.finalize(self, end)
        self._end.atexit = False  # then the process ends, and all of this with it

    def release(self) -> None:
        """Unmaps it now; who refers to it uses it no more. Idempotent."""
        self._end()

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """All bytes, for `torch.as_tensor`, which keeps this object and takes no memory that says it is read-only."""
        data = (self.address, False)
        return {"shape": (self.size_bytes,), "typestr": "|u1", "data": data, "strides": None, "version": 3}


class Driver:
    """CUDA's driver, as far as memory that processes share goes; devices have the numbers that torch gives them.

    Who calls it has made the device's context current, as any operation of torch on it does.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        """Raises DriverError where there is no driver, or an older one."""
        try:
            self._library = ctypes.CDLL(library)
            self._calls = {name: getattr(self._library, name) for name in _ARGUMENTS}
        except (OSError, AttributeError) as error:
            raise DriverError(f"CUDA's driver cannot be used: {error}") from error
        for name, arguments in _ARGUMENTS.items():
            self._calls[name].argtypes, self._calls[name].restype = arguments, _Error
        self._call("cuInit", 0)

    def device_of(self, uuid: bytes) -> int | None:
        """The device that this process sees the GPU as, whatever the order; None when it does not see it."""
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.addressof(count))
        return next((device for device in range(count.value) if self.uuid(device) == uuid), None)

    def uuid(self, device: int) -> bytes:
        """Of a GPU, or of its part that the device is; all processes of the machine see the same."""
        found = (ctypes.c_char * _UUID_BYTES)()
        self._call("cuDeviceGetUuid_v2", ctypes.addressof(found), device)
        return bytes(found)

    def make(self, device: int, size_bytes: int) -> GpuMemory:
        """Memory with any values, of at least that size, mapped for writing, with a descriptor.

        Raises DriverError, also where memory of the device cannot be exported.
        """
        for attribute, what in ((_HAS_MAPPING, "mapped"), (_HAS_DESCRIPTORS, "exported by descriptors")):
            found = ctypes.c_int()
            self._call("cuDeviceGetAttribute", ctypes.addressof(found), attribute, device)
            if not found.value:
                raise DriverError(f"memory of GPU {device} cannot be {what}")
        properties = _Properties(_PINNED, _DESCRIPTOR, _Location(_DEVICE, device))
        granularity, handle, descriptor = _Size(), _Handle(), ctypes.c_int(-1)
        asked = ctypes.addressof(granularity), ctypes.addressof(properties), _MINIMUM
        self._call("cuMemGetAllocationGranularity", *asked)
        size = -(-size_bytes // granularity.value) * granularity.value
        self._call("cuMemCreate", ctypes.addressof(handle), size, ctypes.addressof(properties), 0)
        try:
            self._call("cuMemExportToShareableHandle", ctypes.addressof(descriptor), handle, _DESCRIPTOR, 0)
            return self._mapped(handle, (device, size), (_READ_AND_WRITE,), descriptor=descriptor.value)
        except DriverError:
            if descriptor.value >= 0:
                os.close(descriptor.value)
            raise
        finally:
            self._call("cuMemRelease", handle)  # the mapping and the descriptor keep it

    def take(
        self, device: int, descriptor: int, size_bytes: int, before_unmap: Callable[[], object] = int
    ) -> GpuMemory:
        """What another process made, all of it, for reading where the driver can keep to that, else for writing too.

        `before_unmap` returns once the device has done all work of this process that reads it. Raises DriverError.
        """
        handle = _Handle()
        self._call("cuMemImportFromShareableHandle", ctypes.addressof(handle), descriptor, _DESCRIPTOR)
        try:
            return self._mapped(handle, (device, size_bytes), (_READ, _READ_AND_WRITE), before_unmap)
        finally:
            self._call("cuMemRelease", handle)

    def _mapped(
        self,
        handle: ctypes.c_ulonglong,
        of: tuple[int, int],
        accesses: tuple[int, ...],
        before_unmap: Callable[[], object] = int,
        descriptor: int | None = None,
    ) -> GpuMemory:
        """With the first of the accesses that the driver grants; `of` is the device and the size."""
        (device, size), address = of, _Address()
        self._call("cuMemAddressReserve", ctypes.addressof(address), size, 0, 0, 0)
        try:
            self._call("cuMemMap", address, size, 0, handle, 0)
        except DriverError:
            self._call("cuMemAddressFree", address, size)
            raise
        try:
            self._grant(address, size, device, accesses)
        except DriverError:
            self._unmap(address.value, size)
            raise
        end = partial(_end, partial(self._unmap, address.value, size), before_unmap, descriptor)
        return GpuMemory((address.value, size), end, descriptor)

    def _grant(self, address: ctypes.c_ulonglong, size: int, device: int, accesses: tuple[int, ...]) -> None:
        for access in accesses:
            wanted = _Access(_Location(_DEVICE, device), access)
            try:
                self._call("cuMemSetAccess", address, size, ctypes.addressof(wanted), 1)
            except DriverError:
                if access == accesses[-1]:
                    raise
            else:
                return

    def _unmap(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", address, size)
        self._call("cuMemAddressFree", address, size)

    def _call(self, name: str, *arguments: object) -> None:
        error = self._calls[name](*arguments)
        if error:
            raise (OutOfGpuMemory if error == _OUT_OF_MEMORY else DriverError)(f"{name}: {self._name(error)}")

    def _name(self, error: int) -> str:
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(ctypes.c_int(error), ctypes.byref(text))
        return text.value.decode() if text.value else f"error {error}"


def _end(unmap: Callable[[], None], before: Callable[[], object], descriptor: int | None) -> None:
    before()
    unmap()
    if descriptor is not None:
        os.close(descriptor)
