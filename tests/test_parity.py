"""The same model, start and targets in every simulator that runs here, through the public API.

Without contact they must agree to single precision; under contact solvers differ and bounds remain. The
reference is a plain loop over the newest MuJoCo, in double precision.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import mujoco  # type: ignore[import-untyped]
import numpy as np
import pytest

import g1_scene
from outboard.backends import Backend, registry
from outboard.ipc.layout import PUBLISHABLE

mj: Any = mujoco  # its stubs do not list its names
ROOT = Path(__file__).resolve().parent.parent
SCENES = ROOT / "backends" / "scenes"
pytestmark = pytest.mark.timeout(600)

STEPS = 200
# rad, m: single precision over 200 steps. Measured: MuJoCo 5e-8, MuJoCo-Warp 3e-7.
ARM_BOUND = 1e-5

Open = Callable[..., Backend]


def genesis_python() -> str:
    """The interpreter of a Genesis environment, by the names that its own tests use. Skips without."""
    path = os.environ.get("OUTBOARD_GENESIS_PYTHON") or str(
        ROOT / ".venv-genesis" / "bin" / "python"
    )
    if "genesis" not in registry.BACKENDS or not os.access(path, os.X_OK):
        pytest.skip(f"no Genesis environment at {path}")
    return path


@pytest.fixture(
    params=[
        "mujoco",
        "mujoco on Python 3.8",
        "mjwarp",
        pytest.param("genesis", marks=pytest.mark.slow),
    ]
)
def open_one(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Opens the simulator under test on the CPU; closes what was opened."""
    name = request.param.split()[0]
    if name == "mjwarp":
        python = request.getfixturevalue("mjwarp_python")
    elif name == "genesis":
        python = genesis_python()
    else:
        python = request.getfixturevalue("python38") if "3.8" in request.param else sys.executable
    with ExitStack() as stack:

        def open_it(scene: str | Path, **arguments: Any) -> Backend:
            backend = registry.find(name)(
                device="cpu", scene=str(scene), worker_python=python, **arguments
            )
            return stack.enter_context(backend)

        yield open_it


def plain_loop(
    scene: str, ctrls: np.ndarray, qpos: Any = None, qvel: Any = None
) -> tuple[dict[str, np.ndarray], float]:
    """One environment after `ctrls` (steps, nu), as the fields are defined, and how near an actuator came to
    its limit: 1 is saturation."""
    model = mj.MjModel.from_xml_path(scene)
    data = mj.MjData(model)
    if model.nkey:
        mj.mj_resetDataKeyframe(model, data, 0)
    if qpos is not None:
        data.qpos[:], data.qvel[:] = qpos, qvel
    limits, nearest = model.actuator_forcerange[:, 1], 0.0
    limited = model.actuator_forcelimited.astype(bool)
    for ctrl in ctrls:
        data.ctrl[:] = ctrl
        mj.mj_step(model, data)
        nearest = max(nearest, *(np.abs(data.actuator_force) / limits)[limited], 0.0)
    mj.mj_forward(model, data)
    velocity = np.zeros((model.nbody, 6))
    for body in range(model.nbody):
        mj.mj_objectVelocity(model, data, mj.mjtObj.mjOBJ_BODY, body, velocity[body], 0)
    # mj_objectVelocity takes the inertial frame's centre; the fields are of the body frame's origin.
    arm = data.xpos - data.xipos
    linvel = velocity[:, 3:] + np.cross(velocity[:, :3], arm)
    fields = {"qpos": data.qpos, "qvel": data.qvel, "body_pos": data.xpos[1:],
              "body_quat": data.xquat[1:], "body_angvel": velocity[1:, :3],
              "body_linvel": linvel[1:]}  # fmt: skip
    return {name: np.array(field) for name, field in fields.items()}, nearest


def arm_targets(model: Any, steps: int, num_envs: int) -> np.ndarray:
    """(steps, num_envs, nu): slow swings that start at the keyframe, no two alike, never near a force limit:
    there versions of MuJoCo differ (an actuator at its limit under implicitfast)."""
    nu = model.nu
    t = np.arange(steps)[:, None, None] * model.timestep
    phase = 0.3 * np.arange(num_envs)[:, None] + 0.1 * np.arange(nu)
    return (model.default_ctrl + 0.1 * (np.sin(4 * t + phase) - np.sin(phase))).astype(np.float32)


def test_the_arm_without_contact_goes_the_same_way(open_one: Open) -> None:
    with open_one("arm7", num_envs=3) as sim:
        targets = arm_targets(sim.model, STEPS, 3)
        sim.reset()
        for ctrl in targets[:-1]:
            sim.step(ctrl)
        qpos = sim.step(targets[-1]).qpos.copy()
    for env in range(3):
        expected, nearest = plain_loop(str(SCENES / "arm7.xml"), targets[:, env])
        assert nearest < 0.9, "an actuator saturates: this scene compares versions, not simulators"
        assert np.abs(qpos[env] - expected["qpos"]).max() < ARM_BOUND
        # It went somewhere, and each environment its own way.
        assert np.abs(expected["qpos"] - sim.model.default_qpos).max() > 0.03
    assert np.abs(qpos[0] - qpos[1]).max() > 0.01


