"""A home of the stand-in Isaac Gym, laid out as the real one, and a robot on which every habit shows."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parent / "standins" / "isaacgym"

_ASK = "import sys, sysconfig; print(sys.base_prefix, sysconfig.get_path('purelib'))"

# Centres of mass beside the frames' origins, axes of inertia beside the frames' axes, anchors beside both;
# limbs that lie inside one another; friction, armature, force limits and joint limits that all matter.
_LIMBS = """
    <inertial pos="0.1 -0.05 0.04" quat="0.9 0.3 0.2 0.1" mass="3" diaginertia="0.05 0.04 0.02"/>
    <geom name="hub_shape" type="box" size="0.15 0.1 0.08" contype="0" conaffinity="1"
          friction="0.4 0.005 0.0001"/>
    <body name="arm" pos="0.1 0.1 0.05" quat="0.8 0.1 0.5 0.3">
      <inertial pos="0.05 0.1 -0.1" quat="0.7 0.1 0.6 0.3" mass="1" diaginertia="0.01 0.008 0.004"/>
      <joint name="shoulder" type="hinge" axis="0 1 0" pos="0.03 0 0.02" limited="true"
             range="-0.8 0.6" armature="0.02" frictionloss="0.1"/>
      <geom name="arm_shape" type="capsule" size="0.06" fromto="0 0 0 0 0.2 -0.2" contype="0"
            conaffinity="1" friction="0.4 0.005 0.0001"/>
      <body name="hand" pos="0 0.2 -0.2">
        <inertial pos="0.02 0 0.05" mass="0.5" diaginertia="0.003 0.003 0.002"/>
        <joint name="reach" type="slide" axis="0 0.6 0.8" limited="true" range="-0.05 0.15"
               armature="0.1"/>
        <geom name="hand_shape" type="sphere" size="0.05" contype="0" conaffinity="1"
             friction="0.4 0.005 0.0001"/>
      </body>
    </body>
    <body name="leg" pos="0.08 0.08 -0.05">
      <inertial pos="0 0.02 -0.12" mass="1.5" diaginertia="0.02 0.02 0.005"/>
      <joint name="hip" type="hinge" axis="1 0 0" limited="true" range="-1 1" armature="0.01"/>
      <geom name="leg_shape" type="capsule" size="0.05" fromto="0 0 0 0 0 -0.25" contype="0"
            conaffinity="1" friction="0.4 0.005 0.0001"/>
      <body name="toe" pos="0 0 -0.25" quat="0.9 0 0.4 0">
        <joint name="ankle" type="hinge" axis="0 1 0" armature="0.01"/>
        <inertial pos="0.03 0 0" mass="0.3" diaginertia="0.001 0.001 0.001"/>
        <geom name="toe_shape" type="box" size="0.06 0.03 0.02" contype="0" conaffinity="1"
             friction="0.4 0.005 0.0001"/>
      </body>
    </body>
"""
_SCENE = """<mujoco model="tumbler">
  <compiler angle="radian" autolimits="false"/>
  <option timestep="0.004" integrator="implicitfast" gravity="0.3 0 -9.81"/>
  <worldbody>
    <geom name="floor" type="plane" size="0 0 1" contype="1" conaffinity="0"
          friction="0.7 0.005 0.0001"/>
    <body name="hub" pos="0 0 0.5" quat="0.9 0.1 0.2 0.3">{root}{limbs}</body>
  </worldbody>
  <actuator>
    <position name="a" joint="shoulder" kp="60" kv="3" forcelimited="true" forcerange="-9 9"/>
    <position name="b" joint="reach" kp="200" kv="10"/>
    <position name="c" joint="hip" kp="80" kv="4" ctrllimited="true" ctrlrange="-0.9 0.9"/>
  </actuator>
  <keyframe><key name="home" qpos="{start} 0.1 0.02 -0.2 0.05" ctrl="0.1 0.02 -0.2"/></keyframe>
</mujoco>
"""
SCENES = {
    "floating": _SCENE.format(
        root="<freejoint/>", limbs=_LIMBS, start="0 0 0.45 0.98 0.05 0.1 0.05"
    ),
    "fixed": _SCENE.format(root="", limbs=_LIMBS, start=""),
}


def make_home(home: Path, python38: str) -> Path:
    """`<home>/isaacgym/python/isaacgym` and `<home>/miniconda3/envs/hsgym/{bin/python3.8,lib}`, the latter
    with the packages of `python38` and nothing else."""
    package = home / "isaacgym" / "python"
    package.mkdir(parents=True)
    (package / "isaacgym").symlink_to(SOURCES)
    base, site = subprocess.run(
        [python38, "-c", _ASK], capture_output=True, text=True, check=True, timeout=30
    ).stdout.split()
    env = home / "miniconda3" / "envs" / "hsgym"
    (env / "bin").mkdir(parents=True)
    (env / "lib" / "python3.8").mkdir(parents=True)
    (env / "bin" / "python3.8").symlink_to(Path(base) / "bin" / "python3.8")
    (env / "pyvenv.cfg").write_text(f"home = {base}/bin\ninclude-system-site-packages = false\n")
    (env / "lib" / "python3.8" / "site-packages").symlink_to(site)
    shared = Path(base) / "lib" / "libpython3.8.so.1.0"
    if shared.exists():  # found there through the worker's LD_LIBRARY_PATH, as in the real one
        (env / "lib" / shared.name).symlink_to(shared)
    return home


@pytest.fixture(scope="session")
def gym_home(tmp_path_factory: pytest.TempPathFactory, python38: str) -> Path:
    return make_home(tmp_path_factory.mktemp("isaacgym"), python38)


def write_scene(folder: Path, name: str) -> Path:
    path = folder / f"{name}.xml"
    path.write_text(SCENES[name])
    return path
