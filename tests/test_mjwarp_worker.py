"""`mjwarp` on the CPU, through the public API, beside MuJoCo in the host's own Python.

The graphs that are replayed here are those of the GPU, recorded for the CPU. Opening takes seconds, so tests
that change nothing for good share a backend; each leaves it at the keyframe.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mujoco  # type: ignore[import-untyped]
import numpy as np
import pytest

import mjcf_scenes
from outboard.backends import (
    MJWarpBackend,
    MJWarpCfg,
    MuJoCoBackend,
    SceneError,
    UsageError,
    WorkerFailed,
    WorkerLaunchError,
)
from outboard.backends.conformance import FAILED, HELD, make_target, run_kit
from outboard.ipc.layout import PUBLISHABLE

mj: Any = mujoco  # its stubs do not list its names
# The first opening of a fresh clone compiles for half a minute on a free machine.
pytestmark = pytest.mark.timeout(300)

NUM_ENVS, DECIMATION = 6, 2


def open_mjwarp(python: str, **arguments: Any) -> MJWarpBackend:
    parts: dict[str, Any] = dict(
        device="cpu",
        scene="humanoid29",
        num_envs=NUM_ENVS,
        decimation=DECIMATION,
        worker_python=python,
    )
    return MJWarpBackend(**{**parts, **arguments})


@pytest.fixture(scope="module")
def humanoid(mjwarp_python: str) -> Iterator[MJWarpBackend]:
    with open_mjwarp(mjwarp_python, publish=PUBLISHABLE, check_finite=False) as sim:
        yield sim


@pytest.fixture
def sim(humanoid: MJWarpBackend) -> Iterator[MJWarpBackend]:
    humanoid.ctrl_view[:] = humanoid.model.default_ctrl
    humanoid.reset()
    yield humanoid
    humanoid.reset()


def fields(state: Any) -> dict[str, np.ndarray]:
    return {name: array.copy() for name, array in state.fields().items()}


def swing(sim: Any, t: int) -> np.ndarray:
    """No two joints or environments alike, and small enough to stay on the feet."""
    nu, n = sim.model.nu, sim.num_envs
    phase = 0.4 * np.arange(n)[:, None] + 0.7 * np.arange(nu)
    return (sim.model.default_ctrl + 0.05 * np.sin(0.1 * t + phase)).astype(np.float32)


def held(sim: Any) -> np.ndarray:
    """Every joint of every environment at the keyframe's target."""
    return np.tile(sim.model.default_ctrl, (sim.num_envs, 1)).astype(np.float32)


def walked(sim: Any, steps: int) -> dict[str, np.ndarray]:
    """What is published after so many steps of `swing`."""
    for t in range(steps - 1):
        sim.step(swing(sim, t))
    return fields(sim.step(swing(sim, steps - 1)))


# -- the state it publishes --------------------------------------------------------------------------


def test_every_field_is_mujocos_under_contact(sim: MJWarpBackend) -> None:
    with MuJoCoBackend(
        device="cpu",
        scene="humanoid29",
        num_envs=NUM_ENVS,
        decimation=DECIMATION,
        publish=PUBLISHABLE,
    ) as reference:
        ours, theirs = walked(sim, 10), walked(reference, 10)
    # 20 substeps, in contact from the sixth; positions agree to 1e-6, forces of 300 N to a few thousandths.
    bounds = {"qpos": 5e-6, "body_pos": 5e-6, "body_quat": 5e-6, "qvel": 2e-4, "contact_force": 0.1}
    for name in PUBLISHABLE:
        assert np.abs(ours[name] - theirs[name]).max() < bounds.get(name, 2e-4), name
    assert np.abs(theirs["contact_force"]).max() > 50


def test_poses_belong_to_the_published_qpos(sim: MJWarpBackend) -> None:
    state = walked(sim, 5)
    model = mj.MjModel.from_xml_path(str(scene_path("humanoid29")))
    data = mj.MjData(model)
    for env in range(NUM_ENVS):
        data.qpos[:] = state["qpos"][env]
        mj.mj_kinematics(model, data)
        assert state["body_pos"][env] == pytest.approx(data.xpos[1:], abs=2e-6)
        assert state["body_quat"][env] == pytest.approx(data.xquat[1:], abs=2e-6)


def test_contact_forces_of_a_reset_environment_are_zero_and_the_others_stay(
    sim: MJWarpBackend,
) -> None:
    before = walked(sim, 12)
    after = sim.reset([2])
    assert np.abs(before["contact_force"][2]).max() > 10
    assert not after.contact_force[2].any()
    others = [0, 1, 3, 4, 5]
    for name, field in fields(after).items():
        assert np.array_equal(field[others], before[name][others]), name


