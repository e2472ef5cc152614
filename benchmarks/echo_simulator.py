"""The empty step: copies state arrays it already has into the block, and nothing else.

What a step costs with this simulator is the protocol's own cost. Options: `nu`, `width` (floats of state
published as qpos), `work_us` and `work_vary` (busy time of a step), `cores` (2: a step that wants two cores).
"""

import random
import threading
import time
import zlib
from typing import Sequence, Tuple

import numpy as np

from outboard.ipc.device import DeviceReport, cpu_report
from outboard.ipc.layout import Sizes
from outboard.ipc.messages import Init, ModelFacts
from outboard.workers.simulator import Fields, Progress, Simulator


class EchoSimulator(Simulator):
    engine = "echo"
    engine_version = "1"
    capabilities: Tuple[str, ...] = ("qpos",)

    def build(self, init: Init, progress: Progress) -> ModelFacts:
        nu, width = int(init.options["nu"]), int(init.options["width"])
        self.state = np.ones((init.num_envs, width), np.float32)
        self.work_ns = float(init.options.get("work_us", 0.0)) * 1e3
        self.vary = float(init.options.get("work_vary", 0.0))
        self.two_cores = int(init.options.get("cores", 1)) == 2
        if self.two_cores:
            self.blob = bytes(range(256)) * 160
        infinite = (-float("inf"), float("inf"))
        return ModelFacts(
            sizes=Sizes(init.num_envs, width, 0, nu, 0),
            timestep=0.01,
            floating_base=False,
            body_names=(),
            joint_names=(),
            actuator_names=tuple(f"a{i}" for i in range(nu)),
            default_qpos=(1.0,) * width,
            default_qvel=(),
            default_ctrl=(0.0,) * nu,
            joint_range=(),
            ctrl_range=infinite * nu,
            kp=(0.0,) * nu,
            kv=(0.0,) * nu,
            force_range=infinite * nu,
            env_origins=b"",
            not_reproduced=("physics",),
        )

    def report_device(self) -> DeviceReport:
        return cpu_report("qpos")

    def bind(self, banks: Sequence[Fields]) -> None:
        self.out = [bank["qpos"] for bank in banks]
        # The stamp: what arrived in ctrl[0, 0] goes back in qpos[0, 0], so a stale answer is seen.
        self.stamp_in = memoryview(banks[0]["ctrl"].reshape(-1)[:1]).cast("B").cast("f")
        self.stamp_out = memoryview(self.state.reshape(-1)[:1]).cast("B").cast("f")

    def step(self, bank: int) -> int:
        if self.work_ns:
            self._work()
        self.stamp_out[0] = self.stamp_in[0]
        self.out[bank][...] = self.state
        return 0

    def _work(self) -> None:
        work_ns = self.work_ns * (1 + self.vary * (2 * random.random() - 1))
        if self.two_cores:
            other = threading.Thread(target=zlib.compress, args=(self.blob, 9))
            other.start()
            zlib.compress(self.blob, 9)
            other.join()
            return
        end = time.perf_counter_ns() + work_ns
        while time.perf_counter_ns() < end:
            pass

    def publish(self, bank: int) -> int:
        self.out[bank][...] = self.state
        return 0

    def set_state(self, env_ids: np.ndarray, qpos: np.ndarray, qvel: np.ndarray) -> None:
        self.state[env_ids] = qpos

    def reset(self, env_ids: np.ndarray) -> None:
        self.state[env_ids] = 1.0
