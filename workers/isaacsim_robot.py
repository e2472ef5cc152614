"""The robot's configuration, and what of the model reached the engine: names aligned, numbers read back.

Drives are set through the actuator configuration, in SI units and radians: a USD drive is per degree, and the
importer writes it in the wrong unit. PhysX orders joints and bodies by its own rule, so all is by name.
Imported after Kit has started.
"""

import math
import re
from typing import Any, Dict, List, Tuple

import isaaclab.sim as sim_utils  # type: ignore[import-not-found]
import numpy as np
import torch
from isaaclab.actuators import ImplicitActuatorCfg  # type: ignore[import-not-found]
from isaaclab.assets import ArticulationCfg  # type: ignore[import-not-found]

from ..ipc.errors import SceneError
from .contract import Contract, matrices
from .isaacsim_app import major

NO_LIMIT = 1e9  # N or N m; an infinite effort is not one to this engine
NO_CAP = 1e6  # rad/s or m/s: above what a joint reaches, so that no hidden cap exists
_RTOL = 1e-4  # how well float32 gives back what it was given


def articulation_cfg(scene: Any, prim_path: str) -> Any:
    options, contract = scene.options, scene.contract
    spawn = sim_utils.UsdFileCfg(
        usd_path=scene.usd,
        activate_contact_sensors="contact_force" in scene.init.publish,
        rigid_props=sim_utils.RigidBodyPropertiesCfg(
            disable_gravity=False,
            linear_damping=0.0,
            angular_damping=0.0,
            max_linear_velocity=options["max_linear_velocity"],
            max_angular_velocity=math.degrees(options["max_angular_velocity"]),  # USD's unit
            max_depenetration_velocity=options["max_depenetration_velocity"],
        ),
        collision_props=sim_utils.CollisionPropertiesCfg(
            contact_offset=options["contact_offset"], rest_offset=options["rest_offset"]
        ),
        articulation_props=sim_utils.ArticulationRootPropertiesCfg(
            enabled_self_collisions=bool(options["self_collision"]),
            solver_position_iteration_count=options["solver_position_iteration_count"],
            solver_velocity_iteration_count=options["solver_velocity_iteration_count"],
            sleep_threshold=0.0,  # a robot that stands still is still a robot
            stabilization_threshold=0.0,
        ),
    )
    return ArticulationCfg(
        prim_path=prim_path,
        # Without it the importer's empty `worldBody` makes two roots, which Articulation refuses.
        articulation_root_prim_path=scene.paths.root,
        spawn=spawn,
        init_state=_init_state(contract),
        soft_joint_pos_limit_factor=1.0,
        actuators=_actuators(contract),
    )


def _init_state(contract: Contract) -> Any:
    """Zero, the default, may lie outside a joint's range, which Articulation refuses."""
    start = contract.default_qpos[7:] if contract.floating else contract.default_qpos
    low, high = contract.joint_range.T if len(start) else (start, start)
    pose: Dict[str, Any] = {}
    if contract.floating:
        at = [float(value) for value in contract.default_qpos[:7]]
        pose = {"pos": tuple(at[:3]), "rot": tuple(at[3:])}
    return ArticulationCfg.InitialStateCfg(
        joint_pos=_by_joint(contract, np.clip(start, low, high)), joint_vel={".*": 0.0}, **pose
    )


def _actuators(contract: Contract) -> Dict[str, Any]:
    """One group of all joints."""
    if not contract.joint_names:
        return {}
    stiffness, damping, effort = _drives(contract)
    group = ImplicitActuatorCfg(
        joint_names_expr=[_exactly(name) for name in contract.joint_names],
        stiffness=_by_joint(contract, stiffness),
        damping=_by_joint(contract, damping),
        effort_limit_sim=_by_joint(contract, effort),
        velocity_limit_sim=NO_CAP,
        armature=_by_joint(contract, contract.armature),
        friction=_by_joint(contract, contract.frictionloss),
        dynamic_friction=_by_joint(contract, contract.frictionloss),
        viscous_friction=0.0,
    )
    return {"joints": group}


