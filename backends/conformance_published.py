"""Checks of what a simulator publishes, what it flags, and how it lives and ends."""

from __future__ import annotations

import gc
import os
import time

import numpy as np

from ..ipc.errors import UsageError
from ..ipc.layout import PUBLISHABLE
from .backend import Backend
from .conformance_kit import (
    NUM_ENVS,
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
from .conformance_state import STEPS, other_states

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
    """num_envs=1 keeps the leading axis, and moves as environment 0 of many does (to rounding: a compiler may
    take environments four at a time, and the last ones singly)."""
    many = run(bench.sim, STEPS)[-1]
    with bench.open(num_envs=1) as sim:
        one = run(sim, STEPS)[-1]
    for name, field in one.items():
        if field.shape != (1, *many[name].shape[1:]):
            broken(f"{name} has shape {field.shape}")
    first = {name: field[:1] for name, field in many.items()}
    wrong = bench.difference(one, first, loose=True)
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
    if after.commands != before.commands + STEPS or not after.sim_s > before.sim_s:
        broken(
            f"{after.commands - before.commands} of {STEPS} commands were noted, and "
            f"{after.sim_s - before.sim_s} s in the simulator"
        )
    if not after.wall_s - before.wall_s > after.sim_s - before.sim_s:
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
    """close() leaves no process of the worker's group, and once the last view is gone no descriptor in the
    host."""
    bench.fields  # noqa: B018 - whatever is opened once per process is open after this
    before = len(os.listdir("/proc/self/fd"))
    sim = bench.open()
    pid = int(sim.report["pid"])
    run(sim, 1)
    sim.close()
    sim.close()  # idempotent
    group = _group_members(pid)
    if group:
        broken(f"processes of the worker's group are left: {group}")
    del sim
    gc.collect()
    left = len(os.listdir("/proc/self/fd")) - before
    if left > 0:
        broken(f"{left} descriptors are left")


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
