"""The empty step: copies a state array it already has into the block, and nothing else.

What a step costs with this simulator is the protocol's own cost. Options: `nu`, `width` (floats of state
published as qpos), and those of `step_work.make_prepare` for a step that takes time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from step_work import make_step

from outboard.ipc.device import DeviceReport, cpu_report
from outboard.ipc.layout import Sizes
from outboard.ipc.messages import Init, ModelFacts
from outboard.workers.simulator import Fields, Progress, Simulator


class EchoSimulator(Simulator):
    engine = "echo"
    engine_version = "1"
    capabilities = ("qpos",)  # type: ignore[assignment]

    def build(self, init: Init, progress: Progress) -> ModelFacts:
        nu, width = int(init.options["nu"]), int(init.options["width"])
        self.options = dict(init.options)
        self.state = np.ones((init.num_envs, width), np.float32)
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
        self._step = [make_step(banks[0]["ctrl"], out, self.options) for out in self.out]
        if len(banks) == 1:
            # Nothing between the worker's loop and the copy: the stub of every other scheme is as short.
            self.step = self._step[0]  # type: ignore[method-assign]

    def step(self, bank: int) -> int:
        return self._step[bank]()

    def publish(self, bank: int) -> int:
        self.out[bank][...] = self.state
        return 0

    def set_state(self, env_ids: np.ndarray, qpos: np.ndarray, qvel: np.ndarray) -> None:
        self.state[env_ids] = qpos

    def reset(self, env_ids: np.ndarray) -> None:
        self.state[env_ids] = 1.0
