"""As much of torch, over numpy, as the gymtorch bridge of the Isaac Gym worker calls. CPU only."""

import ctypes
from typing import Any, Tuple

import numpy as np

float32, int32 = np.float32, np.int32


class _Tensor:
    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.shape = array.shape

    def numpy(self) -> np.ndarray:
        return self._array

    def view(self, shape: Tuple[int, ...]) -> "_Tensor":
        return _Tensor(self._array.reshape(shape))

    def copy_(self, other: "_Tensor") -> "_Tensor":
        np.copyto(self._array, other._array)
        return self

    def data_ptr(self) -> int:
        return self._array.ctypes.data

    def is_int(self) -> bool:
        return self._array.dtype == np.int32


def zeros(shape: Tuple[int, ...], dtype: Any = float32, device: str = "cpu") -> _Tensor:
    if device != "cpu":
        raise RuntimeError("this torch has no CUDA")
    return _Tensor(np.zeros(shape, dtype))


def over(address: int, shape: Tuple[int, ...]) -> _Tensor:
    """What torch does in C++: a tensor over memory that is not its own."""
    memory: Any = (ctypes.c_float * int(np.prod(shape))).from_address(address)
    return _Tensor(np.frombuffer(memory, np.float32).reshape(shape))
