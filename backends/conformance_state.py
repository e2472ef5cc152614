"""Checks of what a simulator's state does: keyframe, reset, set_state, independence, banks, life.

Nothing here knows physics. Equal means bit for bit on the CPU, `GPU_ATOL` after steps on a GPU.
"""

from __future__ import annotations

import os
import time

import numpy as np
from numpy.typing import NDArray

from ..ipc.errors import UsageError
from ..ipc.layout import PUBLISHABLE
from .backend import Backend
from .conformance_kit import (
    NUM_ENVS,
    SEED,
    SIMULATOR,
    Bench,
    broken,
    check,
    copy,
    expect_error,
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
    base = run(bench.sim, STEPS)[-1]
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


# -- what is published ------------------------------------------------------------------------------


@check(SIMULATOR)
def fields_are_written(bench: Bench) -> None:
    """Every field that the simulator says it can publish is written, finite, and follows the motion."""
    sim = bench.sim
    state = sim.set_state(np.arange(NUM_ENVS), *other_states(sim, NUM_ENVS))
    first, last = copy(state), run(sim, STEPS)[-1]
    for name in bench.fields:
        if not np.isfinite(last[name]).all():
            broken(f"{name} is not finite")
        if not last[name].size or name == "contact_force":  # which may rightly be zero for ever
            continue
        if name == "body_quat" and not last[name].any(axis=-1).all():
            broken("body_quat is zero")
        slides = name in ("body_quat", "body_angvel")  # nothing turns in a model of slides alone
        if not slides and np.array_equal(first[name], last[name]):
            broken(f"{name} never changes")
    turned = "body_quat" in last and not np.array_equal(first["body_quat"], last["body_quat"])
    if turned and "body_angvel" in last and not last["body_angvel"].any():
        broken("bodies turn, and body_angvel is zero")


@check(SIMULATOR)
def every_field_alone(bench: Bench) -> None:
    """A field is the same whether it is published alone or with all others."""
    together = run(bench.sim, 2)[-1]
    # One field is enough to see whether the simulator relies on others: the last offered is the costliest.
    name = bench.fields[-1]
    with bench.open(publish=(name,)) as sim:
        wrong = bench.difference(run(sim, 2)[-1], {name: together[name]})
    if wrong:
        broken(f"alone, {wrong}")


@check(SIMULATOR)
def unknown_field_refused(bench: Bench) -> None:
    """A field that does not exist, or that the simulator does not offer, is a UsageError that lists those
    that can be published."""
    with expect_error(UsageError, " ".join(PUBLISHABLE)):
        bench.open(publish=("qpos", "no_such_field")).close()
    lacking = [name for name in PUBLISHABLE if name not in bench.fields]
    if lacking:
        with expect_error(UsageError, " ".join((lacking[0], *bench.fields))):
            bench.open(publish=("qpos", lacking[0])).close()


@check(SIMULATOR)
def one_environment(bench: Bench) -> None:
    """num_envs=1 keeps the leading axis, and moves as environment 0 of many does."""
    many = run(bench.sim, STEPS)[-1]
    with bench.open(num_envs=1) as sim:
        one = run(sim, STEPS)[-1]
    for name, field in one.items():
        if field.shape != (1, *many[name].shape[1:]):
            broken(f"{name} has shape {field.shape}")
    first = {name: field[:1] for name, field in many.items()}
    wrong = bench.difference(one, first)
    if wrong:
        broken(wrong)


@check(SIMULATOR)
def two_banks(bench: Bench) -> None:
    """With banks=2 a result outlives the next command, and the values are those of banks=1."""
    one = run(bench.sim, 3)
    with bench.open(banks=2) as sim:
        kept = sim.step(swing(sim.model, NUM_ENVS, 0))
        first = copy(kept)
        second = copy(sim.step(swing(sim.model, NUM_ENVS, 1)))
        if any(not np.array_equal(first[name], field) for name, field in copy(kept).items()):
            broken("the first result was overwritten by the second step")
        third = copy(sim.step(swing(sim.model, NUM_ENVS, 2)))
    for a, b in zip(one, (first, second, third), strict=True):
        wrong = bench.difference(a, b)
        if wrong:
            broken(f"with two banks {wrong}")


@check(SIMULATOR)
def nonfinite_is_flagged(bench: Bench) -> None:
    """When an environment's state becomes NaN or infinite, the command that did it flags that environment
    and no other; a reset makes it whole and takes the flag away."""
    bench.require_actuators(bench.sim)
    with bench.open(check_finite=False) as sim:
        for poison in (np.nan, np.inf, 3e38):
            _poison(bench, sim, poison)
            if len(sim.flagged):
                break
            sim.reset()
        else:
            not_applicable("no target, however wild, made this simulator's state invalid")
        sim.ctrl_view[:] = sim.model.default_ctrl
        wrong = off_keyframe(sim.reset([1]), sim.model, [1])
        if wrong:
            broken(f"after the reset {wrong}")
        sim.step()
        if len(sim.flagged):
            broken(f"after the reset environments {sim.flagged.tolist()} are flagged")


def _poison(bench: Bench, sim: Backend, value: float) -> None:
    """Steps with `value` as the target in environment 1, until it is flagged; Broken when flags lie."""
    sim.ctrl_view[:] = sim.model.default_ctrl
    sim.ctrl_view[1] = value
    for t in range(STEPS):
        state = sim.step()
        finite = np.isfinite(state.qpos).all(axis=1) & np.isfinite(state.qvel).all(axis=1)
        bad, flagged = np.flatnonzero(~finite).tolist(), sim.flagged.tolist()
        if not set(bad) <= set(flagged):
            broken(f"in step {t} environments {bad} are not finite, flagged are {flagged}")
        if not set(flagged) <= {1}:
            broken(f"environments {flagged} are flagged; the targets were wild in 1 only")
        if flagged:
            return


# -- life -------------------------------------------------------------------------------------------


@check(SIMULATOR)
def where_repeats_verdict(bench: Bench) -> None:
    """where() measures again, and the place is the one that was verified at the start."""
    sim = bench.sim
    before = sim.device
    run(sim, 2)
    after = sim.where()
    if after != before:
        broken(f"first {before}, later {after}")
    run(sim, 1)  # mail leaves the bell in order


@check(SIMULATOR)
def timings_are_positive(bench: Bench) -> None:
    """Every command adds to the time in the simulator and to the protocol's own."""
    sim = bench.sim
    before = sim.timings
    run(sim, STEPS)
    after = sim.timings
    if after.steps != before.steps + STEPS or not after.sim_s > before.sim_s:
        broken(f"{after.steps - before.steps} commands and {after.sim_s - before.sim_s} s were noted")
    if not after.overhead_s > before.overhead_s:
        broken("the time in the simulator is longer than the wait for it")


@check(SIMULATOR)
def pictures_have_the_size_asked(bench: Bench) -> None:
    """A simulator that offers "render" gives uint8 pictures of exactly the size asked for, and the state
    stays as it was."""
    sim = bench.sim
    if "render" not in sim.capabilities:
        not_applicable("the simulator offers no pictures when opened without render=True")
    before = run(sim, 2)[-1]
    picture = sim.render(1, width=48, height=32)
    if picture.shape != (32, 48, 3) or picture.dtype != np.uint8:
        broken(f"the picture is {picture.dtype} {picture.shape}")
    wrong = bench.difference(before, bench.look(sim))
    if wrong:
        broken(f"after the picture {wrong}")


@check(SIMULATOR)
def close_leaves_nothing(bench: Bench) -> None:
    """close() leaves no process of the worker's group and no descriptor in the host."""
    bench.fields  # noqa: B018 - whatever is opened once per process is open after this
    before = len(os.listdir("/proc/self/fd"))
    sim = bench.open()
    pid = int(sim.report["pid"])
    run(sim, 1)
    sim.close()
    group = _group_members(pid)
    if group:
        broken(f"processes of the worker's group are left: {group}")
    left = len(os.listdir("/proc/self/fd")) - before
    if left > 0:
        broken(f"{left} descriptors are left")
    sim.close()  # idempotent


def _group_members(pid: int) -> list[int]:
    """Processes of the group that was led by `pid`; one that is on its way out gets half a second."""
    deadline = time.monotonic() + 0.5
    while True:
        found: list[int] = []
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    if os.getpgid(int(name)) == pid:
                        found.append(int(name))
                except ProcessLookupError:
                    pass
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.02)