def _drives(contract: Contract) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Stiffness, damping and effort limit of every joint; gains of zero where there is no actuator. The law
    is effort = clip(stiffness (target - q) - damping dq/dt)."""
    joints, driven = len(contract.joint_names), contract.actuator_joint
    stiffness, damping, effort = np.zeros(joints), np.zeros(joints), np.full(joints, NO_LIMIT)
    stiffness[driven], damping[driven] = contract.kp, contract.kv
    effort[driven] = np.minimum(contract.force_range[:, 1], NO_LIMIT)
    return stiffness, damping, effort


def _exactly(name: str) -> str:
    """Isaac Lab takes names as regular expressions."""
    return "^" + re.escape(name) + "$"


def _by_joint(contract: Contract, values: np.ndarray) -> Dict[str, float]:
    return {_exactly(name): float(value) for name, value in zip(contract.joint_names, values)}


# -- what came of it -------------------------------------------------------------------------------


def finish(scene: Any) -> None:
    """After the reset: align the names, correct and compare what can be read back."""
    robot, contract = scene.robot, scene.contract
    scene.joint_ids = _permutation("joint", contract.joint_names, robot.joint_names)
    scene.body_ids = _permutation("body", contract.body_names, robot.body_names)
    if bool(robot.is_fixed_base) == contract.floating:
        kind = "fixed" if robot.is_fixed_base else "floating"
        raise SceneError(f"Isaac Sim imported {contract.path} with a {kind} base")
    if contract.joint_names:
        _compare_drives(scene)
        _write_limits(scene)
    _write_bodies(scene)
    _write_friction(scene)


def _permutation(kind: str, ours: Tuple[str, ...], theirs: List[str]) -> List[int]:
    """Where each of ours is in the engine's order. SceneError with both lists when the sets differ."""
    theirs = [str(name) for name in theirs]
    if sorted(ours) != sorted(theirs):
        raise SceneError(
            f"Isaac Sim names the {kind} list differently.\n  model: {', '.join(ours)}\n"
            f"  Isaac Sim: {', '.join(theirs)}"
        )
    return [theirs.index(name) for name in ours]


def _joints(contract: Contract, wrong: np.ndarray) -> str:
    return ", ".join(contract.joint_names[i] for i in np.flatnonzero(wrong))


def _read(scene: Any, tensor: Any) -> np.ndarray:
    """(num_envs, joints, ...) of the engine in our order of joints."""
    return tensor.cpu().numpy()[:, scene.joint_ids]


def _compare_drives(scene: Any) -> None:
    contract, data = scene.contract, scene.robot.data
    stiffness, damping, effort = _drives(contract)
    for name, tensor, wanted in (
        ("stiffness", data.joint_stiffness, stiffness),
        ("damping", data.joint_damping, damping),
        ("effort limit", data.joint_effort_limits, effort),
        ("armature", data.joint_armature, contract.armature),
    ):
        good = np.isclose(_read(scene, tensor), wanted, rtol=_RTOL, atol=1e-6)
        wrong = np.logical_not(good.all(axis=0))
        if wrong.any():
            raise RuntimeError(f"Isaac Sim did not keep the {name} of: {_joints(contract, wrong)}")
    if not (contract.frictionloss > 0).any():
        return
    got = _read(scene, data.joint_friction_coeff)
    if not np.isclose(got, contract.frictionloss, rtol=_RTOL, atol=1e-6).all():
        scene.not_reproduced.append("frictionloss: not kept by the engine")
    elif major(scene.version) < 5:
        scene.not_reproduced.append(
            "frictionloss: the same number; before Isaac Sim 5 PhysX takes it as a coefficient of the load "
            "on the joint"
        )


