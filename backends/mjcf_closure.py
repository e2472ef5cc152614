"""Rule C1.10: nothing else is in an actuator or its joint than what the contract knows.

The robot is rebuilt from what was extracted (kp, kv, ranges, axes, ...) and compiled, and every
array of actuators, joints and degrees of freedom must be as it was. So a feature of MJCF that this
library has never heard of is refused by the name of its array, instead of being lost in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .mjcf_errors import UnsupportedModelError
from .mjcf_flat import flatten_driven
from .mjcf_model import Actuator, Body, Joint
from .mjcf_rules import Robot
from .mjcf_source import Compiled

# Computed by the compiler from the rest of the model, or without effect on motion.
_DERIVED = frozenset(
    {
        "actuator_acc0",
        "actuator_group",
        "actuator_length0",
        "actuator_lengthrange",
        "actuator_user",
        "dof_M0",
        "dof_invweight0",
        "dof_length",
        "jnt_group",
        "jnt_user",
    }
)

# Softness of limits and friction: engines differ in it anyway, so it is reported and not refused.
_REPORTED = frozenset({"jnt_margin", "jnt_solref", "jnt_solimp", "dof_solref", "dof_solimp"})

_KINDS = {"actuator": "actuator", "jnt": "joint", "dof": "joint"}  # array prefix -> object kind
_TAGS = {"actuator": "position", "jnt": "joint", "dof": "joint"}


def judge_closure(
    c: Compiled,
    robot: Robot,
    bodies: Sequence[Body],
    joints: Sequence[Joint],
    actuators: Sequence[Actuator],
) -> None:
    """Raise UnsupportedModelError C1.10 for the first array that the contract does not explain.

    `actuators` are as extracted, before joint damping was folded into their kv.
    """
    text = flatten_driven(c, bodies, joints, actuators)
    try:
        plain = c.mujoco.MjModel.from_xml_string(text)
    except (ValueError, c.mujoco.FatalError) as error:
        why = f"the robot cannot be rebuilt from its arrays: {error}"
        raise UnsupportedModelError("C1.10", why, file=c.source.main) from error
    for name in _arrays(c.model):
        row = _first_difference(c, robot, plain, name)
        if row is None:
            continue
        prefix = name.split("_")[0]
        owner = int(c.model.dof_jntid[row]) if prefix == "dof" else row
        place = c.source.place(_TAGS[prefix], c.name(_KINDS[prefix], owner))
        value = getattr(c.model, name)
        value = value[row].tolist() if row < len(value) else "nothing"
        raise UnsupportedModelError(
            "C1.10", f"{name} cannot be reproduced", value=str(value), **vars(place)
        )


def _arrays(m: Any) -> list[str]:
    names = [name for name in dir(m) if name.split("_")[0] in _KINDS and "_" in name]
    return [name for name in names if name not in _DERIVED | _REPORTED]


def _first_difference(c: Compiled, robot: Robot, plain: Any, name: str) -> int | None:
    """The first row in which an array differs from the rebuilt model's; None: in no row."""
    written, rebuilt = _normal(c.model, robot.root, name), _normal(plain, 1, name)
    if name == "dof_damping":  # folded or refused: both are decided by C2.5
        for joint in robot.joints:
            written[c.model.jnt_dofadr[joint]] = 0
    if len(written) != len(rebuilt):
        return min(len(written), len(rebuilt))
    if written.shape != rebuilt.shape:
        return 0
    same = (written == rebuilt).reshape(len(written), -1).all(axis=1)
    return None if same.all() else int(same.argmin())


def _normal(m: Any, root: int, name: str) -> Any:
    """A copy in which numbers without a meaning are equal: body ids, ranges that limit nothing."""
    values = getattr(m, name).copy()
    if name.endswith("_bodyid"):
        return values - root  # strangers of the world may stand before the robot
    if name.endswith("range"):
        limited = getattr(m, name.removesuffix("range") + "limited")
        values[~limited.astype(bool)] = 0
    return values
