"""From an MJCF file to a compiled MuJoCo model, and from that to `ModelFacts`; no time passes here.

Shared by the simulators that are built on MuJoCo's model (`mujoco_worker`, `mjwarp_worker`).
"""

# pyright: reportAttributeAccessIssue=false
# (MuJoCo makes its names at run time; its stubs do not list them.)

import math
import os
import re
from typing import Any, List, NamedTuple, Tuple

import mujoco
import numpy as np

from ..ipc.errors import SceneError, UsageError
from ..ipc.layout import Sizes
from ..ipc.messages import ModelFacts

# What the XML reader says of an element, attribute or keyword that this version does not have.
_UNKNOWN = re.compile(
    r"unrecogni[sz]ed|schema violation|unknown (element|attribute)|invalid keyword", re.I
)
_SCALAR_JOINTS = (int(mujoco.mjtJoint.mjJNT_HINGE), int(mujoco.mjtJoint.mjJNT_SLIDE))
_FREE = int(mujoco.mjtJoint.mjJNT_FREE)


def load(path: str, dt: float, contact_forces: bool = False) -> Any:
    """The compiled MjModel. `dt` in seconds replaces the file's time step when it is above zero.

    `contact_forces`: make mj_step compute `cfrc_ext`, which it does only when a sensor needs it: the
    model gets one sensor more, at the end of `sensordata`. Sensors do not act on the motion.
    """
    if not os.path.isfile(path):
        raise SceneError(f"the scene {path} does not exist or is not a file")
    try:
        if contact_forces:
            spec = mujoco.MjSpec.from_file(path)
            spec.add_sensor(
                name="outboard_needs_cfrc_ext",
                type=mujoco.mjtSensor.mjSENS_FRAMELINACC,
                objtype=mujoco.mjtObj.mjOBJ_BODY,
                objname="world",
            )
            model = spec.compile()
            model.opt.disableflags &= ~int(mujoco.mjtDisableBit.mjDSBL_SENSOR)
        else:
            model = mujoco.MjModel.from_xml_path(path)
    except Exception as error:  # ValueError, FatalError, ...: each version has its own
        raise SceneError(_why_not(path, str(error))) from error
    if dt > 0:
        model.opt.timestep = dt
    return model


def _why_not(path: str, said: str) -> str:
    text = "the scene {} does not compile: {}".format(path, " ".join(said.split()))
    if _UNKNOWN.search(said):
        text += (
            f"; this worker's MuJoCo {mujoco.__version__} does not know this: the file seems to need "
            "a newer MuJoCo (or it is a misspelling)"
        )
    return text


def keyframe_index(model: Any, name: str) -> int:
    """The keyframe that is the initial state: the one called `name`, else the only one; -1, which
    stands for the model's reference pose, when there is none or the choice is not clear."""
    names = [_name(model, mujoco.mjtObj.mjOBJ_KEY, i) for i in range(model.nkey)]
    if name:
        if name not in names:
            listed = ", ".join(map(repr, names)) or "none at all"
            raise UsageError(f"the scene has no keyframe {name!r}; it has {listed}")
        return names.index(name)
    return 0 if model.nkey == 1 else -1


class Targets(NamedTuple):
    """Which actuators follow a position, and which coordinate of `qpos` that is."""

    actuator: np.ndarray  # (k,) int
    qpos: np.ndarray  # (k,) int
    gear: np.ndarray  # (k,)

    def at(self, qpos: np.ndarray, nu: int) -> np.ndarray:
        """(n, nu): the ctrl at which these actuators rest in `qpos` (n, nq); the others at zero."""
        ctrl = np.zeros((len(qpos), nu))
        ctrl[:, self.actuator] = qpos[:, self.qpos] * self.gear
        return ctrl


def is_position(model: Any) -> np.ndarray:
    """(nu,) bool: the actuators that are what `<position>` compiles to, on a hinge or slide."""
    joint = np.isin(model.actuator_trntype, (int(mujoco.mjtTrn.mjTRN_JOINT),))
    joint[joint] = np.isin(model.jnt_type[model.actuator_trnid[joint, 0]], _SCALAR_JOINTS)
    gain, bias = model.actuator_gainprm, model.actuator_biasprm
    return (
        joint
        & (model.actuator_gaintype == int(mujoco.mjtGain.mjGAIN_FIXED))
        & (model.actuator_biastype == int(mujoco.mjtBias.mjBIAS_AFFINE))
        & (gain[:, 0] == -bias[:, 1])
        & (bias[:, 0] == 0)
    )


