"""Checks of what moves a robot: joint targets, and the floor under it."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from .arguments import find_scene
from .backend import Backend
from .conformance_kit import NUM_ENVS, SIMULATOR, Bench, broken, check, copy, not_applicable
from .conformance_physics import LIFT_M, everywhere, joint_columns, lifted

# -- targets and forces -----------------------------------------------------------------------------


def _steps_of(sim: Backend, seconds: float) -> int:
    return max(10, min(2000, round(seconds / sim.model.timestep)))


@check(SIMULATOR)
def targets_are_approached(bench: Bench) -> None:
    """ctrl is a joint position target: within a second each joint of a fixed-base robot goes at least a
    third of the way that its target went, and not twice as far."""
    sim = bench.sim
    bench.require_actuators(sim)
    model = sim.model
    if model.floating_base:
        not_applicable("a floating base: where the joints go depends on the floor")
    columns, _ = joint_columns(sim)
    pairs = [
        (i, model.joint_names.index(name))
        for i, name in enumerate(model.actuator_names)
        if name in model.joint_names and model.kp[i] > 0
    ]
    if not pairs:
        not_applicable("no position actuator is called like its joint")
    actuators, joints = (np.array(column) for column in zip(*pairs, strict=True))
    steps = _steps_of(sim, 1.0)
    ctrl = np.tile(model.default_ctrl, (NUM_ENVS, 1)).astype(np.float32)
    for _ in range(steps):  # first come to rest: gravity pulls every joint a little off its target
        sim.step(ctrl)
    rest = copy(sim.state)["qpos"][:, columns][:, joints]
    low, high = model.ctrl_range.T
    moved = np.where(model.default_ctrl + 0.1 <= high, 0.1, -0.1)
    ctrl[:] = np.clip(model.default_ctrl + moved, low, high)
    for _ in range(steps):
        sim.step(ctrl)
    went = (copy(sim.state)["qpos"][:, columns][:, joints] - rest) / (
        ctrl - model.default_ctrl.astype(np.float32)
    )[:, actuators]
    worst = int(np.abs(went - 1.0).max(axis=0).argmax())
    if not (went > 0.33).all() or not (went < 2.0).all():
        name = model.joint_names[joints[worst]]
        broken(f"joint {name} went {went[0, worst]:.2f} of its target's way within a second")


def _mass_kg(bench: Bench) -> float:
    """Of the robot, as MuJoCo compiles the scene."""
    if bench.target.mass_kg is not None:
        return bench.target.mass_kg
    if not bench.target.scene:
        not_applicable("there is no scene to take the robot's mass from")
    try:
        mujoco: Any = importlib.import_module("mujoco")  # heavy, and not everywhere
    except ImportError:
        not_applicable("this Python has no mujoco to take the robot's mass from the scene with")
    model = mujoco.MjModel.from_xml_path(find_scene(bench.target.scene))
    return float(model.body_mass.sum())


@check(SIMULATOR)
def contact_carries_weight(bench: Bench) -> None:
    """The contact forces on a floating robot at rest on the floor add up to its weight, upwards (to 10 %);
    high above the floor they are zero."""
    sim = bench.sim
    bench.require_floating(sim)
    bench.require("contact_force")
    weight = _mass_kg(bench) * 9.81
    everywhere(sim, *lifted(sim))
    flying = np.abs(copy(sim.step())["contact_force"]).max()
    if not flying <= 0.01 * weight:
        broken(f"{flying:.3g} N act on a body {LIFT_M} m above the floor")
    sim = bench.sim
    for _ in range(_steps_of(sim, 2.0)):
        sim.step()
    window = [copy(sim.step()) for _ in range(_steps_of(sim, 0.2))]
    if max(np.abs(state["qvel"][:, :6]).max() for state in window) > 0.1:
        not_applicable("with the keyframe's targets the robot did not come to rest within 2 s")
    force = np.mean([state["contact_force"].sum(axis=1) for state in window], axis=0)
    off = np.abs(force - (0.0, 0.0, weight)).max()
    if not off <= 0.1 * weight:
        broken(f"forces add up to {force[0].round(1)} N, the weight is {weight:.1f} N")
