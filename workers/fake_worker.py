"""`fake`: arithmetic instead of physics, deterministic in every bit, with scripted faults.

One environment has `nu` joints on a fixed base; qpos follows ctrl at a fixed rate. For tests and benchmarks
of everything that is not a simulator. Options (Cfg of the same names in `backends/fake.py`):

    nu             number of joints (default 4)
    lie            what `report_device` says instead of the truth (see `_lie`)
    work_us        how long a step takes, busy; work_vary: relative variation, 0.2 = +-20 %
    fault, fault_at, fault_step   what goes wrong, in "build", "step", "close" (see `_misbehave`)
"""

import dataclasses
import os
import random
import signal
import sys
import time
from typing import Mapping, Sequence, Tuple

import numpy as np

from ..ipc import cuda_driver, cuda_memory
from ..ipc.arena import DeviceField
from ..ipc.device import CPU, ENGINE_BUFFER, DeviceReport, cpu_report
from ..ipc.layout import ENV_NONFINITE, Sizes
from ..ipc.messages import Init, ModelFacts, Render
from . import device_copy, device_probe
from .simulator import Fields, Progress, Simulator


class _GpuBuffer:
    """Real GPU memory for one float32 array: what `fake` publishes goes through it."""

    def __init__(self, ordinal: int, shape: Tuple[int, ...]) -> None:
        self.context = cuda_driver.retain_primary(ordinal)
        cuda_driver.set_current(self.context)
        self.nbytes = 4 * int(np.prod(shape))
        self.pointer = cuda_memory.allocate(max(4, self.nbytes))

    def put(self, array: np.ndarray) -> None:
        cuda_memory.copy_htod(self.pointer, array.ctypes.data, self.nbytes)

    def get(self, into: np.ndarray) -> None:
        cuda_memory.copy_dtoh(into.ctypes.data, self.pointer, self.nbytes)

    def pass_on(self, array: np.ndarray, field: DeviceField, stream: int) -> None:
        """Into this memory, and from here within the GPU into the arena."""
        cuda_memory.copy_htod_async(self.pointer, array.ctypes.data, field.nbytes, stream)
        device_copy.into(field, self.pointer, stream)


_RATE = 2.0  # 1/s: qvel = _RATE * (ctrl - qpos)


