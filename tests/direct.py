"""Drives a Simulator in this process: the calls of `serve.py`, its arrays, and no worker around it.

    with Direct("mujoco", "arm7.xml", num_envs=4, publish=("qpos", "body_pos")) as sim:
        sim.step(ctrl)
        sim["qpos"]

Runs on every Python that a worker runs on. As a program it does one roll-out and saves what came out:

    python direct.py JSON        {"simulator": ..., "scene": ..., "out": "x.npz", ...}, see `main`
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from outboard.ipc.device import CPU, PlannedDevice
from outboard.ipc.layout import HOST, Layout
from outboard.ipc.messages import Init, Render, Scalar
from outboard.workers.simulator import Simulator, load


def make_init(scene: str, num_envs: int = 2, **changes: Any) -> Init:
    """A valid INIT for the CPU; `changes` replaces any of its parts."""
    parts: dict[str, Any] = dict(
        nonce=bytes(16),
        device=PlannedDevice(CPU, "", CPU),
        rank=0,
        scene=scene,
        num_envs=num_envs,
        dt=0.0,
        decimation=1,
        publish=("qpos", "qvel"),
        transport="block",
        render=False,
        seed=1,
        terrain="flat",
        control="position",
        options={},
    )
    parts.update(changes)
    return Init(**parts)


def allocate(layout: Layout) -> list[dict[str, np.ndarray]]:
    """Per bank, plain arrays as `Block.fields` has them: host-written ones are shared by the banks.

    Worker-written ones start as garbage, so that a field that nobody writes is seen."""
    banks: list[dict[str, np.ndarray]] = [{} for _ in range(layout.banks)]
    for field in layout.fields:
        array = np.zeros(field.shape, field.dtype)
        for bank in banks:
            bank[field.name] = array if field.written_by == HOST else np.full_like(array, 77)
    return banks


class Direct:
    """One simulator, built and bound, with bank 0 published; closed at the end of `with`."""

    def __init__(
        self,
        simulator: str | type[Simulator],
        scene: str,
        num_envs: int = 2,
        banks: int = 1,
        options: dict[str, Scalar] | None = None,
        **changes: Any,
    ) -> None:
        cls = load(simulator) if isinstance(simulator, str) else simulator
        self.init = make_init(scene, num_envs, options=options or {}, **changes)
        self.progress: list[str] = []
        self.flagged = 0  # what the last step or publish returned
        self.simulator = cls()
        try:
            self.facts = self.simulator.build(self.init, self._on_progress)
            self.layout = Layout(self.facts.sizes, self.init.publish, banks)
            self.banks = allocate(self.layout)
            self["ctrl"][:] = self.facts.default_ctrl
            self.simulator.bind(self.banks)
            self.publish()
        except BaseException:
            self.simulator.close()
            raise

    def _on_progress(self, stage: str, done: int, total: int) -> None:
        self.progress.append(stage)

    def __enter__(self) -> Direct:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.simulator.close()

    def __getitem__(self, field: str) -> np.ndarray:
        """The live array of a field, in bank 0."""
        return self.banks[0][field]

    def copy(self) -> dict[str, np.ndarray]:
        """All published fields of bank 0, and the flags, as they are now."""
        return {name: self[name].copy() for name in (*self.layout.publish, "env_flags")}

    def step(self, ctrl: Any = None, bank: int = 0) -> int:
        if ctrl is not None:
            self["ctrl"][:] = ctrl
        self.flagged = self.simulator.step(bank)
        return self.flagged

    def publish(self, bank: int = 0) -> int:
        self.flagged = self.simulator.publish(bank)
        return self.flagged

    def reset(self, env_ids: Sequence[int] | None = None) -> int:
        """As the command RESET: all environments when `env_ids` is left out."""
        chosen = range(self.init.num_envs) if env_ids is None else env_ids
        self.simulator.reset(np.array(list(chosen), np.int32))
        return self.publish()

    def set_state(self, env_ids: Sequence[int], qpos: Any, qvel: Any) -> int:
        """As the command SET_STATE; `qpos`, `qvel` broadcast to a row for each environment."""
        n, sizes = len(env_ids), self.facts.sizes
        new_qpos = np.array(np.broadcast_to(qpos, (n, sizes.nq)), np.float32)
        new_qvel = np.array(np.broadcast_to(qvel, (n, sizes.nv)), np.float32)
        self.simulator.set_state(np.array(env_ids, np.int32), new_qpos, new_qvel)
        return self.publish()

    def render(self, env_id: int = 0, width: int = 64, height: int = 48, **camera: float) -> Any:
        return self.simulator.render(Render(env_id, width, height, camera))


def sine_targets(facts: Any, steps: int, num_envs: int, amplitude: float = 0.2) -> np.ndarray:
    """float32 (steps, num_envs, nu): each joint of each environment swings about the default target
    at its own slow frequency; no two alike. `amplitude` in rad."""
    nu = facts.sizes.nu
    turns = np.arange(steps)[:, None, None] * facts.timestep * (1 + 0.1 * np.arange(nu))
    phase = 0.3 * np.arange(num_envs)[:, None]
    swing = np.sin(2 * np.pi * turns + phase) - np.sin(phase)
    return (np.array(facts.default_ctrl) + amplitude * swing).astype(np.float32)


def rollout(
    sim: Direct, ctrls: np.ndarray, reset_at: int = -1, reset_ids: Sequence[int] = ()
) -> Any:
    """Every published field after each step, as {name: (steps, num_envs, ...)}; before step
    `reset_at` the environments `reset_ids` go back to the keyframe."""
    frames: list[dict[str, np.ndarray]] = []
    for t, ctrl in enumerate(ctrls):
        if t == reset_at:
            sim.reset(reset_ids)
        sim.step(ctrl)
        frames.append(sim.copy())
    return {name: np.stack([frame[name] for frame in frames]) for name in frames[0]}


def main(argv: list[str]) -> None:
    """JSON keys: simulator, scene, out, and optionally num_envs, steps, amplitude, reset_at,
    reset_ids, and anything that `make_init` takes."""
    job = json.loads(argv[0])
    out, simulator, scene = job.pop("out"), job.pop("simulator"), job.pop("scene")
    steps, amplitude = job.pop("steps", 100), job.pop("amplitude", 0.2)
    reset_at, reset_ids = job.pop("reset_at", -1), job.pop("reset_ids", ())
    job["publish"] = tuple(job.pop("publish", ("qpos", "qvel")))
    with Direct(simulator, scene, **job) as sim:
        ctrls = sine_targets(sim.facts, steps, sim.init.num_envs, amplitude)
        frames = rollout(sim, ctrls, reset_at, reset_ids)
        engine = f"{sim.simulator.engine} {sim.simulator.engine_version}"
    np.savez(out, engine=engine, python=sys.version.split()[0], **frames)


if __name__ == "__main__":
    main(sys.argv[1:])
