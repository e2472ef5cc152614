"""Our own scenes: they compile in the oldest and the newest MuJoCo, keep to the model contract, and stand."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import mujoco  # type: ignore[import-untyped]
import numpy as np
import pytest

from direct import Direct, sine_targets

mj: Any = mujoco  # its stubs do not list its names
SCENES = Path(__file__).resolve().parent.parent / "backends" / "scenes"
NAMES = ("humanoid29", "quadruped12", "arm7")
WALKERS = ("humanoid29", "quadruped12")
# name -> actuators, degrees of freedom, mass in kg and its tolerance, keyframe
WANTED = {
    "humanoid29": (29, 35, 35.0, 1.0, "stand"),
    "quadruped12": (12, 18, 12.0, 0.1, "stand"),
    "arm7": (7, 7, 14.0, 0.1, "home"),
}


def path(name: str) -> str:
    return str(SCENES / f"{name}.xml")


def model_of(name: str) -> Any:
    return mj.MjModel.from_xml_path(path(name))


def test_these_are_all_the_scenes_there_are() -> None:
    assert {file.stem for file in SCENES.glob("*.xml")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_sizes_mass_and_keyframe_are_as_promised(name: str) -> None:
    nu, nv, mass, tolerance, keyframe = WANTED[name]
    model = model_of(name)
    assert (model.nu, model.nv, model.nkey) == (nu, nv, 1)
    assert model.body_mass.sum() == pytest.approx(mass, abs=tolerance)
    assert model.key(0).name == keyframe


@pytest.mark.parametrize("name", NAMES)
def test_every_body_joint_and_actuator_has_a_portable_name(name: str) -> None:
    model = model_of(name)
    named = [
        *(model.body(i).name for i in range(model.nbody)),
        *(model.joint(i).name for i in range(model.njnt)),
        *(model.actuator(i).name for i in range(model.nu)),
    ]
    assert [n for n in named if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", n)] == []


@pytest.mark.parametrize("name", NAMES)
def test_the_tree_has_one_root_and_one_joint_for_each_body(name: str) -> None:
    model = model_of(name)
    assert (model.body_parentid[1:] == 0).sum() == 1
    assert model.body_jntnum.max() == 1
    assert model.neq == model.ntendon == model.nmocap == model.na == 0


@pytest.mark.parametrize("name", NAMES)
def test_all_damping_is_the_actuators(name: str) -> None:
    model = model_of(name)
    assert not model.dof_damping.any()
    assert (model.actuator_biasprm[:, 2] < 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_every_actuator_holds_a_joint_within_a_symmetric_force(name: str) -> None:
    model = model_of(name)
    assert np.array_equal(model.actuator_gainprm[:, 0], -model.actuator_biasprm[:, 1])
    assert np.array_equal(model.actuator_forcerange[:, 0], -model.actuator_forcerange[:, 1])
    assert model.actuator_forcelimited.all()
    assert np.array_equal(model.actuator_ctrlrange, model.jnt_range[model.actuator_trnid[:, 0]])


@pytest.mark.parametrize("name", NAMES)
def test_the_keyframe_rests_at_its_own_targets(name: str) -> None:
    model = model_of(name)
    joints = model.key_qpos[0][model.jnt_qposadr[model.actuator_trnid[:, 0]]]
    assert np.array_equal(model.key_ctrl[0], joints)
    low, high = model.actuator_ctrlrange.T
    assert ((low <= joints) & (joints <= high)).all()


@pytest.mark.parametrize("name", NAMES)
def test_robot_parts_never_touch_each_other(name: str) -> None:
    model = model_of(name)
    robot = model.geom_bodyid > 0
    assert not model.geom_contype[robot].any()


@pytest.mark.parametrize("name", WALKERS)
def test_it_stands_by_itself_for_five_seconds(name: str) -> None:
    fields = ("qpos", "contact_force")
    with Direct("mujoco", path(name), num_envs=1, decimation=10, publish=fields) as sim:
        heights = []
        for _ in range(round(5.0 / (10 * sim.facts.timestep))):
            sim.step()
            heights.append(sim["qpos"][0, 2])
        weight = model_of(name).body_mass.sum() * 9.81
        assert np.ptp([sim.facts.default_qpos[2], *heights]) < 0.02
        assert sim["qpos"][0, 3] > 0.99  # the cosine of half its tilt
        assert sim["contact_force"][0].sum(axis=0) == pytest.approx(
            [0, 0, weight], abs=0.02 * weight
        )


def test_the_arm_moves_without_contact_and_below_its_force_limits() -> None:
    model = model_of("arm7")
    data = mj.MjData(model)
    mj.mj_resetDataKeyframe(model, data, 0)
    with Direct("mujoco", path("arm7"), num_envs=1) as sim:
        targets = sine_targets(sim.facts, 1000, 1, amplitude=0.3)[:, 0]
    for target in targets:
        data.ctrl[:] = target
        mj.mj_step(model, data)
        assert data.ncon == 0
        assert (np.abs(data.actuator_force) < 0.8 * model.actuator_forcerange[:, 1]).all()


OLD = """
import json, sys, mujoco
for path in sys.argv[1:]:
    model = mujoco.MjModel.from_xml_path(path)
    data = mujoco.MjData(model)
    mujoco.mj_resetDataKeyframe(model, data, 0)
    mujoco.mj_step(model, data, int(5 / model.opt.timestep))
    print(json.dumps([model.nu, model.nv, float(model.key_qpos[0, 2]), float(data.qpos[2])]))
"""


def test_they_compile_and_stand_in_the_oldest_mujoco_too(python38: str) -> None:
    done = subprocess.run(
        [python38, "-c", OLD, *map(path, NAMES)], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row[:2] for row in rows] == [list(WANTED[name][:2]) for name in NAMES]
    assert all(abs(before - after) < 0.02 for _, _, before, after in rows[:2])