def targets(model: Any) -> Targets:
    which = np.flatnonzero(is_position(model))
    joints = model.actuator_trnid[which, 0]
    return Targets(which, model.jnt_qposadr[joints], model.actuator_gear[which, 0])


def facts(model: Any, num_envs: int, keyframe: int, not_reproduced: Tuple[str, ...]) -> ModelFacts:
    """ModelFacts from compiled arrays: default classes, angle units and auto-limits are resolved."""
    joints = [j for j in range(model.njnt) if model.jnt_type[j] != _FREE]
    if keyframe >= 0:
        qpos, qvel = model.key_qpos[keyframe], model.key_qvel[keyframe]
        ctrl = model.key_ctrl[keyframe]
    else:
        # mj_resetData leaves ctrl at zero; a target that holds the pose is what a caller expects
        qpos, qvel = model.qpos0, np.zeros(model.nv)
        ctrl = targets(model).at(qpos[None], model.nu)[0]
    affine = model.actuator_biastype == int(mujoco.mjtBias.mjBIAS_AFFINE)
    kp = np.where(affine, model.actuator_gainprm[:, 0], 0.0)
    kv = np.where(affine, -model.actuator_biasprm[:, 2], 0.0)
    return ModelFacts(
        sizes=Sizes(num_envs, model.nq, model.nv, model.nu, model.nbody - 1),
        timestep=float(model.opt.timestep),
        floating_base=bool(model.njnt and model.jnt_type[0] == _FREE),
        body_names=_names(model, mujoco.mjtObj.mjOBJ_BODY, "body", range(1, model.nbody)),
        joint_names=_names(model, mujoco.mjtObj.mjOBJ_JOINT, "joint", joints),
        actuator_names=_names(model, mujoco.mjtObj.mjOBJ_ACTUATOR, "actuator", range(model.nu)),
        default_qpos=_floats(qpos),
        default_qvel=_floats(qvel),
        default_ctrl=_floats(ctrl),
        joint_range=_floats(_limits(model.jnt_range, model.jnt_limited)[joints]),
        ctrl_range=_floats(_limits(model.actuator_ctrlrange, model.actuator_ctrllimited)),
        kp=_floats(kp),
        kv=_floats(kv + 0.0),  # -0.0 would print as a gain that damps backwards
        force_range=_floats(_force_limits(model)),
        env_origins=b"",
        not_reproduced=not_reproduced,
    )


def notes(model: Any, keyframe: int) -> List[str]:
    """What a user should know of this model, whichever simulator on MuJoCo runs it."""
    said: List[str] = []
    others = np.flatnonzero(~is_position(model))
    if len(others):
        names = _names(model, mujoco.mjtObj.mjOBJ_ACTUATOR, "actuator", others)
        said.append(
            "not a position actuator, so ctrl is no joint target there: {}".format(", ".join(names))
        )
    if model.nkey > 1 and keyframe < 0:
        said.append(
            f"the scene has {model.nkey} keyframes and none was named: environments start in the model's "
            "reference pose"
        )
    return said


def _limits(ranges: np.ndarray, limited: np.ndarray) -> np.ndarray:
    """(n, 2): `ranges` where `limited`, else -inf, +inf."""
    return np.where(limited[:, None].astype(bool), ranges, (-math.inf, math.inf))


def _force_limits(model: Any) -> np.ndarray:
    """(nu, 2): the actuator's own limit, narrowed by its joint's `actuatorfrcrange`."""
    limits = _limits(model.actuator_forcerange, model.actuator_forcelimited)
    joint_limits = _limits(model.jnt_actfrcrange, model.jnt_actfrclimited)
    for i in np.flatnonzero(is_position(model)):
        low, high = joint_limits[model.actuator_trnid[i, 0]]
        limits[i] = max(limits[i, 0], low), min(limits[i, 1], high)
    return limits


def _name(model: Any, kind: Any, index: int) -> str:
    return mujoco.mj_id2name(model, int(kind), int(index)) or ""


def _names(model: Any, kind: Any, stem: str, indices: Any) -> Tuple[str, ...]:
    """Names of `indices`; a nameless one is called by its kind and MuJoCo's index, as `body7`."""
    given = [_name(model, kind, i) for i in indices]
    names: List[str] = []
    for index, name in zip(indices, given):
        name = name or f"{stem}{index}"
        while not given[len(names)] and name in given:
            name += "_"
        names.append(name)
    return tuple(names)


def _floats(values: np.ndarray) -> Tuple[float, ...]:
    return tuple(map(float, np.ravel(values)))
