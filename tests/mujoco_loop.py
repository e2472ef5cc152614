"""The reference for `mujoco_worker`: one MjData per environment and a plain loop, nothing else.

Runs on every Python that a worker runs on. As a program it compares the simulator with the loop there:

    python mujoco_loop.py SCENE OUT.npz        OUT: equal (bool), and the simulator's last qpos and qvel
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import mujoco  # type: ignore[import-untyped]
import numpy as np

from direct import Direct, rollout, sine_targets

mj: Any = mujoco  # its stubs do not list its names
STEPS, NUM_ENVS, RESET_AT, RESET_IDS = 200, 8, 100, (1, 4)


def plain_loop(
    scene: str, ctrls: np.ndarray, decimation: int, reset_at: int = -1, ids: Sequence[int] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """float64 qpos (steps, num_envs, nq) and qvel (steps, num_envs, nv) from keyframe 0; before step
    `reset_at` the environments `ids` go back to it."""
    model = mj.MjModel.from_xml_path(scene)
    datas = [mj.MjData(model) for _ in range(ctrls.shape[1])]
    for data in datas:
        mj.mj_resetDataKeyframe(model, data, 0)
    qpos, qvel = [], []
    for t, ctrl in enumerate(ctrls):
        for i in ids if t == reset_at else ():
            mj.mj_resetDataKeyframe(model, datas[i], 0)
        for i, data in enumerate(datas):
            data.ctrl[:] = ctrl[i]
            mj.mj_step(model, data, decimation)
        qpos.append([data.qpos.copy() for data in datas])
        qvel.append([data.qvel.copy() for data in datas])
    return np.array(qpos), np.array(qvel)


def state64(sim: Direct) -> tuple[np.ndarray, np.ndarray]:
    """qpos, qvel as the engine has them, before they are rounded for publishing."""
    batch: Any = sim.simulator._batch  # type: ignore[attr-defined]
    return batch.bind("qpos").copy(), batch.bind("qvel").copy()


def follows_the_loop(sim: Direct, amplitude: float = 0.2) -> bool:
    """Whether the simulator makes the loop's trajectory, in every published bit and in every bit of
    the last state in double precision; with a reset of some environments half-way."""
    ctrls = sine_targets(sim.facts, STEPS, sim.init.num_envs, amplitude)
    qpos, qvel = plain_loop(sim.init.scene, ctrls, sim.init.decimation, RESET_AT, RESET_IDS)
    frames = rollout(sim, ctrls, RESET_AT, RESET_IDS)
    last_qpos, last_qvel = state64(sim)
    return (
        np.array_equal(frames["qpos"], qpos.astype(np.float32))
        and np.array_equal(frames["qvel"], qvel.astype(np.float32))
        and np.array_equal(last_qpos, qpos[-1])
        and np.array_equal(last_qvel, qvel[-1])
    )


if __name__ == "__main__":
    with Direct("mujoco", sys.argv[1], NUM_ENVS, decimation=2, options={"threads": 2}) as bench:
        same = follows_the_loop(bench)
        last = state64(bench)
    np.savez(sys.argv[2], equal=same, qpos=last[0], qvel=last[1])
