"""Work recorded once and replayed, and the memory through which it meets the host: block or arena.

Warp records on the GPU into a CUDA graph and on the CPU into a list of its own; both replay without Python.
A graph holds addresses, so whoever binds new memory records anew.
"""

from typing import Any, Callable, Dict, List, Mapping, Tuple

import numpy as np

from ..ipc import cuda_memory
from ..ipc.arena import DeviceField

# Field -> attribute of `warp` that is one element's dtype; the others are plain numbers.
_ELEMENTS = {
    "body_pos": "vec3",
    "body_quat": "quat",
    "body_linvel": "vec3",
    "body_angvel": "vec3",
    "contact_force": "vec3",
}
_PLAIN = {"<f4": "float32", "|u1": "uint8", "<u1": "uint8", "<i4": "int32"}


class Graphs:
    """What was recorded, by name."""

    def __init__(self, wp: Any, device: Any) -> None:
        self._wp, self._device = wp, device
        # With the work, because it holds the arrays whose addresses the graph has.
        self._graphs: Dict[Tuple[Any, ...], Tuple[Any, Callable[[], None]]] = {}

    def record(self, key: Tuple[Any, ...], work: Callable[[], None]) -> None:
        """Nothing is executed. Every kernel of `work` must have run before: a module that is compiled
        while recording would take minutes where a step is expected."""
        with self._wp.ScopedCapture(device=self._device) as capture:
            work()
        self._graphs[key] = capture.graph, work

    def run(self, key: Tuple[Any, ...]) -> None:
        self._wp.capture_launch(self._graphs[key][0])


class Port:
    """Where one bank or slot takes `ctrl` from and leaves its state: arrays that kernels may use, and what
    must be copied before and after. `shape` as in ipc/layout.py."""

    def __init__(self, arrays: Dict[str, Any]) -> None:
        self.arrays = arrays

    def fetch(self) -> None:
        """Enqueue the copies that bring `ctrl` to the device."""

    def deliver(self) -> None:
        """Enqueue the copies that bring the state to the host."""


def element(wp: Any, name: str, shape: Tuple[int, ...], dtype: str) -> Tuple[Any, Tuple[int, ...]]:
    """Warp's dtype and shape of a field."""
    if name in _ELEMENTS:
        return getattr(wp, _ELEMENTS[name]), shape[:-1]
    return getattr(wp, _PLAIN[dtype]), shape


def over_numpy(wp: Any, name: str, array: np.ndarray) -> Any:
    """A Warp array over the same host memory."""
    dtype, shape = element(wp, name, array.shape, array.dtype.str)
    if not array.size:
        return wp.empty(shape, dtype=dtype, device="cpu")
    return wp.array(ptr=array.ctypes.data, shape=shape, dtype=dtype, device="cpu", copy=False)


def over_field(wp: Any, field: DeviceField, device: Any) -> Any:
    """A Warp array over a field of the arena."""
    dtype, shape = element(wp, field.name, field.shape, field.dtype)
    if not field.nbytes:
        return wp.empty(shape, dtype=dtype, device=device)
    return wp.array(ptr=field.pointer, shape=shape, dtype=dtype, device=device, copy=False)


def host_port(wp: Any, fields: Mapping[str, np.ndarray]) -> Port:
    """The CPU's: the block itself."""
    return Port({name: over_numpy(wp, name, array) for name, array in fields.items()})


def arena_port(wp: Any, fields: Mapping[str, DeviceField], device: Any) -> Port:
    """The arena itself: device memory of the host's."""
    return Port({name: over_field(wp, field, device) for name, field in fields.items()})


class BlockPort(Port):
    """The GPU's way to the shared block: `ctrl` comes to a buffer of ours, each field goes from one, or from
    the engine's own array where that is the field already. The block is page-locked, so the copies are
    part of the graph.

    Buffers are made outside Warp's memory pool: what is exchanged with others is ordinary memory."""

    def __init__(
        self,
        wp: Any,
        fields: Mapping[str, np.ndarray],
        device: Any,
        engine: Mapping[str, Any],
    ) -> None:
        arrays: Dict[str, Any] = {}
        with wp.ScopedMempool(device, False):
            for name, array in fields.items():
                if name in engine:
                    arrays[name] = engine[name]
                    continue
                dtype, shape = element(wp, name, array.shape, array.dtype.str)
                arrays[name] = wp.zeros(shape, dtype=dtype, device=device)
        super().__init__(arrays)
        self._fields, self._stream = fields, wp.get_stream(device).cuda_stream

    def fetch(self) -> None:
        array = self._fields["ctrl"]
        if array.size:
            pointer = self.arrays["ctrl"].ptr
            cuda_memory.copy_htod_async(pointer, array.ctypes.data, array.nbytes, self._stream)

    def deliver(self) -> None:
        for name, array in self._fields.items():
            if name != "ctrl" and array.size:
                pointer = self.arrays[name].ptr
                cuda_memory.copy_dtoh_async(array.ctypes.data, pointer, array.nbytes, self._stream)


class Mirror:
    """A few arrays in host memory and again on the device; on the CPU they are one and the same."""

    def __init__(
        self, wp: Any, device: Any, shapes: Mapping[str, Tuple[Tuple[int, ...], Any]]
    ) -> None:
        self.host: Dict[str, np.ndarray] = {}
        self.device: Dict[str, Any] = {}
        self._wp, self._kept, self._pairs = wp, [], []  # type: ignore[var-annotated]
        self._kept: List[Any]
        self._pairs: List[Tuple[Any, Any]]
        gpu = device.is_cuda
        for name, (shape, dtype) in shapes.items():
            host = wp.zeros(shape, dtype=dtype, device="cpu", pinned=gpu)
            self._kept.append(host)  # numpy() is a view of it
            self.host[name] = host.numpy()
            self.device[name] = wp.zeros(shape, dtype=dtype, device=device) if gpu else host
            if gpu:
                self._pairs.append((host, self.device[name]))

    def up(self) -> None:
        """Enqueue host to device. The host side may be written again when the stream has passed it."""
        for host, device in self._pairs:
            self._wp.copy(device, host)

    def down(self) -> None:
        """Enqueue device to host."""
        for host, device in self._pairs:
            self._wp.copy(host, device)
