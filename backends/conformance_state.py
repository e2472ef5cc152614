"""Checks of what a simulator's state does: keyframe, reset, set_state, independence, banks, life.

Nothing here knows physics. Equal means bit for bit on the CPU, `GPU_ATOL` after steps on a GPU.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .backend import Backend
from .conformance_kit import (
    NUM_ENVS,
    SEED,
    SIMULATOR,
    Bench,
    broken,
    check,
    copy,
    not_applicable,
    off_keyframe,
    run,
    swing,
)

TOUCHED, OTHERS = [1, 3], [0, 2]
STEPS = 8


def other_states(sim: Backend, count: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(count, nq), (count, nv): `count` states near the keyframe, no two alike, root quaternions kept."""
    model = sim.model
    which = np.arange(count, dtype=np.float64)[:, None]
    qpos = np.tile(model.default_qpos, (count, 1))
    first_joint = 7 if model.floating_base else 0
    if model.floating_base:
        qpos[:, :3] += 0.1 * (which + 1) * (1.0, -0.5, 3.0)
    if model.nq - first_joint == len(model.joint_names):  # hinges and slides: coordinates add up
        low, high = model.joint_range.T if len(model.joint_range) else np.zeros((2, 0))
        joints = qpos[:, first_joint:]
        moved = joints + 0.02 * (which + 1) * np.cos(np.arange(joints.shape[1]))
        joints[:] = np.clip(moved, np.maximum(low, -1e3), np.minimum(high, 1e3))
    qvel = np.tile(model.default_qvel, (count, 1))
    qvel += 0.05 * (which + 1) * np.sin(1.0 + np.arange(model.nv))
    return qpos.astype(np.float32), qvel.astype(np.float32)


# -- the keyframe -----------------------------------------------------------------------------------


@check(SIMULATOR)
def starts_at_keyframe(bench: Bench) -> None:
    """After opening, before any command, qpos and qvel are the keyframe bit for bit in every environment."""
    with bench.open() as sim:
        wrong = off_keyframe(sim.state, sim.model)
    if wrong:
        broken(wrong)


@check(SIMULATOR)
def reset_restores_keyframe(bench: Bench) -> None:
    """reset() of all environments publishes the keyframe bit for bit, at once."""
    sim = bench.sim
    run(sim, STEPS)
    wrong = off_keyframe(sim.reset(), sim.model)
    if wrong:
        broken(wrong)


@check(SIMULATOR)
def restart_restores_all(bench: Bench) -> None:
    """restart() gives a new process at the keyframe, which then repeats the trajectory of the first."""
    with bench.open() as sim:
        pid, first = sim.report["pid"], run(sim, STEPS)
        wrong = off_keyframe(sim.restart(), sim.model)
        if wrong:
            broken(wrong)
        if sim.report["pid"] == pid:
            broken(f"pid {pid} is still the worker")
        wrong = bench.difference(first[-1], run(sim, STEPS)[-1])
    if wrong:
        broken(f"after the restart {wrong}")


@check(SIMULATOR)
def seeds_keep_keyframe(bench: Bench) -> None:
    """Any seed is accepted, and none of them changes the keyframe."""
    for seed in (0, SEED + 1, (1 << 62) + 3):
        with bench.open(seed=seed, num_envs=2) as sim:
            wrong = off_keyframe(sim.state, sim.model)
        if wrong:
            broken(f"with seed {seed} {wrong}")


@check(SIMULATOR)
def origins_are_subtracted(bench: Bench) -> None:
    """env_origins is (num_envs, 3) and finite, and positions are relative to it: at the keyframe every
    environment publishes the same (to 1e-4 m)."""
    sim = bench.sim
    origins = sim.model.env_origins
    if origins.shape != (NUM_ENVS, 3) or not np.isfinite(origins).all():
        broken(f"env_origins has shape {origins.shape}, or holds NaN")
    for name, field in copy(sim.state).items():
        # Contact forces are not computed at a reset; velocities say nothing of places.
        if name in ("qpos", "body_pos") and np.abs(field - field[0]).max(initial=0) > 1e-4:
            broken(f"{name} at the keyframe differs between environments")


# -- the same again ---------------------------------------------------------------------------------


@check(SIMULATOR)
def same_trajectory(bench: Bench) -> None:
    """The same targets from the same state give the same trajectory, in all published fields."""
    first = run(bench.sim, STEPS)
    again = run(bench.sim, STEPS)
    for t, (a, b) in enumerate(zip(first, again, strict=True)):
        wrong = bench.difference(a, b)
        if wrong:
            broken(f"in step {t} {wrong}")


@check(SIMULATOR)
def equal_environments(bench: Bench) -> None:
    """Environments with equal state and equal targets stay equal (where they have different origins: to
    rounding)."""
    sim = bench.sim
    loose = bool(sim.model.env_origins.any())
    for t, state in enumerate(run(sim, STEPS, per_env=False)):
        for env in range(1, NUM_ENVS):
            rows = {name: field[[0]] for name, field in state.items()}
            others = {name: field[[env]] for name, field in state.items()}
            wrong = bench.difference(rows, others, loose=loose)
            if wrong:
                broken(f"in step {t} environments 0 and {env}: {wrong}")


