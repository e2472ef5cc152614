"""GPU memory through libcuda: allocate, copy, page-lock, share between processes, order by events.

Thin on purpose: one function per driver call, plain ints for pointers and handles, CudaError on
failure. The calling thread needs a current context (`cuda_driver.using`); 0 is the default stream.
"""

import ctypes
from typing import Any, Tuple

from .cuda_driver import Entry
from .messages import IPC_HANDLE_BYTES

# Sizes of exported memory are rounded up to this: the driver maps whole 2 MiB blocks to the other
# process, so a smaller allocation would expose its neighbours.
IPC_GRANULE_BYTES = 2 << 20

_EVENT_FLAGS = 0x2 | 0x4  # DISABLE_TIMING | INTERPROCESS: the second is refused without the first
_STREAM_NON_BLOCKING = 0x1
_LAZY_ENABLE_PEER_ACCESS = 0x1  # the only flag that cuIpcOpenMemHandle knows, and it wants it
_REGISTER_PORTABLE = 0x1  # page-locked for every context, not only for the current one
_NOT_READY = 600
_DEVICE_MEMORY = 2  # CUmemorytype


class _IpcHandle(ctypes.Structure):
    """64 opaque bytes, which the driver takes by value. Memory and events have the same shape."""

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
_ipc_get_event = Entry("cuIpcGetEventHandle", _out_ipc, _handle)
_ipc_open_event = Entry("cuIpcOpenEventHandle", _out_handle, _IpcHandle)
_event_create = Entry("cuEventCreate", _out_handle, _uint)
_event_record = Entry("cuEventRecord", _handle, _handle)
_event_query = Entry("cuEventQuery", _handle)
_event_synchronize = Entry("cuEventSynchronize", _handle)
_event_destroy = Entry("cuEventDestroy_v2", _handle)
_stream_create = Entry("cuStreamCreate", _out_handle, _uint)
_stream_wait = Entry("cuStreamWaitEvent", _handle, _handle, _uint)
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


# -- events and streams --------------------------------------------------------------------------


def _new(entry: Entry, *args: Any) -> int:
    handle = _handle()
    entry(ctypes.byref(handle), *args)
    return handle.value or 0


def event_create() -> int:
    """An event that another process may open."""
    return _new(_event_create, _EVENT_FLAGS)


def event_record(event: int, stream: int = 0) -> None:
    _event_record(event, stream)


def event_query(event: int) -> bool:
    """Whether everything before the last record is done."""
    code = _event_query.code(event)
    if code == _NOT_READY:
        return False
    if code:
        _event_query(event)  # raises with the driver's words
    return True


def event_synchronize(event: int) -> None:
    """Wait on the CPU. Has no time limit of its own: poll `event_query` where one is needed."""
    _event_synchronize(event)


def event_destroy(event: int) -> None:
    _event_destroy(event)


def event_export(event: int) -> bytes:
    handle = _IpcHandle()
    _ipc_get_event(ctypes.byref(handle), event)
    return _raw(handle)


def event_open(handle: bytes) -> int:
    return _new(_ipc_open_event, _by_value(handle))


def stream_create() -> int:
    """A stream that does not wait for the default stream."""
    return _new(_stream_create, _STREAM_NON_BLOCKING)


def stream_wait(stream: int, event: int) -> None:
    """Work enqueued later in `stream` waits for `event`, on the GPU."""
    _stream_wait(stream, event, 0)


def stream_synchronize(stream: int = 0) -> None:
    _stream_synchronize(stream)


def stream_destroy(stream: int) -> None:
    _stream_destroy(stream)
