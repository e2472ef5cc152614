"""How the Isaac Gym worker reads and writes the engine's tensors: three bridges of one shape.

`gymapi.Tensor` is a plain descriptor (address, device, dtype, shape), so neither torch nor gymtorch is
needed: on the CPU pipeline numpy looks at the memory itself, on the GPU pipeline the driver copies it.
gymtorch, with torch and minutes of compiling, is the way back if an engine does not take our descriptors.

A bridge gives `view` (of a tensor the engine fills), `staging` (one it reads), `copy_out` and `copy_in`.
"""

import ctypes
import importlib
import mmap
from typing import Any, Sequence, Tuple

import numpy as np

from ..ipc import cuda_driver, cuda_memory
from ..ipc.errors import WorkerLaunchError

HOST, DRIVER, GYMTORCH = "host memory", "driver", "gymtorch"
CPU_DEVICE = -1  # how a gymapi.Tensor says that it lies in host memory
_CONTEXT = 1  # CU_POINTER_ATTRIBUTE_CONTEXT

_pointer_context = cuda_driver.Entry(
    "cuPointerGetAttribute", ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, ctypes.c_uint64
)


class View:
    """A tensor of the engine. `array` is host memory; on a GPU it holds what `copy_out` fetched last."""

    def __init__(self, array: np.ndarray, source: Any = None) -> None:
        self.array, self.source = array, source


class Staging:
    """A buffer of ours that the engine reads through `tensor`. It lives as long as the worker: the engine
    may read it when it simulates, not when it is handed over."""

    def __init__(self, array: np.ndarray, tensor: Any, target: Any = None) -> None:
        self.array, self.tensor, self.target = array, tensor, target


class HostBridge:
    """CPU pipeline: no copy at all; numpy arrays over the engine's memory and ours."""

    name = HOST

    def __init__(self, gymapi: Any) -> None:
        self._gymapi = gymapi
        self._device = CPU_DEVICE

    def view(self, tensor: Any, shape: Tuple[int, ...]) -> View:
        count = int(np.prod(shape))
        memory: Any = (ctypes.c_float * count).from_address(tensor.data_address)
        return View(np.frombuffer(memory, np.float32).reshape(shape))

    def staging(self, shape: Tuple[int, ...], dtype: Any = np.float32) -> Staging:
        array = np.zeros(shape, dtype)
        return Staging(array, self._describe(array.ctypes.data, array))

    def poison(self, views: Sequence[View]) -> None:
        """Fill what a copy will overwrite; here nothing is copied, and the memory is the engine's."""

    def copy_out(self, views: Sequence[View]) -> None:
        """The views' arrays hold what the last refresh left."""

    def copy_in(self, stagings: Sequence[Staging]) -> None:
        """What is in the stagings' arrays is what the engine will read."""

    def _describe(self, address: int, array: np.ndarray) -> Any:
        """int32 goes by the name of UINT32: the engine knows no signed type."""
        gymapi = self._gymapi
        tensor = gymapi.Tensor()
        tensor.data_address = int(address)
        tensor.device = self._device
        tensor.dtype = gymapi.DTYPE_UINT32 if array.dtype == np.int32 else gymapi.DTYPE_FLOAT32
        tensor.own_data = False
        tensor.shape = tuple(array.shape)
        return tensor


