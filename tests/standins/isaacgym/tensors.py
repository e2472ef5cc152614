"""The stand-in's tensor interface: four caches that only a refresh fills, setters that keep an address.

GPU pipeline: a setter is recorded, takes effect at the next simulate, and may be called once until then; what
it was pointed at is read again at that moment and must not have changed. CPU pipeline: at once.
"""

import zlib
from typing import Any, Dict, Optional, Tuple

import numpy as np

from .kinds import Tensor, TensorDataType, size_of
from .lines import die, error
from .memory import CPU
from .physics import Robots
from .settings import SETTINGS

_F32, _I32 = TensorDataType.DTYPE_FLOAT32, TensorDataType.DTYPE_UINT32
Record = Tuple[str, Tensor, Optional[Tensor], int, int]  # kind, values, indices, count, checksum


class Tensors:
    def __init__(self, robots: Robots, memory: Any, broken: bool) -> None:
        self.robots, self.memory, self.broken = robots, memory, broken
        self.gpu = memory.device != CPU
        self._records: Dict[str, Record] = {}
        self._caches: Dict[str, Tensor] = {}
        self._results = self._snapshot()

    # -- caches ------------------------------------------------------------------------------------

    def _snapshot(self) -> Dict[str, np.ndarray]:
        robots = self.robots
        names = ("root", "dof", "body", "contact")
        width = {"root": 13, "dof": 2, "body": 13, "contact": 3}
        return {name: getattr(robots, name).reshape(-1, width[name]).copy() for name in names}

    def acquire(self, name: str) -> Optional[Tensor]:
        """The same address for good; poison (NaN) until the first refresh, which the original has not."""
        if name not in self._caches:
            shape = self._results[name].shape
            if not size_of(shape):
                error("*** Can't create empty tensor")
                return None
            tensor = Tensor()
            tensor.data_address = self.memory.allocate(np.full(shape, np.nan, np.float32))
            tensor.device, tensor.dtype, tensor.shape = self.memory.device, _F32, shape
            self._caches[name] = tensor
        return self._caches[name]

    def refresh(self, name: str) -> bool:
        if name not in self._caches:
            error(f"{name} was not acquired")
            return False
        if not self.broken:
            self.memory.write(self._caches[name].data_address, self._results[name])
        elif SETTINGS.create in ("zeros", "no_kernel"):
            self.memory.write(self._caches[name].data_address, np.zeros_like(self._results[name]))
        return True

    def fetched(self) -> None:
        """Results of the last simulate become visible to refresh."""
        self._results = self._snapshot()

    # -- setters -----------------------------------------------------------------------------------

    def put(self, kind: str, values: Tensor, indices: Optional[Tensor], count: int) -> bool:
        width = {"root": 13, "dof": 2, "targets": 1, "force": 3}[kind]
        robots = self.robots
        rows = {"root": 1, "force": robots.bodies}.get(kind, robots.joints) * len(robots.root)
        if not self._sound(kind, values, rows * width, _F32, indices is not None):
            return False
        if indices is not None and not self._sound(kind, indices, count, _I32, True):
            return False
        record = (kind, values, indices, count, self._checksum(values, indices))
        if not self.gpu:
            self._apply(record)
            self._results["root"] = self._snapshot()["root"]
            self._results["dof"] = self._snapshot()["dof"]
            return True
        if kind in self._records and SETTINGS.strict == "abort":
            die(f"a second setter of {kind} before the next simulate")
        self._records[kind] = record
        return True

    def _sound(self, kind: str, tensor: Tensor, count: int, dtype: Any, full: bool) -> bool:
        size = size_of(tensor.shape)
        if tensor.dtype is not dtype:
            error(f"{kind}: tensor has dtype {tensor.dtype}, {dtype} expected")
        elif tensor.device != self.memory.device:
            error(f"{kind}: tensor is on device {tensor.device}, {self.memory.device} expected")
        elif size != count:
            error(f"{kind}: tensor has {size} elements, {count} expected")
        elif not self.memory.owns(tensor.data_address):
            error(f"{kind}: address {tensor.data_address:#x} is not on device {self.memory.device}")
        else:
            return True
        return False

    def _read(self, tensor: Tensor) -> np.ndarray:
        dtype = "<f4" if tensor.dtype is _F32 else "<i4"
        return self.memory.read(tensor.data_address, dtype, size_of(tensor.shape))

    def _checksum(self, values: Tensor, indices: Optional[Tensor]) -> int:
        total = zlib.crc32(self._read(values).tobytes())
        return total if indices is None else zlib.crc32(self._read(indices).tobytes(), total)

    def _apply(self, record: Record) -> None:
        kind, values, indices, count, _ = record
        robots, n = self.robots, len(self.robots.root)
        data = self._read(values)
        chosen = np.arange(n)
        if indices is not None:
            chosen = self._read(indices)[:count]
            if len(chosen) and (chosen.min() < 0 or chosen.max() >= n):
                die(f"{kind}: actor index out of range")
            if len(np.unique(chosen)) != len(chosen):
                die(f"{kind}: an actor is named twice")
        if kind == "root":
            for i in map(int, chosen):
                robots.put_root(i, data.reshape(n, 13)[i])
        elif kind == "dof":
            for i in map(int, chosen):
                robots.put_dof(i, data.reshape(n, -1, 2)[i])
        elif kind == "targets":
            robots.targets[chosen] = data.reshape(n, -1)[chosen]
        else:
            robots.wrench[:, :, :3] = data.reshape(n, -1, 3)

    def simulate(self) -> None:
        self.memory.settle()
        for record in self._records.values():
            if self._checksum(record[1], record[2]) != record[4]:
                die(f"what the setter of {record[0]} was pointed at changed before simulate")
            self._apply(record)
        self._records.clear()
        if not self.broken:
            self.robots.simulate()
        if self.gpu:
            self.fetched()
