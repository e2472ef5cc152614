"""Unitree's G1 out of the package mjlab as one MJCF file, where that package is installed: a real robot.

Only its XML is read, nothing of mjlab is imported. Meshes, sensors and cameras go; a floor, position
actuators after the robot's public motor data, and a standing keyframe come.
"""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path
from typing import Any

import mujoco  # type: ignore[import-untyped]

mj: Any = mujoco  # its stubs do not list its names

# Endings of joint names, armature in kg m2, largest torque in N m.
_MOTORS = (
    (("elbow", "shoulder_pitch", "shoulder_roll", "shoulder_yaw", "wrist_roll"), 0.00361, 25.0),
    (("hip_pitch", "hip_yaw", "waist_yaw"), 0.010178, 88.0),
    (("hip_roll", "knee"), 0.025102, 139.0),
    (("wrist_pitch", "wrist_yaw"), 0.00425, 5.0),
    (("waist_pitch", "waist_roll", "ankle_pitch", "ankle_roll"), 0.00722, 50.0),
)
_FREQUENCY = 10 * 2 * math.pi  # rad/s, of the closed loop; damping ratio 2
# Bent knees; rad.
_STAND = {
    "hip_pitch": -0.312, "knee": 0.669, "ankle_pitch": -0.363, "elbow": 0.6,
    "left_shoulder_roll": 0.2, "right_shoulder_roll": -0.2, "shoulder_pitch": 0.2,
}  # fmt: skip
_HEIGHT_M = 0.766


def source() -> Path | None:
    """The package's g1.xml, or None."""
    found = importlib.util.find_spec("mjlab")
    for folder in (found.submodule_search_locations or []) if found else []:
        path = Path(folder) / "asset_zoo" / "robots" / "unitree_g1" / "xmls" / "g1.xml"
        if path.is_file():
            return path
    return None


def write(path: Path, g1: Path) -> Path:
    """The scene as a file that every MuJoCo from 3.2.3 on reads."""
    spec = mj.MjSpec.from_file(str(g1))
    meshes = [geom for geom in spec.geoms if geom.type == mj.mjtGeom.mjGEOM_MESH]
    for thing in (*meshes, *spec.meshes, *spec.materials, *spec.cameras, *spec.sensors, *spec.keys):
        spec.delete(thing)
    spec.option.timestep = 0.005
    spec.option.integrator = mj.mjtIntegrator.mjINT_IMPLICITFAST
    spec.worldbody.add_geom(name="floor", type=mj.mjtGeom.mjGEOM_PLANE, size=[0, 0, 0.05])
    qpos = [0, 0, _HEIGHT_M, 1, 0, 0, 0]
    for joint in [joint for joint in spec.joints if joint.type == mj.mjtJoint.mjJNT_HINGE]:
        name = joint.name.replace("_joint", "")
        armature, torque = next((a, t) for ends, a, t in _MOTORS if name.endswith(ends))
        joint.armature = armature
        actuator = spec.add_actuator(name=name, target=joint.name, trntype=mj.mjtTrn.mjTRN_JOINT)
        actuator.set_to_position(kp=armature * _FREQUENCY**2, kv=4 * armature * _FREQUENCY)
        actuator.forcelimited, actuator.forcerange = True, [-torque, torque]
        qpos.append(next((angle for end, angle in _STAND.items() if name.endswith(end)), 0.0))
    spec.compile()
    spec.add_key(name="stand", qpos=qpos, ctrl=qpos[7:])
    spec.compile()
    path.write_text(re.sub(r"<general [^>]*/>", _as_position, spec.to_xml()))
    return path


def _as_position(general: re.Match[str]) -> str:
    """MuJoCo 4 writes a position actuator as a general one, with an attribute that 3.2.3 refuses."""
    has = dict(re.findall(r'(\w+)="([^"]*)"', general.group(0)))
    kp, kv = has["gainprm"].split()[0], has["biasprm"].split()[2].lstrip("-")
    return (
        f'<position name="{has["name"]}" joint="{has["joint"]}" kp="{kp}" kv="{kv}" '
        f'forcelimited="true" forcerange="{has["forcerange"]}"/>'
    )