class DriverBridge(HostBridge):
    """GPU pipeline through libcuda: one copy per tensor, into page-locked memory of ours.

    Nothing documents on which stream the engine works, so its context is synchronised before a read and after
    a write; about 10 us each.
    """

    name = DRIVER

    def __init__(self, gymapi: Any, address: int, device: int) -> None:
        super().__init__(gymapi)
        self._device = device
        self._context = _context_of(address, device)

    def view(self, tensor: Any, shape: Tuple[int, ...]) -> View:
        return View(self._page_locked(shape, np.float32), int(tensor.data_address))

    def staging(self, shape: Tuple[int, ...], dtype: Any = np.float32) -> Staging:
        array = self._page_locked(shape, dtype)
        with cuda_driver.using(self._context):
            address = cuda_memory.allocate(array.nbytes)
            cuda_memory.memset(address, 0, array.nbytes)
        return Staging(array, self._describe(address, array), address)

    def poison(self, views: Sequence[View]) -> None:
        for view in views:
            view.array.fill(np.nan)

    def copy_out(self, views: Sequence[View]) -> None:
        with cuda_driver.using(self._context):
            cuda_driver.synchronize()
            for view in views:
                array = view.array
                cuda_memory.copy_dtoh_async(array.ctypes.data, view.source, array.nbytes)
            cuda_memory.stream_synchronize()

    def copy_in(self, stagings: Sequence[Staging]) -> None:
        with cuda_driver.using(self._context):
            for staging in stagings:
                array = staging.array
                cuda_memory.copy_htod_async(staging.target, array.ctypes.data, array.nbytes)
            cuda_driver.synchronize()

    def _page_locked(self, shape: Tuple[int, ...], dtype: Any) -> np.ndarray:
        """Whole pages of its own: the driver registers no page twice."""
        count = int(np.prod(shape))
        memory = mmap.mmap(-1, max(1, count * np.dtype(dtype).itemsize))
        array = np.frombuffer(memory, dtype, count).reshape(shape)
        with cuda_driver.using(self._context):
            cuda_memory.host_register(array.ctypes.data, len(memory))
        return array


class GymtorchBridge:
    """Through torch and gymtorch, as programs of Isaac Gym usually do."""

    name = GYMTORCH

    def __init__(self, device: int) -> None:
        try:
            # After isaacgym, which refuses to be second.
            self._torch: Any = importlib.import_module("torch")
            self._gymtorch: Any = importlib.import_module("isaacgym.gymtorch")
        except Exception as error:  # a compiler that fails raises what it likes
            raise WorkerLaunchError(
                f'tensor_bridge="gymtorch" needs torch, ninja and a compiler in this environment '
                f'({type(error).__name__}: {error}); tensor_bridge="driver" needs none of them'
            ) from error
        self._device = "cpu" if device == CPU_DEVICE else f"cuda:{device}"

    def view(self, tensor: Any, shape: Tuple[int, ...]) -> View:
        host = self._torch.zeros(shape, dtype=self._torch.float32)
        return View(host.numpy(), (host, self._gymtorch.wrap_tensor(tensor).view(shape)))

    def staging(self, shape: Tuple[int, ...], dtype: Any = np.float32) -> Staging:
        kind = self._torch.int32 if np.dtype(dtype) == np.int32 else self._torch.float32
        host = self._torch.zeros(shape, dtype=kind)
        target = self._torch.zeros(shape, dtype=kind, device=self._device)
        return Staging(host.numpy(), self._gymtorch.unwrap_tensor(target), (host, target))

    def poison(self, views: Sequence[View]) -> None:
        for view in views:
            view.array.fill(np.nan)

    def copy_out(self, views: Sequence[View]) -> None:
        self._sync()
        for view in views:
            host, source = view.source
            host.copy_(source)

    def copy_in(self, stagings: Sequence[Staging]) -> None:
        for staging in stagings:
            host, target = staging.target
            target.copy_(host)
        self._sync()

    def _sync(self) -> None:
        if self._device != "cpu":
            self._torch.cuda.synchronize()


def _context_of(address: int, device: int) -> int:
    """The context in which the engine allocated, else the primary one."""
    context = ctypes.c_void_p()
    code = _pointer_context.code(ctypes.byref(context), _CONTEXT, address)
    if code == 0 and context.value:
        return context.value
    return cuda_driver.retain_primary(device)


def open_bridge(wanted: str, gymapi: Any, tensor: Any) -> Any:
    """The bridge for where `tensor` lies."""
    if wanted == GYMTORCH:
        return GymtorchBridge(tensor.device)
    if tensor.device == CPU_DEVICE:
        return HostBridge(gymapi)
    return DriverBridge(gymapi, tensor.data_address, tensor.device)
