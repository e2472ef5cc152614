"""Copies between a simulator's own GPU memory and the arena, in the simulator's stream. No torch.

Everything but `mask_ids` and `to_host` only enqueues.
"""

import numpy as np

from ..ipc import cuda_memory
from ..ipc.arena import DeviceField


def into(field: DeviceField, pointer: int, stream: int = 0) -> None:
    """The whole field from contiguous memory of the same shape and dtype."""
    if field.nbytes:
        cuda_memory.copy_dtod_async(field.pointer, pointer, field.nbytes, stream)


def out_of(field: DeviceField, pointer: int, stream: int = 0) -> None:
    """The whole field into contiguous memory."""
    if field.nbytes:
        cuda_memory.copy_dtod_async(pointer, field.pointer, field.nbytes, stream)


def rows_into(
    field: DeviceField, pointer: int, pitch: int, stream: int = 0, at: int = 0, width: int = -1
) -> None:
    """A row of bytes per environment, from memory where rows are `pitch` bytes apart.

    at, width: which bytes of the field's own row are written (default: all of it), so that a field can be
    put together from several arrays: root position, root quaternion, joints.
    """
    rows, own = field.shape[0], field.nbytes // field.shape[0]
    width = own - at if width < 0 else width
    if width:
        cuda_memory.copy_rows_async(field.pointer + at, own, pointer, pitch, width, rows, stream)


def rows_out_of(
    field: DeviceField, pointer: int, pitch: int, stream: int = 0, at: int = 0, width: int = -1
) -> None:
    """The other way: bytes `at`, `width` of each of the field's rows, to rows `pitch` bytes apart."""
    rows, own = field.shape[0], field.nbytes // field.shape[0]
    width = own - at if width < 0 else width
    if width:
        cuda_memory.copy_rows_async(pointer, pitch, field.pointer + at, own, width, rows, stream)


def to_host(field: DeviceField, stream: int = 0) -> np.ndarray:
    """The field as a new array. Waits for the stream."""
    array = np.empty(field.shape, field.dtype)
    if field.nbytes:
        cuda_memory.copy_dtoh_async(array.ctypes.data, field.pointer, field.nbytes, stream)
        cuda_memory.stream_synchronize(stream)
    return array


def mask_ids(mask: DeviceField, stream: int = 0) -> np.ndarray:
    """The environments (int32) where the mask is not zero. Waits for the stream: for simulators that
    have no way to reset by mask on the GPU."""
    return np.flatnonzero(to_host(mask, stream)).astype(np.int32)
