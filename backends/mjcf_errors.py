"""The rules of the model contract, by number, and the errors that carry them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from ..ipc.errors import SceneError

# C1: actuators. C2: everything else. The number is what a message ends with and what tests go by.
RULES: Mapping[str, str] = {
    "C1.1": "every actuator is a <position>",
    "C1.2": "an actuator drives one hinge or slide joint",
    "C1.3": "the gear is 1",
    "C1.4": "a force range is symmetric",
    "C1.5": "kp is positive and finite",
    "C1.6": "kv is not negative, and finite",
    "C1.7": "an actuator has no dynamics of its own",
    "C1.9": "a joint has at most one actuator",
    "C1.10": "kp, kv, force range and control range say all there is about an actuator and its joint",
    "C1.11": "a control range is written low before high",
    "C2.1": "a body has at most one joint: hinge or slide; a free one on the robot's root only",
    "C2.2": "bodies and joints have names of letters, digits and underscores",
    "C2.3": "a joint's reference position is 0",
    "C2.4": "joints have no springs",
    "C2.5": "joints have no passive damping",
    "C2.6": "a joint's actuator force range is symmetric",
    "C2.7": "a joint range is written low before high",
    "C2.9": "rigid bodies and joints only, in still and empty space",
    "C2.10": "the scene is one robot",
    "C2.11": "the world holds at most one horizontal plane",
    "C2.12": "collision shapes are spheres, capsules, boxes, cylinders and meshes",
    "C2.15": "a keyframe has one number for each coordinate",
    "C2.16": "the default keyframe exists",
    "C2.17": "the file is well-formed and compiles",
    "C2.18": "no part of the physics is switched off",
}


class Verdict(enum.Enum):
    """Why a model is refused."""

    UNSUPPORTED = "unsupported"  # valid MJCF that the target simulators cannot reproduce
    INVALID = "invalid"  # not what its author can have meant, or not MJCF at all


class ModelContractError(SceneError):
    """A model is refused. Raised as one of its two children, which agree with `verdict`.

    `rule` is a key of RULES; `file`, `element`, `name` and `value` say where and what, each ""
    where there is nothing to say.
    """

    verdict: ClassVar[Verdict]

    def __init__(
        self,
        rule: str,
        why: str,
        *,
        file: str | Path,
        element: str = "",
        name: str = "",
        value: str = "",
    ) -> None:
        self.rule = rule
        self.file = str(file)
        self.element = element
        self.name = name
        self.value = value
        where = self.file
        if element:
            where += f": <{element} name={name!r}>" if name else f": <{element}>"
        shown = f", found {value}" if value else ""
        super().__init__(f"{where}: {why}{shown} (rule {rule}: {RULES[rule]})")


class UnsupportedModelError(ModelContractError, NotImplementedError):
    """The model is valid MJCF, and asks for what the target simulators cannot reproduce."""

    verdict = Verdict.UNSUPPORTED


class InvalidModelError(ModelContractError, ValueError):
    """The model does not compile, or compiles to something its author cannot have meant."""

    verdict = Verdict.INVALID