def scene_path(name: str) -> Path:
    return Path(__file__).resolve().parent.parent / "backends" / "scenes" / f"{name}.xml"


# -- resets ------------------------------------------------------------------------------------------


def test_a_reset_environment_does_the_same_again(sim: MJWarpBackend) -> None:
    # Environments four and five are computed beside the four that the compiler takes at once.
    first = [fields(sim.step(swing(sim, t))) for t in range(4)]
    sim.reset([1, 4])
    again = [fields(sim.step(swing(sim, t))) for t in range(4)]
    for one, other in zip(first, again, strict=True):
        for name in PUBLISHABLE:
            assert np.array_equal(one[name][[1, 4]], other[name][[1, 4]]), name
    assert not np.array_equal(first[3]["qpos"][0], again[3]["qpos"][0])


def test_set_state_puts_rows_and_holds_them(sim: MJWarpBackend) -> None:
    qpos = np.tile(sim.model.default_qpos, (2, 1)).astype(np.float32)
    qpos[:, 2] += 2.0
    qpos[:, 7:] += 0.1
    qvel = np.zeros((2, sim.model.nv), np.float32)
    qvel[:, 0] = (0.5, -0.5)
    state = sim.set_state([5, 3], qpos, qvel)
    assert np.array_equal(state.qpos[[5, 3]], qpos) and np.array_equal(state.qvel[[5, 3]], qvel)
    assert np.allclose(state.body_pos[[5, 3], 0], qpos[:, :3])
    assert np.allclose(state.body_linvel[[5, 3], 0, 0], qvel[:, 0])


# -- what is not finite ------------------------------------------------------------------------------


def test_a_target_that_is_nan_flags_its_environment_and_is_taken_as_zero(
    sim: MJWarpBackend,
) -> None:
    ctrl = held(sim)
    ctrl[4, 0] = math.nan
    state = sim.step(ctrl)
    assert sim.flagged.tolist() == [4]
    assert np.isfinite(state.qpos).all()
    sim.step(np.zeros_like(ctrl))
    assert sim.flagged.tolist() == []


def test_a_flag_of_a_bad_target_is_gone_with_the_reset(sim: MJWarpBackend) -> None:
    ctrl = held(sim)
    ctrl[[1, 2], 3] = 3e38
    sim.step(ctrl)
    assert sim.flagged.tolist() == [1, 2]
    sim.reset([1])
    assert sim.flagged.tolist() == [2]


def test_a_state_that_becomes_nan_is_flagged_and_stays_in_its_environment(
    mjwarp_python: str, tmp_path: Path
) -> None:
    # Stiff enough to explode at once.
    wild = mjcf_scenes.leg(actuator='<position name="knee_servo" joint="knee" kp="1e12"/>')
    path = mjcf_scenes.write(tmp_path, wild)
    with open_mjwarp(mjwarp_python, scene=path, num_envs=3, decimation=1) as sim:
        ctrl = np.zeros((3, 1), np.float32)
        ctrl[1] = 3.0
        state, steps = sim.step(ctrl), 1
        while not len(sim.flagged) and steps < 50:
            state, steps = sim.step(ctrl), steps + 1
        assert sim.flagged.tolist() == [1]
        assert np.isfinite(state.qpos[[0, 2]]).all() and not np.isfinite(state.qpos[1]).all()
        sim.reset([1])
        assert sim.flagged.tolist() == []


# -- too little room ---------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [{"nconmax": 1}, {"njmax": 3}], ids=str)
def test_an_overflow_fails_in_that_step_and_names_the_limit_to_raise(
    limits: dict[str, int], mjwarp_python: str, tmp_path: Path
) -> None:
    """A box on one leg falls from a metre, has no contact at first, and more and more when it topples."""
    [(name, value)], cfg = limits.items(), dataclasses.replace(MJWarpCfg(), **limits)
    path = mjcf_scenes.write(tmp_path, mjcf_scenes.leg())
    with open_mjwarp(mjwarp_python, scene=path, num_envs=2, decimation=1,
                     cfg=cfg) as sim:  # fmt: skip
        steps = 0
        with pytest.raises(WorkerFailed) as caught:
            while steps < 2000:
                steps += 1
                sim.step(held(sim))
        words = str(caught.value)
        assert f"raise {name} above {value} in MJWarpCfg" in words
        assert f"in step {steps}, environment 0" in words and steps > 100


