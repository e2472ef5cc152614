"""Rules C2: what a model may hold besides actuators, judged on compiled arrays."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .mjcf_errors import InvalidModelError, UnsupportedModelError
from .mjcf_model import Joint
from .mjcf_source import Compiled, Place

# Isaac Sim turns every other character of a name into an underscore, and prefixes a leading digit.
PORTABLE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")

INFINITE = float("inf")
UNLIMITED = (-INFINITE, INFINITE)

# A plane whose normal leans by less than this (1e-6 rad) is horizontal: angles in degrees are rounded.
_LEVEL = 1e-6

_SHAPES = ("sphere", "capsule", "box", "cylinder", "mesh")

# What has no counterpart in the target simulators: (count in MjModel, object kind, tags, in words)
_FOREIGN = (
    ("neq", "equality", ("connect", "weld", "joint", "tendon", "flex", "equality"), "an equality"),
    ("ntendon", "tendon", ("fixed", "spatial"), "a tendon"),
    ("npair", "pair", ("pair",), "an explicit contact pair"),
    ("nflex", "flex", ("flex", "flexcomp"), "a deformable"),
    ("nskin", "skin", ("skin",), "a skin"),
    ("nplugin", "plugin", ("plugin",), "an engine plugin"),
    ("nhfield", "hfield", ("hfield",), "a height field"),
)

# Switched off, these change what the contract promises. Gravity is not here: it becomes zero.
_NEEDED_FLAGS = ("CONSTRAINT", "FRICTIONLOSS", "LIMIT", "CONTACT", "CLAMPCTRL", "ACTUATION")


@dataclass(frozen=True)
class Robot:
    """Which compiled objects are the robot. All are MjModel ids, in its order."""

    root: int
    bodies: tuple[int, ...]  # consecutive, depth first
    joints: tuple[int, ...]  # hinge and slide
    geoms: tuple[int, ...]  # those that can touch the floor
    visual: tuple[int, ...]  # with neither contype nor conaffinity
    untouchable: tuple[int, ...]  # collide with something, but not with the floor
    strangers: tuple[int, ...]  # static bodies of the world that nothing can touch
    floor: int | None  # geom


def judge_scene(c: Compiled) -> Robot:
    """Find the robot and the floor. C2.9, C2.10, C2.11, C2.18."""
    _judge_foreign(c)
    _judge_medium(c)
    _judge_flags(c)
    root = _judge_roots(c)
    floor = _judge_world(c)
    m = c.model
    inside = [body for body in range(1, m.nbody) if m.body_rootid[body] == root]
    geoms = [geom for geom in range(m.ngeom) if m.body_rootid[m.geom_bodyid[geom]] == root]
    visual = [geom for geom in geoms if not _collides(m, geom)]
    solid = [geom for geom in geoms if _collides(m, geom)]
    touching = [geom for geom in solid if _touches_floor(m, geom, floor)]
    scalar = (c.code("mjtJoint", "mjJNT_HINGE"), c.code("mjtJoint", "mjJNT_SLIDE"))
    return Robot(
        root=root,
        bodies=tuple(inside),
        joints=tuple(j for j in range(m.njnt) if m.jnt_type[j] in scalar),
        geoms=tuple(touching),
        visual=tuple(visual),
        untouchable=tuple(geom for geom in solid if geom not in touching),
        strangers=tuple(b for b in range(1, m.nbody) if m.body_rootid[b] != root),
        floor=floor,
    )


def judge_bodies(c: Compiled, robot: Robot) -> None:
    """Names, joints per body and collision shapes. C2.1, C2.2, C2.12."""
    m = c.model
    for body in robot.bodies:
        name = c.name("body", body)
        _judge_name(c, "body", name, f"body {body}")
        if m.body_jntnum[body] > 1:
            value = f"{m.body_jntnum[body]} joints"
            raise _unsupported("C2.1", "one joint to a body", c.source.place("body", name), value)
    for geom in robot.geoms:
        shape = c.word("mjtGeom", m.geom_type[geom])
        if shape not in _SHAPES:
            why = f"the shape of {c.label(geom)} is unknown to the target simulators"
            place = c.source.place("geom", c.name("geom", geom))
            raise _unsupported("C2.12", why, place, shape)


def judge_joints(c: Compiled, robot: Robot, fold_joint_damping: bool) -> tuple[Joint, ...]:
    """The hinge and slide joints. C2.1 to C2.7."""
    for joint in range(c.model.njnt):
        if c.word("mjtJoint", c.model.jnt_type[joint]) == "ball":
            place = c.source.place("joint", c.name("joint", joint))
            raise _unsupported("C2.1", "a joint of one degree of freedom is needed", place, "ball")
    joints: list[Joint] = []
    for joint in robot.joints:
        _judge_name(c, "joint", c.name("joint", joint), f"joint {joint}")
        place = c.source.place("joint", c.name("joint", joint))
        _judge_passive(c, joint, place, fold_joint_damping)
        joints.append(_joint(c, robot, joint, place))
    return tuple(joints)


def symmetric(rule: str, what: str, limited: bool, values: Any, place: Place) -> float:
    """The limit F of a force range [-F, F], inf when unlimited. UnsupportedModelError."""
    low, high = ordered(rule, what, limited, values, place)
    if low != -high:
        value = f"{low!r} {high!r}"
        raise _unsupported(rule, f"the target simulators know one {what} F: [-F, F]", place, value)
    return high


def ordered(rule: str, what: str, limited: bool, values: Any, place: Place) -> tuple[float, float]:
    """A range as (low, high), unlimited as infinite.

    MuJoCo reads a range that is not low-before-high as "unlimited" and says nothing; 0 0 is its
    way to write "none". InvalidModelError.
    """
    low, high = float(values[0]), float(values[1])
    if limited:
        return low, high
    if not (low < high or low == high == 0):  # so written that NaN is refused too
        why = f"MuJoCo would silently ignore this {what}; write the low end first"
        raise InvalidModelError(rule, why, value=f"{low!r} {high!r}", **vars(place))
    return UNLIMITED


def _unsupported(rule: str, why: str, place: Place, value: str) -> UnsupportedModelError:
    return UnsupportedModelError(rule, why, value=value, **vars(place))


def _judge_foreign(c: Compiled) -> None:
    m = c.model
    for count, kind, tags, words in _FOREIGN:
        if getattr(m, count, 0):
            name = c.name(kind, 0)
            place = c.source.first(tags, name)
            raise _unsupported("C2.9", f"{words} cannot be reproduced", place, name)
    for body in range(1, m.nbody):
        place = c.source.place("body", c.name("body", body))
        if m.body_mocapid[body] >= 0:
            raise _unsupported("C2.9", "a body cannot be moved from outside", place, "mocap")
        if m.body_gravcomp[body]:
            value = f"gravcomp {m.body_gravcomp[body]!s}"
            raise _unsupported("C2.9", "gravity cannot be compensated per body", place, value)


def _judge_medium(c: Compiled) -> None:
    option = c.model.opt
    for name, values in (
        ("density", [option.density]),
        ("viscosity", [option.viscosity]),
        ("wind", list(option.wind)),
    ):
        if any(values):
            value = f"{name} {' '.join(str(float(v)) for v in values)}"
            raise _unsupported("C2.9", "there is no medium", c.source.first(("option",)), value)


def _judge_flags(c: Compiled) -> None:
    option = c.model.opt
    for name in _NEEDED_FLAGS:
        if option.disableflags & c.code("mjtDisableBit", "mjDSBL_" + name):
            place = c.source.first(("flag",))
            raise _unsupported("C2.18", f"{name.lower()} is disabled", place, "disable")
    if getattr(option, "disableactuator", 0):
        place = c.source.first(("option",))
        raise _unsupported("C2.18", "an actuator group is disabled", place, "actuatorgroupdisable")


def _judge_roots(c: Compiled) -> int:
    """The one child of the world that moves or can be touched. A static obstacle is a second."""
    m = c.model
    solid = [m.geom_bodyid[geom] for geom in range(m.ngeom) if _collides(m, geom)]
    roots = sorted({int(m.body_rootid[b]) for b in [*m.jnt_bodyid, *solid]} - {0})
    if not roots:
        raise InvalidModelError("C2.10", "there is no robot", file=c.source.main)
    if len(roots) > 1:
        names = [c.name("body", body) or f"body {body}" for body in roots]
        place = c.source.place("body", c.name("body", roots[1]))
        why = "static obstacles and second robots are not built"
        raise _unsupported("C2.10", why, place, ", ".join(names))
    return roots[0]


def _judge_world(c: Compiled) -> int | None:
    """The floor: the one geom of the world that can be touched."""
    m, floor = c.model, None
    for geom in range(m.ngeom):
        if m.geom_bodyid[geom] != 0 or not _collides(m, geom):
            continue
        shape = c.word("mjtGeom", m.geom_type[geom])
        place = c.source.place("geom", c.name("geom", geom))
        if shape != "plane":
            raise _unsupported("C2.11", "static obstacles are not built", place, shape)
        _, x, y, _ = m.geom_quat[geom]
        if 2 * float(x * x + y * y) ** 0.5 > _LEVEL:
            quat = " ".join(repr(float(v)) for v in m.geom_quat[geom])
            raise _unsupported("C2.11", "the floor is not level", place, f"quat {quat}")
        if floor is not None:
            why = "the world has a second floor"
            raise _unsupported("C2.11", why, place, f"beside {c.label(floor)}")
        floor = geom
    return floor


def _judge_name(c: Compiled, kind: str, name: str, otherwise: str) -> None:
    if PORTABLE_NAME.fullmatch(name):
        return
    place = c.source.place(kind, name)
    why = (
        "importers rename what is not [A-Za-z][A-Za-z0-9_]*" if name else f"{otherwise} is unnamed"
    )
    raise InvalidModelError("C2.2", why, value=repr(name), **vars(place))


def _judge_passive(c: Compiled, joint: int, place: Place, fold: bool) -> None:
    """C2.3 reference, C2.4 springs, C2.5 damping."""
    m, dof = c.model, c.model.jnt_dofadr[joint]
    ref = float(m.qpos0[m.jnt_qposadr[joint]])
    if ref != 0:
        raise _unsupported("C2.3", "a joint is 0 where its body is drawn", place, f"ref {ref!r}")
    for name in ("stiffness", "stiffnesspoly"):  # the second is unknown to older releases
        _zero("C2.4", "a joint spring", getattr(m, "jnt_" + name, None), joint, place, name)
    # A polynomial cannot become a kv, so it is refused even where folding is allowed.
    _zero("C2.5", "damping", getattr(m, "dof_dampingpoly", None), dof, place, "dampingpoly")
    if fold and joint in m.actuator_trnid[:, 0]:
        return
    why = "passive damping" if not fold else "damping of a joint with no kv to fold it into"
    hint = "" if fold else " (fold_joint_damping=True adds it to kv, inside the force range)"
    _zero("C2.5", why, m.dof_damping, dof, place, "damping", hint)


def _zero(
    rule: str, words: str, array: Any, row: int, place: Place, name: str, hint: str = ""
) -> None:
    if array is not None and array[row].any():
        values = array[row].reshape(-1)
        value = f"{name} {' '.join(repr(float(v)) for v in values)}"
        raise _unsupported(rule, f"{words} cannot be reproduced{hint}", place, value)


def _joint(c: Compiled, robot: Robot, joint: int, place: Place) -> Joint:
    m, dof = c.model, c.model.jnt_dofadr[joint]
    return Joint(
        name=c.name("joint", joint),
        type=c.word("mjtJoint", m.jnt_type[joint]),
        body=int(m.jnt_bodyid[joint]) - robot.root,
        axis=floats(m.jnt_axis[joint]),
        pos=floats(m.jnt_pos[joint]),
        range=ordered("C2.7", "joint range", m.jnt_limited[joint], m.jnt_range[joint], place),
        armature=float(m.dof_armature[dof]),
        frictionloss=float(m.dof_frictionloss[dof]),
        damping=float(m.dof_damping[dof]),
        effort=symmetric(
            "C2.6",
            "joint force limit",
            m.jnt_actfrclimited[joint],
            m.jnt_actfrcrange[joint],
            place,
        ),
    )


def floats(values: Sequence[Any]) -> tuple[float, ...]:
    """A compiled vector as plain Python numbers."""
    return tuple(float(value) for value in values)


def _collides(m: Any, geom: int) -> bool:
    return bool(m.geom_contype[geom] or m.geom_conaffinity[geom])


def _touches_floor(m: Any, geom: int, floor: int | None) -> bool:
    """By masks and excludes. Without a floor: would it touch one with MuJoCo's default masks?"""
    contype, conaffinity = (
        (1, 1)
        if floor is None
        else (
            int(m.geom_contype[floor]),
            int(m.geom_conaffinity[floor]),
        )
    )
    body = int(m.geom_bodyid[geom])
    if body in m.exclude_signature:  # (world << 16) + body: excluded from contact with the world
        return False
    return bool((m.geom_contype[geom] & conaffinity) or (contype & m.geom_conaffinity[geom]))
