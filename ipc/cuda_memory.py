"""GPU memory through libcuda: allocate, copy, page-lock, share between processes, order streams.

Thin on purpose: one function per driver call, plain ints for pointers and handles, CudaError on
failure. The calling thread needs a current context (`cuda_driver.using`); 0 is the default stream.
"""

import ctypes
from typing import Tuple

from .cuda_driver import Entry
from .messages import IPC_HANDLE_BYTES

# Sizes of exported memory are rounded up to this: the driver maps whole 2 MiB blocks to the other
# process, so a smaller allocation would expose its neighbours.
IPC_GRANULE_BYTES = 2 << 20

_STREAM_NON_BLOCKING = 0x1
_LAZY_ENABLE_PEER_ACCESS = 0x1  # the only flag that cuIpcOpenMemHandle knows, and it wants it
_REGISTER_PORTABLE = 0x1  # page-locked for every context, not only for the current one
_GREATER_OR_EQUAL = 0x0  # CU_STREAM_WAIT_VALUE_GEQ: as signed 32-bit distance
_DEVICE_MEMORY = 2  # CUmemorytype


class _IpcHandle(ctypes.Structure):
    """64 opaque bytes, which the driver takes by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * IPC_HANDLE_BYTES)]


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D, as in cuda.h."""

    _fields_ = [
        (side + name, kind)
        for side in ("src", "dst")
        for name, kind in (
            ("XInBytes", ctypes.c_size_t),
            ("Y", ctypes.c_size_t),
            ("MemoryType", ctypes.c_uint),
            ("Host", ctypes.c_void_p),
            ("Device", ctypes.c_uint64),
            ("Array", ctypes.c_void_p),
            ("Pitch", ctypes.c_size_t),
        )
    ] + [("WidthInBytes", ctypes.c_size_t), ("Height", ctypes.c_size_t)]


_uint, _size, _handle = ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p
_device, _host = ctypes.c_uint64, ctypes.c_void_p  # CUdeviceptr is an integer, host is void *
_out_device, _out_size = ctypes.POINTER(_device), ctypes.POINTER(_size)
_out_handle, _out_ipc = ctypes.POINTER(_handle), ctypes.POINTER(_IpcHandle)

_mem_alloc = Entry("cuMemAlloc_v2", _out_device, _size)
_mem_free = Entry("cuMemFree_v2", _device)
_mem_range = Entry("cuMemGetAddressRange_v2", _out_device, _out_size, _device)
_htod = Entry("cuMemcpyHtoD_v2", _device, _host, _size)
_dtoh = Entry("cuMemcpyDtoH_v2", _host, _device, _size)
_dtod = Entry("cuMemcpyDtoD_v2", _device, _device, _size)
_htod_async = Entry("cuMemcpyHtoDAsync_v2", _device, _host, _size, _handle)
_dtoh_async = Entry("cuMemcpyDtoHAsync_v2", _host, _device, _size, _handle)
_dtod_async = Entry("cuMemcpyDtoDAsync_v2", _device, _device, _size, _handle)
_copy_2d_async = Entry("cuMemcpy2DAsync_v2", ctypes.c_void_p, _handle)
_memset = Entry("cuMemsetD8_v2", _device, ctypes.c_ubyte, _size)
_host_register = Entry("cuMemHostRegister_v2", _host, _size, _uint)
_host_unregister = Entry("cuMemHostUnregister", _host)
_ipc_get_mem = Entry("cuIpcGetMemHandle", _out_ipc, _device)
_ipc_open_mem = Entry("cuIpcOpenMemHandle_v2", _out_device, _IpcHandle, _uint)
_ipc_close_mem = Entry("cuIpcCloseMemHandle", _device)
_stream_create = Entry("cuStreamCreate", _out_handle, _uint)
_stream_write = Entry("cuStreamWriteValue32_v2", _handle, _device, _uint, _uint)
_stream_wait = Entry("cuStreamWaitValue32_v2", _handle, _device, _uint, _uint)
_stream_synchronize = Entry("cuStreamSynchronize", _handle)
_stream_destroy = Entry("cuStreamDestroy_v2", _handle)


# -- memory --------------------------------------------------------------------------------------


def allocate(nbytes: int) -> int:
    """A device pointer. Plain cuMemAlloc, since memory of pools cannot be exported."""
    pointer = _device()
    _mem_alloc(ctypes.byref(pointer), nbytes)
    return pointer.value


def free(pointer: int) -> None:
    _mem_free(pointer)