def _write_limits(scene: Any) -> None:
    """As the importer should have set them; what was kept is said."""
    contract, robot = scene.contract, scene.robot
    limited = np.isfinite(contract.joint_range[:, 1])
    if not limited.any():
        return
    limits = robot.data.joint_pos_limits.clone()
    which = torch.as_tensor(scene.joint_ids, device=scene.device)[torch.as_tensor(limited)]
    wanted = contract.joint_range[limited].astype(np.float32)
    limits[:, which] = torch.as_tensor(wanted, device=scene.device)
    robot.write_joint_position_limit_to_sim(limits, warn_limit_violation=False)
    kept = _read(scene, robot.root_physx_view.get_dof_limits())[:, limited]
    wrong = np.zeros(len(limited), bool)
    wrong[limited] = ~np.isclose(kept, wanted, rtol=_RTOL, atol=1e-6).all(axis=(0, 2))
    if wrong.any():
        lost = _joints(contract, wrong)
        scene.not_reproduced.append(f"joint limits: not kept by the engine: {lost}")
    else:
        scene.notes.append(f"joint limits: {int(limited.sum())} written and read back")


def _write_bodies(scene: Any) -> None:
    """Mass, centre of mass and inertia: compared, written where the importer lost one, compared again.
    These calls of the view take tensors and indices in host memory, on the GPU pipeline too."""
    view, contract = scene.robot.root_physx_view, scene.contract
    if not _wrong_bodies(scene):
        return
    everyone = torch.arange(scene.init.num_envs, dtype=torch.int32)
    masses, coms, inertias = view.get_masses(), view.get_coms(), view.get_inertias()
    ids = scene.body_ids
    masses[:, ids] = torch.as_tensor(contract.mass, dtype=torch.float32)
    turn = contract.inertia_quat[:, [1, 2, 3, 0]]  # the view's order is xyzw
    rows = np.concatenate([contract.com, turn], axis=1)
    coms[:, ids] = torch.as_tensor(rows, dtype=torch.float32)
    diagonal = contract.inertia[:, :, None] * np.eye(3)
    inertias[:, ids] = torch.as_tensor(diagonal.reshape(-1, 9), dtype=torch.float32)
    view.set_masses(masses, everyone)
    view.set_coms(coms, everyone)
    view.set_inertias(inertias, everyone)
    wrong = _wrong_bodies(scene)
    if wrong:
        raise RuntimeError(
            f"Isaac Sim did not keep the mass, centre of mass or inertia of: {', '.join(wrong)}"
        )


def _wrong_bodies(scene: Any) -> List[str]:
    """Names of the bodies whose mass, centre of mass or inertia is not the contract's, in any environment."""
    view, contract, ids = scene.robot.root_physx_view, scene.contract, scene.body_ids
    masses = view.get_masses().numpy()[:, ids]
    coms = view.get_coms().numpy()[:, ids].astype(np.float64)
    inertias = view.get_inertias().numpy()[:, ids].reshape(len(masses), -1, 3, 3)
    # Whether an engine says principal axes and a turn, or a full matrix and none: this is the same.
    quats = coms[..., [6, 3, 4, 5]].reshape(-1, 4)
    turn = matrices(quats).reshape(inertias.shape)
    full = turn @ inertias @ turn.transpose(0, 1, 3, 2)
    wanted = contract.inertia_matrices()
    scale = np.abs(wanted).max(axis=(1, 2))[:, None, None]
    good = np.isclose(masses, contract.mass, rtol=_RTOL, atol=0)
    good &= np.isclose(coms[..., :3], contract.com, rtol=0, atol=1e-5).all(axis=2)
    good &= (np.abs(full - wanted) <= 10 * _RTOL * scale).all(axis=(2, 3))
    return [name for i, name in enumerate(contract.body_names) if not good[:, i].all()]


def _write_friction(scene: Any) -> None:
    """One number for all shapes: the engine's order of shapes is not the model's. (n, shapes, 3): static,
    dynamic, restitution; in host memory."""
    view, contract = scene.robot.root_physx_view, scene.contract
    if not len(contract.shape_friction):
        return
    friction = float(contract.shape_friction.max())
    if (contract.shape_friction != friction).any():
        scene.not_reproduced.append(
            f"friction per shape: every shape has the largest, {friction:g}"
        )
    materials = view.get_material_properties()
    materials[..., :2], materials[..., 2] = friction, 0.0
    view.set_material_properties(materials, torch.arange(scene.init.num_envs, dtype=torch.int32))
    if not np.allclose(view.get_material_properties().numpy()[..., :2], friction, rtol=_RTOL):
        scene.not_reproduced.append("friction of shapes: not kept by the engine")