@check(SIMULATOR)
def targets_are_independent(bench: Bench) -> None:
    """Another target in one environment moves that one, and no other one."""
    bench.require_actuators(bench.sim)
    base = state = run(bench.sim, STEPS)[-1]
    sim = bench.sim
    for t in range(STEPS):
        ctrl = swing(sim.model, NUM_ENVS, t)
        ctrl[TOUCHED] -= 0.05
        low, high = sim.model.ctrl_range.T
        state = copy(sim.step(np.clip(ctrl, low, high).astype(np.float32)))
    wrong = bench.difference(base, state, OTHERS)
    if wrong:
        broken(f"in environments whose targets did not change {wrong}")
    for env in TOUCHED:
        if np.array_equal(base["qpos"][env], state["qpos"][env]):
            broken(f"the targets of environment {env} have no effect")


@check(SIMULATOR)
def states_are_independent(bench: Bench) -> None:
    """Another state in one environment does not change the trajectories of the others."""
    base = run(bench.sim, STEPS)[-1]
    sim = bench.sim
    sim.set_state(TOUCHED, *other_states(sim, len(TOUCHED)))
    wrong = bench.difference(base, run(sim, STEPS)[-1], OTHERS)
    if wrong:
        broken(f"in environments that were not set {wrong}")


# -- reset and set_state of some --------------------------------------------------------------------


@check(SIMULATOR)
def reset_is_visible(bench: Bench) -> None:
    """reset(ids) and reset(mask) publish the keyframe of the environments they name, at once."""
    for envs in (TOUCHED, np.isin(np.arange(NUM_ENVS), TOUCHED)):
        sim = bench.sim
        run(sim, STEPS)
        wrong = off_keyframe(sim.reset(envs), sim.model, TOUCHED)
        if wrong:
            broken(wrong)


@check(SIMULATOR)
def reset_leaves_others(bench: Bench) -> None:
    """reset(ids) leaves every published field of the other environments as it was, bit for bit."""
    sim = bench.sim
    before = run(sim, STEPS)[-1]
    after = copy(sim.reset(TOUCHED))
    for name in before:
        if not np.array_equal(before[name][OTHERS], after[name][OTHERS]):
            broken(f"{name} of other environments changed")


@check(SIMULATOR)
def reset_of_nobody(bench: Bench) -> None:
    """reset() with an empty list, or a mask without a True, is allowed and changes nothing."""
    sim = bench.sim
    before = run(sim, STEPS)[-1]
    for nobody in ([], np.zeros(NUM_ENVS, bool)):
        after = copy(sim.reset(nobody))
        for name in before:
            if not np.array_equal(before[name], after[name]):
                broken(f"{name} changed")


@check(SIMULATOR)
def step_with_reset(bench: Bench) -> None:
    """step(ctrl, reset=mask) is reset(mask) and then step(ctrl)."""
    results = []
    for together in (False, True):
        sim = bench.sim
        run(sim, STEPS)
        ctrl = swing(sim.model, NUM_ENVS, STEPS)
        if not together:
            sim.reset(TOUCHED)
        results.append(copy(sim.step(ctrl, reset=TOUCHED if together else None)))
    wrong = bench.difference(results[0], results[1])
    if wrong:
        broken(wrong)


@check(SIMULATOR)
def set_state_is_visible(bench: Bench) -> None:
    """set_state() publishes the new qpos and qvel at once (to 1e-6: an engine may normalise)."""
    sim = bench.sim
    run(sim, STEPS)
    qpos, qvel = other_states(sim, NUM_ENVS)
    state = sim.set_state(np.arange(NUM_ENVS), qpos, qvel)
    for name, want in (("qpos", qpos), ("qvel", qvel)):
        off = np.abs(getattr(state, name) - want).max(initial=0)
        if not off <= 1e-6:
            broken(f"{name} as published by set_state is off by {off:.3g}")


@check(SIMULATOR)
def set_state_moves_bodies(bench: Bench) -> None:
    """Body poses published by set_state() belong to the new qpos: they are those that a second look gives,
    and they are not the old ones."""
    names = [name for name in ("body_pos", "body_quat") if name in bench.fields]
    if not names:
        not_applicable("the simulator publishes no body poses")
    sim = bench.sim
    before = copy(sim.state)
    after = copy(sim.set_state(np.arange(NUM_ENVS), *other_states(sim, NUM_ENVS)))
    again = bench.look(sim)
    for name in names:
        if not np.allclose(after[name], again[name], rtol=0, atol=1e-6):
            broken(f"{name} as published by set_state is stale: the next command publishes another")
    if all(np.array_equal(before[name], again[name]) for name in names):
        broken("the poses do not depend on qpos")


@check(SIMULATOR)
def set_state_in_order(bench: Bench) -> None:
    """Row i of set_state() lands in environment ids[i], whatever the order of the ids."""
    sim = bench.sim
    ids = [3, 0, 2]
    qpos, qvel = other_states(sim, len(ids))
    sim.set_state(ids, qpos, qvel)
    seen = bench.look(sim)
    if not np.allclose(seen["qpos"][ids], qpos, rtol=0, atol=1e-6):
        broken("qpos landed in other rows")
    if not np.allclose(seen["qvel"][ids], qvel, rtol=0, atol=1e-6):
        broken("qvel landed in other rows")


@check(SIMULATOR)
def set_state_leaves_others(bench: Bench) -> None:
    """set_state(ids) leaves every published field of the other environments as it was, bit for bit."""
    sim = bench.sim
    before = run(sim, STEPS)[-1]
    sim.set_state(TOUCHED, *other_states(sim, len(TOUCHED)))
    after = bench.look(sim)
    for name in before:
        if not np.array_equal(before[name][OTHERS], after[name][OTHERS]):
            broken(f"{name} of other environments changed")
