"""Rules C1: what an actuator may be, judged on compiled arrays and once on its tag."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

from .mjcf_errors import InvalidModelError, UnsupportedModelError
from .mjcf_model import Actuator, Joint
from .mjcf_rules import Robot, ordered, symmetric
from .mjcf_source import Compiled, Place


def judge_drives(c: Compiled) -> None:
    """Kind, transmission and gear of every actuator. C1.1, C1.2, C1.3.

    Judged before the scene: a tendon is refused for the actuator that pulls it, say.
    """
    tags = c.source.children("actuator")
    for tag in tags:
        _judge_tag(c, tag)
    for index in range(c.model.nu):
        _judge_transmission(c, index, _place(c, _tag_of(c, tags, index), index))


def judge_actuators(
    c: Compiled, robot: Robot, joints: tuple[Joint, ...]
) -> tuple[tuple[Actuator, ...], tuple[str, ...]]:
    """The actuators, and what a user should know of them. C1.1, C1.4 to C1.9, C1.11."""
    tags = c.source.children("actuator")
    actuators: list[Actuator] = []
    notes: list[str] = []
    owner: dict[int, str] = {}
    for index in range(c.model.nu):
        tag = _tag_of(c, tags, index)
        place = _place(c, tag, index)
        joint = robot.joints.index(int(c.model.actuator_trnid[index, 0]))
        _judge_law(c, index, place)
        if joint in owner:
            raise UnsupportedModelError(
                "C1.9",
                f"joint {joints[joint].name} has two actuators",
                value=f"beside {owner[joint]}",
                **vars(place),
            )
        actuator = _actuator(c, index, joint, joints[joint], place)
        owner[joint] = actuator.name
        actuators.append(actuator)
        if actuator.kp == 1 and tag is not None and tag.get("kp") is None:
            notes.append(f"actuator {actuator.name}: kp is 1 and not written on its element")
    return tuple(actuators), tuple(notes)


def _judge_tag(c: Compiled, tag: ET.Element) -> None:
    """By tag, since a <general> can compile to the very arrays of a <position>, or nearly so,
    depending on the release of MuJoCo; the verdict must not."""
    if tag.tag != "position":
        raise UnsupportedModelError(
            "C1.1",
            "only position actuators have a counterpart",
            file=c.source.files.get(tag, c.source.main),
            element=tag.tag,
            name=tag.get("name", ""),
            value=tag.tag,
        )


def _tag_of(c: Compiled, tags: list[ET.Element], index: int) -> ET.Element | None:
    """The tag of a compiled actuator: by name, else by order where there are as many of both."""
    name = c.name("actuator", index)
    if name:
        return next((tag for tag in tags if tag.get("name") == name), None)
    return tags[index] if len(tags) == c.model.nu else None


def _place(c: Compiled, tag: ET.Element | None, index: int) -> Place:
    file = c.source.main if tag is None else c.source.files.get(tag, c.source.main)
    return Place(file, "position", c.name("actuator", index))


def _judge_transmission(c: Compiled, index: int, place: Place) -> None:
    m = c.model
    kind = c.word("mjtTrn", m.actuator_trntype[index])
    if kind != "joint":
        raise UnsupportedModelError("C1.2", "it drives something else", value=kind, **vars(place))
    joint = int(m.actuator_trnid[index, 0])
    shape = c.word("mjtJoint", m.jnt_type[joint])
    if shape not in ("hinge", "slide"):
        why = f"it drives a {shape} joint"
        raise UnsupportedModelError("C1.2", why, value=c.name("joint", joint), **vars(place))
    if m.actuator_gear[index].tolist() != [1, 0, 0, 0, 0, 0]:
        value = " ".join(repr(float(v)) for v in m.actuator_gear[index])
        raise UnsupportedModelError("C1.3", "it is geared", value=value, **vars(place))


def _judge_law(c: Compiled, index: int, place: Place) -> None:
    """force = kp ctrl - kp q - kv dq/dt and nothing else. C1.1, C1.5, C1.6, C1.7."""
    m = c.model
    dynamics = c.word("mjtDyn", m.actuator_dyntype[index])
    if dynamics != "none":
        raise UnsupportedModelError("C1.7", "it has a state", value=dynamics, **vars(place))
    gain, bias = m.actuator_gainprm[index].tolist(), m.actuator_biasprm[index].tolist()
    if (
        c.word("mjtGain", m.actuator_gaintype[index]) != "fixed"
        or c.word("mjtBias", m.actuator_biastype[index]) != "affine"
        or any(gain[1:])
        or any(bias[3:])
        or (bias[0], bias[1]) != (0, -gain[0])
    ):
        value = f"gainprm {gain[:3]} biasprm {bias[:3]}"
        raise UnsupportedModelError(
            "C1.1", "its force is no position law", value=value, **vars(place)
        )
    kp, kv = gain[0], -bias[2]
    if not (kp > 0 and math.isfinite(kp)):
        raise InvalidModelError(
            "C1.5", "it drives away or not at all", value=repr(kp), **vars(place)
        )
    if not (kv >= 0 and math.isfinite(kv)):
        raise InvalidModelError(
            "C1.6", "it would drive the motion on", value=repr(kv), **vars(place)
        )


def _actuator(c: Compiled, index: int, joint: int, driven: Joint, place: Place) -> Actuator:
    m = c.model
    limited, values = m.actuator_forcelimited[index], m.actuator_forcerange[index]
    force = symmetric("C1.4", "force limit", limited, values, place)
    limited, values = m.actuator_ctrllimited[index], m.actuator_ctrlrange[index]
    return Actuator(
        name=c.name("actuator", index) or driven.name,
        joint=joint,
        kp=float(m.actuator_gainprm[index, 0]),
        kv=abs(float(m.actuator_biasprm[index, 2])),  # abs: -0.0 is an ugly "none"
        force_range=(-force, force),
        ctrl_range=ordered("C1.11", "control range", limited, values, place),
    )
