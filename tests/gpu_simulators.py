"""Simulators for the tests and benchmarks of the arena on a real GPU: no physics, all state in GPU memory.
Runs on Python 3.8 without torch; named as FILE:CLASS to CustomBackend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from outboard.ipc import cuda_driver, cuda_memory
from outboard.ipc.arena import DeviceField
from outboard.ipc.device import ENGINE_BUFFER, DeviceReport
from outboard.ipc.layout import PUBLISHABLE, Sizes
from outboard.ipc.messages import Init, ModelFacts
from outboard.workers import device_copy, device_probe
from outboard.workers.simulator import Fields, Progress, Simulator

_DELAY_BYTES = 256 << 20  # copied once: 0.1 to 0.2 ms on an H200


def model(sizes: Sizes) -> ModelFacts:
    joints = tuple(f"joint{i}" for i in range(sizes.nu))
    endless = (-float("inf"), float("inf")) * sizes.nu
    return ModelFacts(
        sizes=sizes,
        timestep=0.01,
        floating_base=False,
        body_names=tuple(f"link{i}" for i in range(sizes.nbody)),
        joint_names=joints,
        actuator_names=joints,
        default_qpos=(0.0,) * sizes.nq,
        default_qvel=(0.0,) * sizes.nv,
        default_ctrl=(0.0,) * sizes.nu,
        joint_range=endless,
        ctrl_range=endless,
        kp=(1.0,) * sizes.nu,
        kv=(0.0,) * sizes.nu,
        force_range=endless,
        env_origins=b"",
        not_reproduced=("physics",),
    )


class _OnGpu(Simulator):
    engine = engine_version = "test"

    def build(self, init: Init, progress: Progress) -> ModelFacts:
        self.transports = ("block", "cuda")
        cuda_driver.init()
        cuda_driver.set_current(cuda_driver.retain_primary(0))
        self.stream = cuda_memory.stream_create()
        self.options: dict[str, Any] = dict(init.options)
        self.sizes = self.size(init.num_envs)
        self.memory = self.buffer(1)
        return model(self.sizes)

    def size(self, num_envs: int) -> Sizes:
        raise NotImplementedError

    def buffer(self, nbytes: int) -> int:
        pointer = cuda_memory.allocate(max(4, nbytes))
        cuda_memory.memset(pointer, 0, max(4, nbytes))
        cuda_driver.synchronize()
        return pointer

    @property
    def capabilities(self) -> tuple[str, ...]:
        return PUBLISHABLE

    def report_device(self) -> DeviceReport:
        return device_probe.of_pointer(self.memory, "state", ENGINE_BUFFER)

    def bind(self, banks: Sequence[Fields]) -> None:
        self.banks = banks

    def bind_arena(self, slots: Sequence[Mapping[str, DeviceField]]) -> None:
        self.slots = slots


class Echo(_OnGpu):
    """qpos is the last ctrl and qvel the one before it. Options: `width`, `delay` (how many large copies
    come before each step), `astray` (works in another stream than it says), `die_at` (a step)."""

    def size(self, num_envs: int) -> Sizes:
        width = int(self.options.get("width", 8))
        self.nbytes = 4 * num_envs * width
        self.now, self.before = self.buffer(self.nbytes), self.buffer(self.nbytes)
        self.delay = int(self.options.get("delay", 0))
        self.big = [self.buffer(_DELAY_BYTES) for _ in range(2)] if self.delay else []
        self.work = cuda_memory.stream_create() if self.options.get("astray") else self.stream
        return Sizes(num_envs, width, width, width, 1)

    def _slow(self) -> None:
        for _ in range(self.delay):
            cuda_memory.copy_dtod_async(self.big[0], self.big[1], _DELAY_BYTES, self.work)

    def step_arena(self, slot: int) -> None:
        cuda_memory.copy_dtod_async(self.before, self.now, self.nbytes, self.work)
        device_copy.out_of(self.slots[slot]["ctrl"], self.now, self.work)
        self._slow()
        self.publish_arena(slot)

    def publish_arena(self, slot: int) -> None:
        device_copy.into(self.slots[slot]["qpos"], self.now, self.work)
        device_copy.into(self.slots[slot]["qvel"], self.before, self.work)

    def step(self, bank: int) -> int:
        cuda_memory.copy_dtod_async(self.before, self.now, self.nbytes, self.stream)
        ctrl = self.banks[bank]["ctrl"]
        cuda_memory.copy_htod_async(self.now, ctrl.ctypes.data, self.nbytes, self.stream)
        return self.publish(bank)

    def publish(self, bank: int) -> int:
        for name, pointer in (("qpos", self.now), ("qvel", self.before)):
            array = self.banks[bank][name]
            cuda_memory.copy_dtoh_async(array.ctypes.data, pointer, self.nbytes, self.stream)
        cuda_memory.stream_synchronize(self.stream)
        return 0

    def _rows(self, pointer: int, env_ids: np.ndarray, rows: np.ndarray) -> None:
        width = 4 * self.sizes.nq
        for env_id, row in zip(env_ids, np.ascontiguousarray(rows, np.float32)):  # noqa: B905 - 3.8
            cuda_memory.copy_htod(pointer + int(env_id) * width, row.ctypes.data, width)

    def set_state(self, env_ids: np.ndarray, qpos: np.ndarray, qvel: np.ndarray) -> None:
        cuda_memory.stream_synchronize(self.work)
        self._rows(self.now, env_ids, qpos)
        self._rows(self.before, env_ids, qvel)

    def reset(self, env_ids: np.ndarray) -> None:
        nothing = np.zeros((len(env_ids), self.sizes.nq), np.float32)
        self.set_state(env_ids, nothing, nothing)


class G1Like(_OnGpu):
    """An empty simulator with the state of a Unitree G1: what is left is the hand-over. Each field it
    publishes lies in memory of its own; a step copies ctrl in and them out. Option `pageable`."""

    def size(self, num_envs: int) -> Sizes:
        return Sizes(num_envs, 36, 35, 29, 30)

    def bind(self, banks: Sequence[Fields]) -> None:
        super().bind(banks)
        names = [name for name in PUBLISHABLE if name in banks[0]]
        self.own = {name: self.buffer(banks[0][name].nbytes) for name in ("ctrl", *names)}
        self.state: list[str] = names

    def step_arena(self, slot: int) -> None:
        device_copy.out_of(self.slots[slot]["ctrl"], self.own["ctrl"], self.stream)
        self.publish_arena(slot)

    def publish_arena(self, slot: int) -> None:
        fields = self.slots[slot]
        for name in self.state:
            device_copy.into(fields[name], self.own[name], self.stream)

    def step(self, bank: int) -> int:
        ctrl = self.banks[bank]["ctrl"]
        cuda_memory.copy_htod_async(self.own["ctrl"], ctrl.ctypes.data, ctrl.nbytes, self.stream)
        return self.publish(bank)

    def publish(self, bank: int) -> int:
        for name in self.state:
            array = self.banks[bank][name]
            cuda_memory.copy_dtoh_async(
                array.ctypes.data, self.own[name], array.nbytes, self.stream
            )
        cuda_memory.stream_synchronize(self.stream)
        return 0

    def set_state(self, env_ids: np.ndarray, qpos: np.ndarray, qvel: np.ndarray) -> None:
        pass

    def reset(self, env_ids: np.ndarray) -> None:
        pass


class G1LikePageable(G1Like):
    """The same with the block as the kernel gives it: the page lock of `serve.py` is taken away."""

    def bind(self, banks: Sequence[Fields]) -> None:
        address = banks[0]["ctrl"].ctypes.data - 4096
        cuda_memory.host_unregister(address)
        super().bind(banks)
