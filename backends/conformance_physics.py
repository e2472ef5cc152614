"""Checks of what a simulator's numbers mean: quaternions, frames, velocities, time, targets, forces.

Quaternions are wxyz. The floating-base checks lift the robot off the floor first, so that nothing but
gravity and its own joints acts on it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .backend import Backend
from .conformance_kit import (
    NUM_ENVS,
    SIMULATOR,
    Bench,
    Fields,
    broken,
    check,
    copy,
    not_applicable,
    run,
    swing,
)

Array = NDArray[np.floating[Any]]

LIFT_M = 3.0
YAW = 0.9  # rad; no symmetry of anything
SPIN = 2.0  # rad/s
# How well a velocity must agree with a difference quotient over one step: this part of the largest
# velocity, plus this much.
PART, PLUS = 0.05, 0.01
EVERYONE = np.arange(NUM_ENVS)


# -- quaternions, wxyz ------------------------------------------------------------------------------


def multiply(a: Array, b: Array) -> Array:
    w, x, y, z = np.moveaxis(a, -1, 0)
    p, q, r, s = np.moveaxis(b, -1, 0)
    parts = (
        w * p - x * q - y * r - z * s,
        w * q + x * p + y * s - z * r,
        w * r - x * s + y * p + z * q,
        w * s + x * r - y * q + z * p,
    )
    return np.stack(parts, axis=-1)


def conjugate(a: Array) -> Array:
    return a * (1.0, -1.0, -1.0, -1.0)


def rotate(a: Array, vectors: Array) -> Array:
    """`vectors` (..., 3) turned by `a` (..., 4)."""
    padded = np.concatenate([np.zeros((*vectors.shape[:-1], 1)), vectors], axis=-1)
    return multiply(multiply(a, padded), conjugate(a))[..., 1:]


def rotation_vector(a: Array) -> Array:
    """Axis times angle (..., 3), angle at most pi."""
    a = np.where(a[..., :1] < 0, -a, a)
    length = np.linalg.norm(a[..., 1:], axis=-1, keepdims=True)
    angle = 2.0 * np.arctan2(length, a[..., :1])
    return a[..., 1:] * np.divide(
        angle, length, out=np.full_like(length, 2.0), where=length > 1e-12
    )


def about(axis: int, angle: float) -> Array:
    turn = np.zeros(4)
    turn[0], turn[1 + axis] = np.cos(angle / 2), np.sin(angle / 2)
    return turn


def same_rotation(a: Array, b: Array, atol: float) -> bool:
    """Equal up to the sign, which means nothing, and up to the length, which has a check of its own."""
    a = a / np.linalg.norm(a, axis=-1, keepdims=True)
    b = b / np.linalg.norm(b, axis=-1, keepdims=True)
    return bool(np.allclose(np.abs((a * b).sum(axis=-1)), 1.0, rtol=0, atol=atol))


# -- states that checks start from ------------------------------------------------------------------


def lifted(sim: Backend, turn: Array | None = None) -> tuple[NDArray[np.float32], Array]:
    """The keyframe's qpos, lifted and turned in place about its own origin (floating base only), and
    zero velocity; (nq,), (nv,)."""
    model = sim.model
    qpos = model.default_qpos.astype(np.float64)
    if model.floating_base:
        qpos[2] += LIFT_M
        if turn is not None:
            qpos[3:7] = multiply(turn, qpos[3:7])
    return qpos.astype(np.float32), np.zeros(model.nv)


def everywhere(sim: Backend, qpos: Array, qvel: Array) -> Fields:
    """Put every environment there, with targets at the keyframe's joints; the published state."""
    sim.ctrl_view[:] = sim.model.default_ctrl
    rows = (NUM_ENVS, 1)
    return copy(sim.set_state(EVERYONE, np.tile(qpos, rows), np.tile(qvel, rows)))


def moving(sim: Backend) -> Fields:
    """Every environment in motion: turned, spinning and drifting when it floats, all joints moving."""
    qpos, qvel = lifted(sim, about(2, YAW))
    qvel += 0.3 * np.cos(1.0 + 2.0 * np.arange(len(qvel)))
    if sim.model.floating_base:
        qvel[:6] = (0.4, -0.3, 0.2, 1.0, -0.6, 0.8)
    return everywhere(sim, qpos, qvel)


def off_interval(quotient: Array, before: Array, after: Array) -> str:
    """An engine may advance with the old or the new velocity, or between: how far is the quotient
    outside? "" when it is within PART and PLUS."""
    low, high = np.minimum(before, after), np.maximum(before, after)
    off = np.maximum(low - quotient, quotient - high).max(initial=0.0)
    size = max(np.abs(low).max(initial=0.0), np.abs(high).max(initial=0.0))
    return (
        "" if off <= PART * size + PLUS else f"off by {off:.3g}, where velocities reach {size:.3g}"
    )