def address_range(pointer: int) -> Tuple[int, int]:
    """(base, size in bytes) of the allocation `pointer` lies in. Only a base can be exported."""
    base, size = _device(), _size()
    _mem_range(ctypes.byref(base), ctypes.byref(size), pointer)
    return base.value, size.value


def copy_htod(pointer: int, address: int, nbytes: int) -> None:
    """From host memory at `address` to the device; returns when the host memory may be reused."""
    _htod(pointer, address, nbytes)


def copy_dtoh(address: int, pointer: int, nbytes: int) -> None:
    _dtoh(address, pointer, nbytes)


def copy_dtod(to: int, pointer: int, nbytes: int) -> None:
    """Within the device. Returns early: the driver does not wait for such a copy."""
    _dtod(to, pointer, nbytes)


def copy_htod_async(pointer: int, address: int, nbytes: int, stream: int = 0) -> None:
    """Enqueued. Truly asynchronous only from page-locked memory."""
    _htod_async(pointer, address, nbytes, stream)


def copy_dtoh_async(address: int, pointer: int, nbytes: int, stream: int = 0) -> None:
    _dtoh_async(address, pointer, nbytes, stream)


def copy_dtod_async(to: int, pointer: int, nbytes: int, stream: int = 0) -> None:
    _dtod_async(to, pointer, nbytes, stream)


def copy_rows_async(
    to: int,
    to_pitch: int,
    pointer: int,
    pitch: int,
    width_bytes: int,
    rows: int,
    stream: int = 0,
) -> None:
    """`rows` rows of `width_bytes` within the device; a pitch is the bytes from one row to the next."""
    copy = _Copy2D(
        srcMemoryType=_DEVICE_MEMORY,
        srcDevice=pointer,
        srcPitch=pitch,
        dstMemoryType=_DEVICE_MEMORY,
        dstDevice=to,
        dstPitch=to_pitch,
        WidthInBytes=width_bytes,
        Height=rows,
    )
    _copy_2d_async(ctypes.byref(copy), stream)


def memset(pointer: int, byte: int, nbytes: int) -> None:
    _memset(pointer, byte, nbytes)


def host_register(address: int, nbytes: int) -> None:
    """Page-lock existing host memory (also a mapped memfd), so that copies run at full speed."""
    _host_register(address, nbytes, _REGISTER_PORTABLE)


def host_unregister(address: int) -> None:
    _host_unregister(address)


# -- shared with another process -----------------------------------------------------------------


def _raw(handle: _IpcHandle) -> bytes:
    return bytes(handle.reserved)


def _by_value(handle: bytes) -> _IpcHandle:
    if len(handle) != IPC_HANDLE_BYTES:
        raise ValueError(f"a CUDA IPC handle has {IPC_HANDLE_BYTES} bytes, not {len(handle)}")
    return _IpcHandle.from_buffer_copy(handle)


def ipc_export(pointer: int) -> bytes:
    """The handle of an allocation's base pointer; 64 bytes to send to the other process."""
    handle = _IpcHandle()
    _ipc_get_mem(ctypes.byref(handle), pointer)
    return _raw(handle)


def ipc_open(handle: bytes) -> int:
    """Map another process's allocation. Compare UUIDs first: the driver also maps a hidden GPU."""
    pointer = _device()
    _ipc_open_mem(ctypes.byref(pointer), _by_value(handle), _LAZY_ENABLE_PEER_ACCESS)
    return pointer.value


def ipc_close(pointer: int) -> None:
    """Before the exporter frees the memory."""
    _ipc_close_mem(pointer)


# -- streams and the order between them -----------------------------------------------------------


def stream_create() -> int:
    """A stream that does not wait for the default stream."""
    handle = _handle()
    _stream_create(ctypes.byref(handle), _STREAM_NON_BLOCKING)
    return handle.value or 0


def stream_write(stream: int, pointer: int, number: int) -> None:
    """When all earlier work of `stream` is done and visible, put `number` (32 bits) at `pointer`."""
    _stream_write(stream, pointer, number, 0)


def stream_wait(stream: int, pointer: int, number: int) -> None:
    """Later work of `stream` waits, on the GPU, until the 32 bits at `pointer` have reached `number`:
    compared round the clock, so that a count may run over."""
    _stream_wait(stream, pointer, number, _GREATER_OR_EQUAL)


def stream_synchronize(stream: int = 0) -> None:
    """Wait on the CPU. Has no time limit of its own."""
    _stream_synchronize(stream)


def stream_destroy(stream: int) -> None:
    """Work that is in it goes on to its end."""
    _stream_destroy(stream)