@pytest.mark.usefixtures("logs_may_stay")
def test_an_overflow_at_the_keyframe_is_said_when_it_is_opened(mjwarp_python: str) -> None:
    with pytest.raises(WorkerFailed, match="raise njmax above 10 in MJWarpCfg"):
        open_mjwarp(mjwarp_python, num_envs=2, cfg=MJWarpCfg(njmax=10))


def test_the_room_that_was_computed_or_given_is_said(sim: MJWarpBackend) -> None:
    notes = " ".join(sim.report["notes"])
    assert "nconmax, by rule" in notes and "njmax, by rule" in notes


# -- life --------------------------------------------------------------------------------------------


def test_restart_brings_a_new_worker_to_the_same_keyframe(mjwarp_python: str) -> None:
    with open_mjwarp(mjwarp_python, scene="arm7", num_envs=2) as sim:
        first, pid = fields(sim.reset()), sim.report["pid"]
        sim.step(held(sim) + np.float32(0.1))
        sim.restart()
        assert sim.report["pid"] != pid
        again = sim.reset()
        for name, field in fields(again).items():
            assert np.array_equal(field, first[name])


def test_nothing_is_printed_but_one_line_where_there_is_no_driver(sim: MJWarpBackend) -> None:
    said = Path(sim.report["log_path"]).read_text()
    assert "Warp 1." not in said and "Module " not in said, said


def test_the_worker_sees_no_gpu_and_says_host_memory(sim: MJWarpBackend) -> None:
    report = sim.report["device_report"]
    assert report["kind"] == "cpu" and report["buffer"] == "qpos" and not report["visible"]


@pytest.mark.usefixtures("logs_may_stay")
def test_a_scene_beyond_mujoco_warp_is_the_scenes_fault(mjwarp_python: str, tmp_path: Path) -> None:
    path = mjcf_scenes.write(tmp_path, mjcf_scenes.leg(top='<option solver="PGS"/>'))
    with pytest.raises(SceneError, match=r"MuJoCo-Warp cannot simulate .*leg\.xml"):
        open_mjwarp(mjwarp_python, scene=path)


@pytest.mark.usefixtures("logs_may_stay")
def test_a_python_without_it_is_answered_with_the_set_up() -> None:
    with pytest.raises(WorkerLaunchError, match="outboard setup mjwarp"):
        open_mjwarp(sys.executable)


@pytest.mark.parametrize("arguments", [{"render": True}, {"scene": ""}, {"cfg": {"nconmax": 4}}])
def test_what_cannot_be_is_refused_before_a_worker_starts(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        open_mjwarp(sys.executable, **arguments)


@pytest.mark.parametrize("value", [-1, 1.5, True, "64"])
def test_a_limit_is_a_whole_number(value: Any) -> None:
    with pytest.raises(UsageError, match="nconmax="):
        MJWarpCfg(nconmax=value)


def test_kernels_are_kept_where_all_ranks_find_them(
    mjwarp_python: str, sim: MJWarpBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = os.environ["WARP_CACHE_PATH"]
    assert any(kept in note for note in sim.report["notes"])
    assert list(Path(kept).rglob("*.o"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("logs_may_stay")
@pytest.mark.parametrize("scene", ["humanoid29", "arm7"])
def test_the_conformance_kit_holds(scene: str, mjwarp_python: str) -> None:
    target = make_target(
        backend="mjwarp", simulator="", device="cpu", scene=scene, worker_python=mjwarp_python
    )
    outcomes = run_kit(target)
    assert not [outcome for outcome in outcomes if outcome.verdict == FAILED]
    assert sum(outcome.verdict == HELD for outcome in outcomes) > 45


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_ranks_compile_into_one_empty_cache_at_once(
    mjwarp_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as eight GPUs would start. All of them must step, and the next one must find every kernel."""
    kept = tmp_path / "kernels"
    monkeypatch.setenv("WARP_CACHE_PATH", str(kept))

    def rank(number: int) -> np.ndarray:
        with open_mjwarp(mjwarp_python, scene="arm7", num_envs=4, rank=number) as sim:
            return sim.step(held(sim) + np.float32(0.1)).qpos.copy()

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(rank, range(8)))
    assert all(np.array_equal(qpos, found[0]) for qpos in found)
    binaries = {path: path.stat().st_mtime_ns for path in kept.rglob("*.o")}
    assert len(binaries) > 30
    half_built = [path for path in kept.rglob("*") if re.search(r"_p\d+_t\d+$", path.name)]
    assert not half_built
    rank(8)
    assert {path: path.stat().st_mtime_ns for path in kept.rglob("*.o")} == binaries