def joint_columns(sim: Backend) -> tuple[slice, slice]:
    """Where the joints stand in qpos and in qvel; NotApplicable when they are not one number each."""
    model = sim.model
    first_q, first_v = (7, 6) if model.floating_base else (0, 0)
    count = len(model.joint_names)
    if model.nq - first_q != count or model.nv - first_v != count:
        not_applicable("the model has joints of more than one coordinate")
    return slice(first_q, None), slice(first_v, None)


# -- poses ------------------------------------------------------------------------------------------


@check(SIMULATOR)
def quaternions_are_unit(bench: Bench) -> None:
    """Root and body quaternions have length 1 (to 1e-4), at the keyframe and in motion."""
    sim = bench.sim
    floating = sim.model.floating_base
    if not floating and "body_quat" not in bench.fields:
        not_applicable("a fixed base, and no body quaternions are published")
    moving(sim)
    for state in (copy(sim.reset()), *run(sim, 5)):
        for name, quats in (("qpos", state["qpos"][:, 3:7]), ("body_quat", state.get("body_quat"))):
            if quats is None or (name == "qpos" and not floating):
                continue
            off = np.abs(np.linalg.norm(quats.astype(np.float64), axis=-1) - 1.0).max(initial=0)
            if not off <= 1e-4:
                broken(f"the length of a quaternion in {name} is off by {off:.3g}")


@check(SIMULATOR)
def root_body_is_root(bench: Bench) -> None:
    """The first body of a floating robot is its root: body_pos is qpos[:3] (to 1e-5 m), and body_quat is
    qpos[3:7] in the same order, wxyz (up to the sign)."""
    sim = bench.sim
    bench.require_floating(sim)
    if "body_pos" not in bench.fields and "body_quat" not in bench.fields:
        not_applicable("the simulator publishes no body poses")
    qpos, qvel = lifted(sim, multiply(about(2, YAW), about(0, 0.4)))
    everywhere(sim, qpos, qvel)
    seen = bench.look(sim)
    if "body_pos" in seen:
        off = np.abs(seen["body_pos"][:, 0] - qpos[:3]).max()
        if not off <= 1e-5:
            broken(f"body_pos of the root is {off:.3g} m from qpos[:3]")
    if "body_quat" in seen:
        have, want = seen["body_quat"][:, 0].astype(np.float64), qpos[3:7].astype(np.float64)
        if not same_rotation(have, want, 1e-5):
            broken(f"body_quat of the root is {have[0].round(4)}, qpos has {want.round(4)} (wxyz)")


@check(SIMULATOR)
def root_quaternion_is_wxyz(bench: Bench) -> None:
    """Turning the root by a yaw, written wxyz, turns all bodies about the vertical through the root."""
    sim = bench.sim
    bench.require_floating(sim)
    bench.require("body_pos")
    poses: list[Array] = []
    for turn in (about(2, 0.0), about(2, YAW)):
        everywhere(sim, *lifted(sim, turn))
        seen = bench.look(sim)["body_pos"].astype(np.float64)
        poses.append(seen - seen[:, :1])
    arms = np.linalg.norm(poses[0][..., :2], axis=-1).max()
    if arms < 1e-3:
        not_applicable("no body lies beside the root's axis")
    off = np.abs(rotate(about(2, YAW), poses[0]) - poses[1]).max()
    if not off <= 1e-4 + 1e-4 * arms:
        broken(f"bodies are {off:.3g} m from where a yaw of {YAW} rad puts them")


# -- velocities -------------------------------------------------------------------------------------


@check(SIMULATOR)
def root_velocity_is_world(bench: Bench) -> None:
    """The root's linear velocity is along world axes and in m/s: over one step a turned robot moves by
    qvel[:3] times the time step."""
    sim = bench.sim
    bench.require_floating(sim)
    qpos, qvel = lifted(sim, about(2, YAW))
    qvel[:3] = (1.5, 0.5, 0.0)
    before = everywhere(sim, qpos, qvel)
    after = copy(sim.step())
    moved = (after["qpos"] - before["qpos"])[:, :2].astype(np.float64)
    wrong = off_interval(
        moved / sim.model.timestep, np.tile(qvel[:2], (NUM_ENVS, 1)), moved * 0 + qvel[:2]
    )
    if wrong:
        broken(
            f"displacement per time {(moved[0] / sim.model.timestep).round(3)}, qvel {qvel[:2]}: {wrong}"
        )


