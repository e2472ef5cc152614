"""Where the stand-in's tensors lie, and how it reads what it is pointed at."""

import ctypes
import os
from typing import Any

import numpy as np

from .settings import SETTINGS

CPU = -1


class HostMemory:
    """Plain memory: the CPU pipeline, and the GPU pipeline of a machine that has none."""

    def __init__(self, device: int) -> None:
        self.device = device

    def allocate(self, array: np.ndarray) -> int:
        """The address of a tensor of this size, for good, with `array` in it."""
        kept = np.array(array)
        _KEPT.append(kept)
        return kept.ctypes.data

    def write(self, address: int, array: np.ndarray) -> None:
        array = np.ascontiguousarray(array)
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def read(self, address: int, dtype: str, count: int) -> np.ndarray:
        """A copy. Memory that is not mapped any more ends the process, as it would there."""
        return np.frombuffer(ctypes.string_at(address, count * np.dtype(dtype).itemsize), dtype)

    def owns(self, address: int) -> bool:
        return address != 0

    def settle(self) -> None:
        pass


_KEPT: Any = []


class CudaMemory:
    """Memory of the driver, in the primary context; a real one, or the stand-in libcuda's."""

    def __init__(self, device: int) -> None:
        from outboard.ipc import cuda_driver, cuda_memory

        self.device, self._driver, self._memory = device, cuda_driver, cuda_memory
        cuda_driver.init()
        self._context = cuda_driver.retain_primary(device)

    def allocate(self, array: np.ndarray) -> int:
        with self._driver.using(self._context):
            address = self._memory.allocate(max(1, array.nbytes))
        self.write(address, array)
        return address

    def write(self, address: int, array: np.ndarray) -> None:
        array = np.ascontiguousarray(array)
        with self._driver.using(self._context):
            self._memory.copy_htod(address, array.ctypes.data, array.nbytes)

    def read(self, address: int, dtype: str, count: int) -> np.ndarray:
        into = np.empty(count, dtype)
        with self._driver.using(self._context):
            self._memory.copy_dtoh(into.ctypes.data, address, into.nbytes)
        return into

    def owns(self, address: int) -> bool:
        place = self._driver.where_is(address)
        return place.memory == self._driver.DEVICE_MEMORY and place.ordinal == self.device

    def settle(self) -> None:
        with self._driver.using(self._context):
            self._driver.synchronize()


def visible_gpus() -> int:
    """How many GPUs this process may use."""
    if SETTINGS.gpu == "host":
        return len([each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each])
    from outboard.ipc import cuda_driver

    return len(cuda_driver.survey()[0])


def open_memory(device: int) -> Any:
    if device == CPU or SETTINGS.gpu == "host":
        return HostMemory(device)
    return CudaMemory(device)
