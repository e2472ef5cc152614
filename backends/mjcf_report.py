"""What of a model the target simulators leave out: said by name, not refused."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from .mjcf_model import Body
from .mjcf_rules import Robot
from .mjcf_source import Compiled

_SHOWN = 4  # names in a list before "and N more"

# Compared with MuJoCo's own defaults, which are taken from the release in use.
_DEFAULTS = "<mujoco><worldbody><body><joint/><geom size='1'/></body></worldbody></mujoco>"
_GEOM_ARRAYS = ("margin", "gap", "solref", "solimp", "solmix", "condim", "priority")
_JOINT_ARRAYS = {
    "jnt_margin": "margin",
    "jnt_solref": "solreflimit",
    "jnt_solimp": "solimplimit",
    "dof_solref": "solreffriction",
    "dof_solimp": "solimpfriction",
}
_BITS = {
    "disableflags": ("mjtDisableBit", "mjDSBL_", "disabled"),
    "enableflags": ("mjtEnableBit", "mjENBL_", "enabled"),
}


def not_reproduced(c: Compiled, robot: Robot) -> tuple[str, ...]:
    """One phrase for each thing that is left out."""
    m = c.model
    plain = c.mujoco.MjModel.from_xml_string(_DEFAULTS)
    pairs = colliding_pairs(m, robot)
    found: list[str] = []
    if pairs:
        found.append(f"self-collision: {pairs} geom pairs")
    if m.nexclude:
        found.append(f"contact excludes: {m.nexclude} (self-collision is off altogether)")
    if robot.visual:
        found.append(f"visual geoms: {len(robot.visual)}")
    if robot.untouchable:
        found.append("geoms that cannot touch the floor: " + _list(c, robot.untouchable))
    if robot.strangers:
        names = [c.name("body", body) or f"body {body}" for body in robot.strangers]
        found.append("bodies beside the robot: " + _shorten(names))
    found += _options(c, plain) + _geoms(c, robot, plain) + _joints(c, robot, plain)
    names = sensor_names(c)
    if names:
        found.append("sensors: " + ", ".join(names))
    return tuple(found)


def massless_notes(c: Compiled, robot: Robot, bodies: Sequence[Body]) -> tuple[str, ...]:
    """C2.14: bodies whose inertial is not the model's own."""
    return tuple(
        f"body {record.name} has no mass; it is given {record.mass!r} kg"
        for body, record in zip(robot.bodies, bodies, strict=True)
        if c.model.body_mass[body] == 0
    )


def sensor_names(c: Compiled) -> tuple[str, ...]:
    """Every sensor, also those that this release of MuJoCo cannot read."""
    known = [c.name("sensor", index) or f"sensor {index}" for index in range(c.model.nsensor)]
    return (*known, *c.unread_sensors)


def colliding_pairs(m: Any, robot: Robot) -> int:
    """Pairs of the robot's geoms that MuJoCo would let collide."""
    solid = (*robot.geoms, *robot.untouchable)
    return sum(_can_collide(m, first, second) for first, second in combinations(solid, 2))


def _can_collide(m: Any, first: int, second: int) -> bool:
    """MuJoCo's filter: masks; not within one rigid part, nor with its parent; not excluded."""
    low, high = sorted((int(m.geom_bodyid[first]), int(m.geom_bodyid[second])))
    parts = int(m.body_weldid[low]), int(m.body_weldid[high])
    if parts[0] == parts[1] or (low << 16) + high in m.exclude_signature:
        return False
    parents = [int(m.body_weldid[m.body_parentid[part]]) for part in parts]
    # The world is nobody's parent here: a part welded to it collides with its own children.
    if 0 not in parts and (parts[0] == parents[1] or parts[1] == parents[0]):
        return False
    masks = m.geom_contype[first] & m.geom_conaffinity[second]
    return bool(masks or m.geom_contype[second] & m.geom_conaffinity[first])


def _options(c: Compiled, plain: Any) -> list[str]:
    option, default = c.model.opt, plain.opt
    found: list[str] = []
    if option.integrator != default.integrator:
        found.append("integrator: " + c.word("mjtIntegrator", option.integrator))
    if option.cone != default.cone:
        found.append("friction cone: " + c.word("mjtCone", option.cone))
    if option.impratio != default.impratio:
        found.append(f"impratio: {float(option.impratio)!r}")
    for name, (enum, prefix, words) in _BITS.items():
        bits = getattr(option, name) & ~getattr(default, name)
        members = getattr(c.mujoco, enum).__members__
        names = [m.removeprefix(prefix).lower() for m in members if m.startswith(prefix)]
        codes = [int(members[m]) for m in members if m.startswith(prefix)]
        on = [flag for flag, code in zip(names, codes, strict=True) if bits & code]
        if on:
            found.append(f"{words} flags: {', '.join(on)}")
    return found


def _geoms(c: Compiled, robot: Robot, plain: Any) -> list[str]:
    geoms = list(robot.geoms) + ([] if robot.floor is None else [robot.floor])
    found: list[str] = []
    for name in _GEOM_ARRAYS:
        values, default = getattr(c.model, "geom_" + name), getattr(plain, "geom_" + name)[0]
        other = [geom for geom in geoms if (values[geom] != default).any()]
        if other:
            found.append(f"geom {name}: {_list(c, other)}")
    return found


def _joints(c: Compiled, robot: Robot, plain: Any) -> list[str]:
    found: list[str] = []
    for array, name in _JOINT_ARRAYS.items():
        values, default = getattr(c.model, array), getattr(plain, array)[0]
        rows = {j: c.model.jnt_dofadr[j] if array.startswith("dof") else j for j in robot.joints}
        other = [c.name("joint", j) for j, row in rows.items() if (values[row] != default).any()]
        if other:
            found.append(f"joint {name}: {_shorten(other)}")
    return found


def _list(c: Compiled, geoms: Sequence[int]) -> str:
    return _shorten([c.label(geom) for geom in geoms])


def _shorten(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