# A heavy bob off the axis of the body's frame, and a second body on a hinge: centre of mass, body frame
# and inertia axes are three different things.
SPINNER = """
<mujoco model="spinner">
  <compiler angle="radian"/>
  <option timestep="0.002" integrator="implicitfast"/>
  <worldbody>
    <body name="hub" pos="0 0 5">
      <freejoint name="root"/>
      <inertial pos=".1 .05 -.03" quat=".9 .1 .3 -.2" mass="2" diaginertia=".04 .03 .02"/>
      <geom type="sphere" size=".05" contype="0" conaffinity="0"/>
      <body name="arm" pos="0 .1 .2">
        <joint name="elbow" axis="1 0 0"/>
        <inertial pos="0 .02 .1" mass=".5" diaginertia=".004 .003 .002"/>
        <geom type="sphere" size=".02" contype="0" conaffinity="0"/>
      </body>
    </body>
  </worldbody>
  <actuator><position name="elbow" joint="elbow" kp="5" kv=".3" forcerange="-50 50"/></actuator>
  <keyframe><key name="start" qpos="0 0 5 1 0 0 0 0" ctrl="0"/></keyframe>
</mujoco>
"""


def test_a_spinning_body_with_its_mass_off_centre_has_the_same_frames(
    open_one: Open, tmp_path: Path
) -> None:
    scene = tmp_path / "spinner.xml"
    scene.write_text(SPINNER)
    turned = np.array([0.8, 0.2, -0.4, 0.4]) / np.linalg.norm([0.8, 0.2, -0.4, 0.4])
    qpos = np.array([0.3, -0.2, 5.0, *turned, 0.4], np.float32)
    qvel = np.array([0.5, -1.0, 2.0, 3.0, -2.0, 1.0, 0.7], np.float32)
    ctrl = np.full((60, 1), 0.2, np.float32)
    offered = [name for name in PUBLISHABLE if name != "contact_force"]
    with open_one(scene, num_envs=2, publish=tuple(offered)) as sim:
        at_once = {k: v[1].copy() for k, v in sim.set_state([1], qpos, qvel).fields().items()}
        for _ in range(59):
            sim.step(np.stack([ctrl[0] * 0, ctrl[0]]))
        state = sim.step(np.stack([ctrl[0] * 0, ctrl[0]]))
        later = {name: field[1].copy() for name, field in state.fields().items()}
    for found, steps in ((at_once, 0), (later, 60)):
        expected, _ = plain_loop(str(scene), ctrl[:steps], qpos, qvel)
        if steps:
            assert np.abs(expected["qpos"][3:7] - turned).max() > 0.1
        for name in offered:
            sign = 1.0
            if name == "body_quat":
                sign = np.sign((found[name] * expected[name]).sum(-1, keepdims=True))
            worst = np.abs(found[name] * sign - expected[name]).max()
            assert worst < 5e-5, f"{name} differs by {worst:.2g} after {steps} steps"


@pytest.mark.parametrize(("scene", "mass_kg"), [("humanoid29", 35.0), ("quadruped12", 12.0)])
def test_the_walkers_stand_and_the_floor_carries_them(
    scene: str, mass_kg: float, open_one: Open
) -> None:
    with open_one(scene, num_envs=2, publish=("qpos", "contact_force"), decimation=10) as sim:
        height = sim.reset().qpos[:, 2].copy()
        still = np.tile(sim.model.default_ctrl, (2, 1)).astype(np.float32)
        for _ in range(39):
            sim.step(still)
        state = sim.step(still)
        force, now = state.contact_force.sum(axis=1), state.qpos[:, 2].copy()
    assert np.abs(now - height).max() < 0.02
    assert force[:, 2] == pytest.approx(mass_kg * 9.81, rel=0.05)
    assert np.abs(force[:, :2]).max() < 0.05 * mass_kg * 9.81


@pytest.fixture(scope="module")
def g1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("mjlab") is None:
        pytest.skip("needs mjlab (pip install --no-deps mjlab): its Unitree G1 is read")
    found = g1_scene.source()
    assert found is not None, "this mjlab has its G1 somewhere else"
    return g1_scene.write(tmp_path_factory.mktemp("g1") / "g1.xml", found)


def test_mjlabs_g1_falls_the_same_way_and_lands_on_its_feet(open_one: Open, g1: Path) -> None:
    """It has no balance, and leans forward from the second half of the first second on."""
    with open_one(g1, num_envs=2, publish=("qpos", "contact_force")) as sim:
        still = np.tile(sim.model.default_ctrl, (2, 1)).astype(np.float32)
        for _ in range(5):  # before the soles touch
            sim.step(still)
        falling = sim.reset([]).qpos[0].copy()
        for _ in range(54):
            sim.step(still)
        state = sim.step(still)
        landed, upwards = state.qpos[0].copy(), float(state.contact_force[0, :, 2].sum())
    targets = np.tile(still[0], (60, 1))
    assert np.abs(falling - plain_loop(str(g1), targets[:5])[0]["qpos"]).max() < ARM_BOUND
    expected = plain_loop(str(g1), targets)[0]["qpos"]
    assert abs(landed[2] - expected[2]) < 0.02
    assert upwards == pytest.approx(33.3 * 9.81, rel=0.3)