@check(SIMULATOR)
def root_spin_is_body(bench: Bench) -> None:
    """The root's angular velocity is along the root's own axes: over one step a robot on its side turns
    about its own x axis by qvel[3] times the time step."""
    sim = bench.sim
    bench.require_floating(sim)
    qpos, qvel = lifted(sim, multiply(about(2, YAW), about(1, 1.2)))
    qvel[3] = SPIN
    before = everywhere(sim, qpos, qvel)["qpos"][:, 3:7].astype(np.float64)
    after = copy(sim.step())["qpos"][:, 3:7].astype(np.float64)
    spin = rotation_vector(multiply(conjugate(before), after)) / sim.model.timestep
    # The joints react to the spin within the step: a wider margin, which still tells frames apart.
    off = np.abs(spin - (SPIN, 0.0, 0.0)).max()
    if not off <= 0.15 * SPIN:
        broken(
            f"it turned by {spin[0].round(3)} rad/s about its own axes, qvel[3:6] is ({SPIN}, 0, 0)"
        )


@check(SIMULATOR)
def velocity_is_rate(bench: Bench) -> None:
    """qvel of a joint is what its qpos changes by, per `model.timestep` seconds."""
    sim = bench.sim
    columns, rates = joint_columns(sim)
    if not len(sim.model.joint_names):
        not_applicable("the model has no joints")
    moving(sim)
    a = copy(sim.step(swing(sim.model, NUM_ENVS, 0)))
    b = copy(sim.step(swing(sim.model, NUM_ENVS, 1)))
    quotient = (b["qpos"] - a["qpos"])[:, columns].astype(np.float64) / sim.model.timestep
    wrong = off_interval(quotient, a["qvel"][:, rates], b["qvel"][:, rates])
    if wrong:
        broken(f"difference quotients are {wrong} rad/s")


@check(SIMULATOR)
def body_linvel_is_rate(bench: Bench) -> None:
    """body_linvel is the rate of change of body_pos: world axes, at the body frame's origin."""
    sim = bench.sim
    bench.require("body_pos", "body_linvel")
    moving(sim)
    a, b = copy(sim.step()), copy(sim.step())
    quotient = (b["body_pos"] - a["body_pos"]).astype(np.float64) / sim.model.timestep
    wrong = off_interval(quotient, a["body_linvel"], b["body_linvel"])
    if wrong:
        broken(f"difference quotients are {wrong} m/s")


@check(SIMULATOR)
def body_angvel_is_rate(bench: Bench) -> None:
    """body_angvel is the rate of turning of body_quat, along world axes."""
    sim = bench.sim
    bench.require("body_quat", "body_angvel")
    moving(sim)
    a, b = copy(sim.step()), copy(sim.step())
    before, after = a["body_quat"].astype(np.float64), b["body_quat"].astype(np.float64)
    quotient = rotation_vector(multiply(after, conjugate(before))) / sim.model.timestep
    wrong = off_interval(quotient, a["body_angvel"], b["body_angvel"])
    if wrong:
        broken(f"difference quotients are {wrong} rad/s")


# -- time -------------------------------------------------------------------------------------------


@check(SIMULATOR)
def decimation_is_steps(bench: Bench) -> None:
    """One step with decimation=2 is two steps with the same targets."""
    sim = bench.sim
    ctrl = [swing(sim.model, NUM_ENVS, t) for t in range(4)]
    single: Fields = {}
    double: Fields = {}
    for target in ctrl:
        sim.step(target)
        single = copy(sim.step(target))
    with bench.open(decimation=2) as other:
        if other.model.timestep != sim.model.timestep:
            broken(f"the time step became {other.model.timestep} s with the decimation")
        for target in ctrl:
            double = copy(other.step(target))
    # Forces are of the last step alone, and engines may compute them once per command.
    single.pop("contact_force", None)
    double.pop("contact_force", None)
    wrong = bench.difference(single, double)
    if wrong:
        broken(wrong)


@check(SIMULATOR)
def time_step_takes_effect(bench: Bench) -> None:
    """dt is the time step: the model reports it, and in half the time a robot that moves goes between a
    fifth and 0.7 of the way (half at constant velocity, a quarter from rest)."""
    sim = bench.sim
    ways: list[float] = []
    dt = sim.model.timestep / 2
    ways.append(_way(sim))
    with bench.open(dt=dt) as other:
        if abs(other.model.timestep - dt) > 1e-6 * dt:
            broken(f"dt={dt} s was asked for, the model reports {other.model.timestep} s")
        ways.append(_way(other))
    if not ways[0] > 0:
        broken("nothing moves")
    if not 0.2 <= ways[1] / ways[0] <= 0.7:
        broken(f"in half the time it went {ways[1] / ways[0]:.3g} of the way")


def _way(sim: Backend) -> float:
    """The distance in qpos of one step from a moving state, with targets off the joints."""
    before = moving(sim)
    after = copy(sim.step(swing(sim.model, NUM_ENVS, 3, per_env=False)))
    return float(np.linalg.norm((after["qpos"] - before["qpos"]).astype(np.float64)))
