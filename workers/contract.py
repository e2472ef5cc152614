"""The contract file that the host writes beside a flat MJCF (`backends/mjcf_contract.py`), as arrays.

For simulators that import a model and lose part of it: what the host's MuJoCo compiled is the truth, and the
worker tells its engine. Quaternions wxyz, SI units, radians; bodies without the world, joints without the
free joint, both depth first.
"""

import hashlib
import json
import os
from typing import Any, Dict, List, Tuple

import numpy as np

from ..ipc.errors import SceneError, UsageError
from ..ipc.layout import Sizes
from ..ipc.messages import Init, ModelFacts

CONTRACT_VERSION = 1
OPTION = "contract"  # the name under which INIT's options carry the path


class Contract:
    """One model. Everything that `backends/mjcf.py` promises about it, checked for its shape alone."""

    def __init__(self, content: Dict[str, Any]) -> None:
        if content.get("version") != CONTRACT_VERSION:
            raise UsageError(
                f"the contract file has version {content.get('version')!r}; this worker reads "
                f"{CONTRACT_VERSION}"
            )
        self.path = str(content["path"])
        self.timestep = float(content["timestep"])  # s
        self.gravity: Tuple[float, ...] = tuple(content["gravity"])
        self.floating = bool(content["floating_base"])
        bodies: List[Dict[str, Any]] = content["bodies"]
        joints: List[Dict[str, Any]] = content["joints"]
        drives: List[Dict[str, Any]] = content["actuators"]
        self.body_names = tuple(str(body["name"]) for body in bodies)
        self.joint_names = tuple(str(joint["name"]) for joint in joints)
        self.actuator_names = tuple(str(drive["name"]) for drive in drives)

        self.parent: Tuple[int, ...] = tuple(body["parent"] for body in bodies)  # -1: the world
        self.body_pos = _array(bodies, "pos", 3)  # in the parent's frame
        self.body_quat = _array(bodies, "quat", 4)
        self.mass = _array(bodies, "mass")  # kg
        self.com = _array(bodies, "com", 3)  # m, in the body's frame
        self.inertia = _array(bodies, "inertia", 3)  # kg m^2 about the principal axes
        self.inertia_quat = _array(bodies, "inertia_quat", 4)  # of those axes in the body's frame

        self.joint_slides = tuple(joint["type"] == "slide" for joint in joints)
        self.joint_body: Tuple[int, ...] = tuple(joint["body"] for joint in joints)
        self.joint_axis = _array(joints, "axis", 3)
        self.joint_pos = _array(joints, "pos", 3)
        self.joint_range = _array(joints, "range", 2)
        self.armature = _array(joints, "armature")
        self.frictionloss = _array(joints, "frictionloss")

        self.actuator_joint = np.array([drive["joint"] for drive in drives], np.intp)
        self.kp, self.kv = _array(drives, "kp"), _array(drives, "kv")
        self.force_range = _array(drives, "force_range", 2)
        self.ctrl_range = _array(drives, "ctrl_range", 2)

        floor = content["floor"]
        self.floor_height = None if floor is None else float(floor["height"])
        self.floor_friction = 1.0 if floor is None else float(floor["friction"][0])
        self.shape_friction = np.array(content["shape_friction"], np.float64)
        self.default_qpos = np.array(content["default_qpos"], np.float64)
        self.default_qvel = np.array(content["default_qvel"], np.float64)
        self.default_ctrl = np.array(content["default_ctrl"], np.float64)
        self.not_reproduced: Tuple[str, ...] = tuple(content["not_reproduced"])
        self.notes: Tuple[str, ...] = tuple(content["notes"])

    @property
    def sizes(self) -> Tuple[int, int, int, int]:
        """nq, nv, nu, nbody"""
        root_q, root_v = (7, 6) if self.floating else (0, 0)
        joints = len(self.joint_names)
        return root_q + joints, root_v + joints, len(self.actuator_names), len(self.body_names)

    def inertia_matrices(self) -> np.ndarray:
        """(bodies, 3, 3) kg m^2, about the centre of mass, along the body's own axes."""
        turn = matrices(self.inertia_quat)
        return turn @ (self.inertia[:, :, None] * turn.transpose(0, 2, 1))

    def facts(
        self, init: Init, env_origins: np.ndarray, not_reproduced: Tuple[str, ...]
    ) -> ModelFacts:
        """The answer to INIT. `env_origins` (num_envs, 3) m; `not_reproduced` beside the contract's."""
        return ModelFacts(
            sizes=Sizes(init.num_envs, *self.sizes),
            timestep=init.dt or self.timestep,
            floating_base=self.floating,
            body_names=self.body_names,
            joint_names=self.joint_names,
            actuator_names=self.actuator_names,
            default_qpos=_floats(self.default_qpos),
            default_qvel=_floats(self.default_qvel),
            default_ctrl=_floats(self.default_ctrl),
            joint_range=_floats(self.joint_range),
            ctrl_range=_floats(self.ctrl_range),
            kp=_floats(self.kp),
            kv=_floats(self.kv),
            force_range=_floats(self.force_range),
            env_origins=env_origins.astype("<f4").tobytes() if env_origins.any() else b"",
            not_reproduced=self.not_reproduced + not_reproduced,
        )


def read_contract(init: Init) -> Contract:
    """The contract of INIT's scene. SceneError when it is missing or damaged."""
    path = str(init.options.get(OPTION, ""))
    if not path:
        raise UsageError(f"INIT's options carry no {OPTION!r}: the host writes it beside the scene")
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise SceneError(f"the contract file {path}: {error.strerror}") from error
    if hashlib.sha256(content).hexdigest() != os.path.splitext(os.path.basename(path))[0]:
        raise SceneError(
            f"the contract file {path} is damaged: its content is not what its name says"
        )
    return Contract(json.loads(content.decode("utf-8")))


def matrices(quats: np.ndarray) -> np.ndarray:
    """(n, 3, 3) rotation matrices of unit quaternions (n, 4) wxyz."""
    w, x, y, z = np.moveaxis(quats, -1, 0)
    rows = (
        (1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
        (2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
        (2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
    )
    return np.stack([np.stack(row, axis=-1) for row in rows], axis=-2)


def _array(records: List[Dict[str, Any]], name: str, *shape: int) -> np.ndarray:
    return np.array([record[name] for record in records], np.float64).reshape(-1, *shape)


def _floats(values: np.ndarray) -> Tuple[float, ...]:
    return tuple(map(float, np.ravel(values)))