class FakeSimulator(Simulator):
    engine = "fake"
    engine_version = "1"

    def build(self, init: Init, progress: Progress) -> ModelFacts:
        options = init.options
        nu = int(options.get("nu", 4))
        self.work_ns = float(options.get("work_us", 0.0)) * 1e3  # type: ignore[arg-type]
        self.vary = float(options.get("work_vary", 0.0))  # type: ignore[arg-type]
        self.fault = str(options.get("fault", ""))
        self.fault_at = str(options.get("fault_at", "step"))
        self.fault_step = int(options.get("fault_step", 1))
        self.random = random.Random(init.seed)
        self.dt = init.dt or 0.01
        self.decimation = init.decimation
        self.steps = 0
        self.default = np.linspace(-0.2, 0.2, nu, dtype=np.float32)
        self.qpos = np.tile(self.default, (init.num_envs, 1))
        self.qvel = np.zeros_like(self.qpos)
        self.target = self.qpos.copy()
        self.lie = str(options.get("lie", ""))
        self.gpu = None if init.device.kind == CPU else _GpuBuffer(0, self.qpos.shape)
        if self.gpu is not None:
            self.transports = ("block", "cuda")
        for done in range(3):
            progress("building", done + 1, 3)
        if self.fault_at == "build":
            self._misbehave()
        names = tuple(f"joint{i}" for i in range(nu))
        return ModelFacts(
            sizes=Sizes(init.num_envs, nu, nu, nu, nu),
            timestep=init.dt or 0.01,
            floating_base=False,
            body_names=tuple(f"link{i}" for i in range(nu)),
            joint_names=names,
            actuator_names=names,
            default_qpos=tuple(map(float, self.default)),
            default_qvel=(0.0,) * nu,
            default_ctrl=tuple(map(float, self.default)),
            joint_range=(-3.0, 3.0) * nu,
            ctrl_range=(-3.0, 3.0) * nu,
            kp=(1.0,) * nu,
            kv=(0.0,) * nu,
            force_range=(-float("inf"), float("inf")) * nu,
            env_origins=b"",
            not_reproduced=("physics",),
        )

    @property
    def capabilities(self) -> Tuple[str, ...]:
        return ("qpos", "qvel", "body_pos", "render", "set_property:rate")

    def report_device(self) -> DeviceReport:
        if self.gpu is None:
            truth = device_probe.in_host_memory("qpos")
        else:
            truth = device_probe.of_pointer(self.gpu.pointer, "qpos", ENGINE_BUFFER)
        return self._lie(truth) if self.lie else truth

    def _lie(self, truth: DeviceReport) -> DeviceReport:
        """One of: uuid:GPU-..., local:cuda:1, cpu, none (no GPU is visible), more:GPU-... (a second one
        is), late:... (the lie after the colon, but only once a step was made: right at the start, wrong
        after warm-up)."""
        kind, _, value = self.lie.partition(":")
        if kind == "late":
            if not self.steps:
                return truth
            kind, _, value = value.partition(":")
        if kind == "cpu":
            return cpu_report("qpos", truth.visible)
        if kind == "uuid":
            return dataclasses.replace(truth, uuid=value)
        if kind == "local":
            return dataclasses.replace(truth, local=value)
        if kind == "none":
            return dataclasses.replace(truth, visible=())
        return dataclasses.replace(truth, visible=(*truth.visible, value))

    def bind(self, banks: Sequence[Fields]) -> None:
        self.ctrl = banks[0]["ctrl"]
        self.banks = banks

    def step(self, bank: int) -> int:
        self._advance(self.ctrl)
        return self.publish(bank)

    def _advance(self, ctrl: np.ndarray) -> None:
        self.steps += 1
        if self.fault and self.fault_at == "step" and self.steps == self.fault_step:
            self._misbehave()
        if self.work_ns:
            work_ns = self.work_ns * (1 + self.vary * (2 * self.random.random() - 1))
            end = time.perf_counter_ns() + work_ns
            while time.perf_counter_ns() < end:
                pass
        np.copyto(self.target, ctrl)
        for _ in range(self.decimation):
            self.qvel = np.float32(_RATE) * (self.target - self.qpos)
            self.qpos = self.qpos + np.float32(self.dt) * self.qvel

    def bind_arena(self, slots: Sequence[Mapping[str, DeviceField]]) -> None:
        self.slots = slots
        self.stream = cuda_memory.stream_create()
        # A buffer per field: what is still being copied out of one must not be overwritten.
        self.buffers = {
            name: _GpuBuffer(0, field.shape)
            for name, field in slots[0].items()
            if name in ("qpos", "qvel", "body_pos", "env_flags")
        }

    def step_arena(self, slot: int) -> None:
        self._advance(device_copy.to_host(self.slots[slot]["ctrl"], self.stream))
        self.publish_arena(slot)

    def publish_arena(self, slot: int) -> None:
        bad = ~np.isfinite(self.qpos).all(axis=1)
        arrays = {
            "qpos": self.qpos,
            "qvel": self.qvel,
            "body_pos": np.repeat(self.qpos[:, :, None], 3, axis=2),
            "env_flags": np.where(bad, ENV_NONFINITE, 0).astype(np.uint8),
        }
        for name, buffer in self.buffers.items():
            buffer.pass_on(np.ascontiguousarray(arrays[name]), self.slots[slot][name], self.stream)
        # The arrays may go before the driver has read them.
        cuda_memory.stream_synchronize(self.stream)

    def publish(self, bank: int) -> int:
        fields = self.banks[bank]
        if self.gpu is not None:
            self.gpu.put(self.qpos)
        if "qpos" in fields:
            if self.gpu is not None:
                self.gpu.get(fields["qpos"])
            else:
                np.copyto(fields["qpos"], self.qpos)
        if "qvel" in fields:
            np.copyto(fields["qvel"], self.qvel)
        if "body_pos" in fields:
            fields["body_pos"][:] = self.qpos[:, :, None]
        bad = ~np.isfinite(self.qpos).all(axis=1)
        fields["env_flags"][:] = np.where(bad, ENV_NONFINITE, 0)
        return int(bad.sum())

    def set_state(self, env_ids: np.ndarray, qpos: np.ndarray, qvel: np.ndarray) -> None:
        self.qpos[env_ids] = qpos
        self.qvel[env_ids] = qvel
        self.target[env_ids] = qpos

    def reset(self, env_ids: np.ndarray) -> None:
        self.qpos[env_ids] = self.default
        self.qvel[env_ids] = 0
        self.target[env_ids] = self.default

    def set_property(self, name: str, env_ids: np.ndarray, values: np.ndarray) -> None:
        self.qpos[env_ids] += values  # visible at the next step: enough to test the way here

    def render(self, request: Render) -> np.ndarray:
        picture = np.zeros((request.height, request.width, 3), np.uint8)
        picture[..., 0] = request.env_id
        return picture

    def close(self) -> None:
        if self.fault_at == "close":
            self._misbehave()

    def _misbehave(self) -> None:
        """One of: SIGKILL, SIGSEGV, SIGSTOP, exit:N, hang, slow:SECONDS, raise, flood, take:MIB (memory)."""
        kind, _, value = self.fault.partition(":")
        if kind.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, kind))
            time.sleep(3600 if kind != "SIGSTOP" else 0)
        elif kind == "exit":
            os._exit(int(value))
        elif kind == "hang":
            time.sleep(3600)
        elif kind == "slow":
            time.sleep(float(value))
        elif kind == "raise":
            raise RuntimeError(value or "scripted fault")
        elif kind == "flood":
            for _ in range(10):
                os.write(1, b"x" * (1 << 20))
            sys.stdout.write("flooded\n")
        elif kind == "take":
            self.taken = [b"x" * (1 << 20) for _ in range(int(value))]
