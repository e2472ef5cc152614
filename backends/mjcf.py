"""The model contract: what a scene may hold so that every simulator can be told all of it.

`inspect` compiles an MJCF file with MuJoCo on the host, judges the compiled arrays rule by rule
(`mjcf_errors.RULES`), and refuses by name what the importing simulators cannot reproduce. What it
returns is data. `export_flat` puts the robot on disk for their importers.

Promised of a model that passes: force = clip(kp (target - q) - kv dq/dt, -F, F) with the target
clipped to its control range; self-collision off for the whole robot; armature and frictionloss as
compiled. All else that is left out stands in `Model.not_reproduced`.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path

from .mjcf_actuators import judge_actuators, judge_drives
from .mjcf_closure import judge_closure
from .mjcf_errors import (
    RULES,
    InvalidModelError,
    ModelContractError,
    UnsupportedModelError,
    Verdict,
)
from .mjcf_flat import FlatModel, body_records, default_cache_dir, export_flat, flatten
from .mjcf_model import Actuator, Body, Flat, Floor, Joint, Model
from .mjcf_report import colliding_pairs, massless_notes, not_reproduced, sensor_names
from .mjcf_rules import Robot, floats, judge_bodies, judge_joints, judge_scene
from .mjcf_source import Compiled, compile_file

__all__ = [
    "RULES",
    "Actuator",
    "Body",
    "Flat",
    "FlatModel",
    "Floor",
    "InvalidModelError",
    "Joint",
    "Model",
    "ModelContractError",
    "UnsupportedModelError",
    "Verdict",
    "default_cache_dir",
    "export_flat",
    "inspect",
]


def inspect(
    path: str | PathLike[str], *, fold_joint_damping: bool = False, keyframe: str | None = None
) -> Model:
    """Compile and judge a model.

    `fold_joint_damping` accepts passive joint damping by adding it to the actuator's kv, which is
    not the same (kv is inside the force limit) and is said in `Model.notes`. `keyframe` names the
    default pose; left out, it is the only keyframe there is, else the reference pose.

    ModelContractError for the first rule that is broken; UsageError when mujoco is missing.
    """
    c = compile_file(Path(path))
    judge_drives(c)
    robot = judge_scene(c)
    joints = judge_joints(c, robot, fold_joint_damping)
    judge_bodies(c, robot)
    actuators, notes = judge_actuators(c, robot, joints)
    _judge_keyframes(c)
    bodies = body_records(c, robot)
    judge_closure(c, robot, bodies, joints, actuators)
    actuators, folded = _settle(actuators, joints)
    key = _choose_keyframe(c, keyframe)
    gravity_off = c.model.opt.disableflags & c.code("mjtDisableBit", "mjDSBL_GRAVITY")
    return Model(
        path=c.source.main,
        timestep=float(c.model.opt.timestep),
        gravity=(0.0, 0.0, 0.0) if gravity_off else floats(c.model.opt.gravity),
        floating_base=len(robot.joints) < c.model.njnt,
        bodies=bodies,
        joints=joints,
        actuators=actuators,
        floor=_floor(c, robot),
        keyframe=None if key is None else c.name("key", key),
        default_qpos=floats(c.model.qpos0 if key is None else c.model.key_qpos[key]),
        default_qvel=(0.0,) * c.model.nv if key is None else floats(c.model.key_qvel[key]),
        default_ctrl=_default_ctrl(c, robot, actuators, key),
        sensors=sensor_names(c),
        excludes=int(c.model.nexclude),
        colliding_pairs=colliding_pairs(c.model, robot),
        not_reproduced=not_reproduced(c, robot),
        notes=(*notes, *folded, *massless_notes(c, robot, bodies)),
        flat=flatten(c, robot, bodies, joints),
    )


def _settle(
    actuators: Sequence[Actuator], joints: Sequence[Joint]
) -> tuple[tuple[Actuator, ...], tuple[str, ...]]:
    """What each joint adds to its actuator: damping to kv, and its own force limit.

    Damping that may not be folded has been refused before (C2.5).
    """
    settled: list[Actuator] = []
    notes: list[str] = []
    for actuator in actuators:
        joint = joints[actuator.joint]
        kv, force = actuator.kv + joint.damping, min(actuator.force_range[1], joint.effort)
        settled.append(replace(actuator, kv=kv, force_range=(-force, force)))
        if joint.damping:
            notes.append(
                f"joint {joint.name}: damping {joint.damping!r} is folded into kv, now {kv!r}"
            )
    return tuple(settled), tuple(notes)


def _judge_keyframes(c: Compiled) -> None:
    """C2.15. Newer releases of MuJoCo fill up a short keyframe and say nothing; 3.2.3 refuses."""
    sizes = {"qpos": c.model.nq, "qvel": c.model.nv, "ctrl": c.model.nu}
    for tag in c.source.children("keyframe"):
        for name, size in sizes.items():
            count = len(tag.get(name, "").split())
            if count not in (0, size):
                raise InvalidModelError(
                    "C2.15",
                    f"{name} needs {size} numbers",
                    file=c.source.files.get(tag, c.source.main),
                    element="key",
                    name=tag.get("name", ""),
                    value=str(count),
                )


def _choose_keyframe(c: Compiled, wanted: str | None) -> int | None:
    """C2.16: the one that is asked for, else the only one."""
    names = [c.name("key", index) for index in range(c.model.nkey)]
    if wanted is None:
        return 0 if len(names) == 1 else None
    if wanted not in names:
        raise InvalidModelError(
            "C2.16",
            f"there is no such keyframe; there are: {', '.join(names) or 'none'}",
            file=c.source.main,
            element="key",
            name=wanted,
            value=wanted,
        )
    return names.index(wanted)


def _default_ctrl(
    c: Compiled, robot: Robot, actuators: Sequence[Actuator], key: int | None
) -> tuple[float, ...]:
    """The keyframe's ctrl if it is written, else the joint positions; within the control range.

    MuJoCo reads a missing ctrl as zeros, which would throw the robot out of its pose.
    """
    m = c.model
    qpos = m.qpos0 if key is None else m.key_qpos[key]
    targets = [qpos[m.jnt_qposadr[robot.joints[actuator.joint]]] for actuator in actuators]
    if key is not None and _writes_ctrl(c.source.children("keyframe"), c.name("key", key)):
        targets = list(m.key_ctrl[key])
    return tuple(
        min(max(float(target), actuator.ctrl_range[0]), actuator.ctrl_range[1])
        for target, actuator in zip(targets, actuators, strict=True)
    )


def _writes_ctrl(keys: Sequence[ET.Element], name: str) -> bool:
    return any(key.get("ctrl") and key.get("name", "") == name for key in keys)


def _floor(c: Compiled, robot: Robot) -> Floor | None:
    if robot.floor is None:
        return None
    height, friction = c.model.geom_pos[robot.floor, 2], c.model.geom_friction[robot.floor]
    return Floor(float(height), floats(friction))
