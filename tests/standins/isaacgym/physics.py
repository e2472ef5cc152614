"""The stand-in's physics: one MjData per environment, and the state in Isaac Gym's own conventions.

Rows of 13: position relative to the environment's origin, quaternion xyzw, velocity of the centre of mass
and angular velocity, both along world axes.
"""

import copy
import xml.etree.ElementTree as ET
from typing import Any, Dict, List, Tuple

import mujoco  # type: ignore[import-untyped]
import numpy as np

from .importer import Asset

mj: Any = mujoco
_POS_MODE = 1


class Actor:
    """One robot in one environment, as set up before prepare_sim."""

    def __init__(self, asset: Asset, pose: Any, group: int, mask: int) -> None:
        self.asset, self.group, self.mask = asset, group, mask
        self.pos = np.array([pose.p.x, pose.p.y, pose.p.z])
        self.quat = np.array([pose.r.w, pose.r.x, pose.r.y, pose.r.z])
        self.dofs = asset.dofs.copy()
        self.masses, self.coms = asset.masses.copy(), asset.coms.copy()
        self.inertias = asset.inertias.copy()
        self.frictions = list(asset.frictions)

    def key(self) -> Tuple[Any, ...]:
        """Actors with the same key share a compiled model."""
        parts = (self.dofs, self.masses, self.coms, self.inertias, self.pos, self.quat)
        arrays = tuple(part.tobytes() for part in parts)
        return (*arrays, tuple(self.frictions), self.mask != 0, id(self.asset))


class World:
    """What is the same for all environments."""

    def __init__(self, params: Any, ground: Any) -> None:
        gravity = params.gravity
        self.gravity = np.array([gravity.x, gravity.y, gravity.z])
        self.timestep, self.substeps = params.dt / params.substeps, params.substeps
        self.ground = ground


def compile_actor(actor: Actor, world: World) -> Any:
    """The MuJoCo model of an actor with everything that was set on it."""
    root = copy.deepcopy(actor.asset.root)
    gravity = np.zeros(3) if actor.asset.options.disable_gravity else world.gravity
    option = ET.SubElement(root, "option", timestep=repr(world.timestep), gravity=_text(gravity))
    option.set("integrator", "implicitfast")
    scene = root.find("worldbody")
    assert scene is not None
    base = scene.find("body")
    assert base is not None
    if actor.asset.fixed:
        base.set("pos", _text(actor.pos))
        base.set("quat", _text(actor.quat))
    _write_bodies(actor, scene)
    _write_joints(actor, root)
    collides = "1" if actor.mask == 0 else "0"
    for geom, friction in zip(scene.iter("geom"), actor.frictions):
        geom.set("contype", collides)
        geom.set("conaffinity", "1")
        rest = geom.get("friction", "1 0.005 0.0001").split()[1:]
        geom.set("friction", " ".join([repr(friction), *rest]))
    if world.ground is not None:
        normal = world.ground.normal
        zaxis = _text(np.array([normal.x, normal.y, normal.z]))
        at = _text(-world.ground.distance * np.array([normal.x, normal.y, normal.z]))
        ET.SubElement(
            scene, "geom", type="plane", size="0 0 1", zaxis=zaxis, pos=at, contype="1",
            conaffinity="0", friction=repr(float(world.ground.static_friction)),
        )  # fmt: skip
    model = mj.MjModel.from_xml_string(ET.tostring(root, encoding="unicode"), actor.asset.files)
    model.opt.timestep = world.timestep
    return model


def _write_bodies(actor: Actor, scene: ET.Element) -> None:
    for i, body in enumerate(scene.iter("body")):
        for old in body.findall("inertial"):
            body.remove(old)
        inertia = actor.inertias[i]
        full = [inertia[r, c] for r, c in ((0, 0), (1, 1), (2, 2), (0, 1), (0, 2), (1, 2))]
        values = {"pos": _text(actor.coms[i]), "mass": repr(float(actor.masses[i]))}
        body.append(ET.Element("inertial", {**values, "fullinertia": _text(np.array(full))}))


def _write_joints(actor: Actor, root: ET.Element) -> None:
    scene = root.find("worldbody")
    assert scene is not None
    actuators = ET.SubElement(root, "actuator")
    for joint, props in zip(scene.iter("joint"), actor.dofs):
        limited = bool(props["hasLimits"])
        joint.set("limited", "true" if limited else "false")
        if limited:
            joint.set("range", _text(_angles(root, joint, [props["lower"], props["upper"]])))
        joint.set("armature", repr(float(props["armature"])))
        joint.set("frictionloss", repr(float(props["friction"])))
        if _driven(props):
            effort = float(props["effort"])
            ET.SubElement(
                actuators, "position", joint=joint.get("name", ""), forcelimited="true",
                kp=repr(float(props["stiffness"])), kv=repr(float(props["damping"])),
                forcerange=f"{-effort!r} {effort!r}",
            )  # fmt: skip


def _driven(props: Any) -> Any:
    return (props["driveMode"] == _POS_MODE) & ((props["stiffness"] > 0) | (props["damping"] > 0))


def _angles(root: ET.Element, joint: ET.Element, values: List[float]) -> np.ndarray:
    compiler = root.find("compiler")
    degrees = compiler is not None and compiler.get("angle", "degree") == "degree"
    turns = degrees and joint.get("type", "hinge") == "hinge"
    return np.degrees(values) if turns else np.array(values)


def _text(values: np.ndarray) -> str:
    return " ".join(repr(float(value)) for value in values)


def rotation(quat: np.ndarray) -> np.ndarray:
    out = np.zeros(9)
    mj.mju_quat2Mat(out, quat)
    return out.reshape(3, 3)


class Robots:
    """All environments. The four arrays are the engine's own state; nothing of it is seen without a
    refresh."""

    def __init__(self, actors: List[Actor], world: World, frozen: bool) -> None:
        n, asset = len(actors), actors[0].asset
        self.bodies, self.joints = len(asset.body_names), len(asset.dof_names)
        self.fixed, self.substeps, self.actors = asset.fixed, world.substeps, actors
        self.root = np.zeros((n, 13), np.float32)
        self.dof = np.zeros((n, self.joints, 2), np.float32)
        self.body = np.zeros((n, self.bodies, 13), np.float32)
        self.contact = np.zeros((n, self.bodies, 3), np.float32)
        self.targets = np.zeros((n, self.joints), np.float32)
        self.wrench = np.zeros((n, self.bodies, 6), np.float32)
        self.damping = float(asset.options.angular_damping)
        self.root[:, 6] = self.body[:, :, 6] = 1.0
        self.datas: List[Any] = []
        models: Dict[Any, Any] = {}
        for i, actor in enumerate(actors):
            self.root[i, :3], self.root[i, 3:7] = actor.pos, actor.quat[[1, 2, 3, 0]]
            if frozen:
                continue
            if actor.key() not in models:
                models[actor.key()] = compile_actor(actor, world)
            model = models[actor.key()]
            data = mj.MjData(model)
            self.datas.append((model, data))
            if not self.fixed:
                data.qpos[:3], data.qpos[3:7] = actor.pos, actor.quat
            mj.mj_forward(model, data)

    # -- written by setters ------------------------------------------------------------------------

    def put_root(self, i: int, row: np.ndarray) -> None:
        self.root[i] = row
        if self.datas and not self.fixed:
            model, data = self.datas[i]
            row = row.astype(np.float64)
            quat = row[[6, 3, 4, 5]]
            turn = rotation(quat)
            arm = turn @ model.body_ipos[1]
            data.qpos[:3], data.qpos[3:7] = row[:3], quat
            data.qvel[:3] = row[7:10] - np.cross(row[10:], arm)
            data.qvel[3:6] = turn.T @ row[10:]
            data.qacc_warmstart[:] = 0

    def put_dof(self, i: int, rows: np.ndarray) -> None:
        self.dof[i] = rows
        if self.datas:
            _, data = self.datas[i]
            data.qpos[-self.joints :], data.qvel[-self.joints :] = rows[:, 0], rows[:, 1]
            data.qacc_warmstart[:] = 0

    # -- time ----------------------------------------------------------------------------------------

    def simulate(self) -> None:
        for i, (model, data) in enumerate(self.datas):
            if model.nu:
                data.ctrl[:] = self.targets[i][_driven(self.actors[i].dofs)]
            data.xfrc_applied[1 : self.bodies + 1] = self.wrench[i]
            for _ in range(self.substeps):
                mj.mj_step(model, data)
                if self.damping and not self.fixed:
                    data.qvel[3:6] *= max(0.0, 1 - self.damping * model.opt.timestep)
            self._observe(i, model, data)
        self.wrench[:] = 0

    def _observe(self, i: int, model: Any, data: Any) -> None:
        mj.mj_rnePostConstraint(model, data)
        self.contact[i] = data.cfrc_ext[1 : self.bodies + 1, 3:]
        mj.mj_kinematics(model, data)
        mj.mj_comPos(model, data)
        mj.mj_comVel(model, data)
        spin, moved = data.cvel[1:, :3], data.cvel[1:, 3:]
        arm = data.xipos[1:] - data.subtree_com[1]
        rows = self.body[i]
        rows[:, :3], rows[:, 3:7] = data.xpos[1:], data.xquat[1:][:, [1, 2, 3, 0]]
        rows[:, 7:10], rows[:, 10:] = moved + np.cross(spin, arm), spin
        self.root[i] = rows[0]
        if self.joints:
            self.dof[i, :, 0] = data.qpos[-self.joints :]
            self.dof[i, :, 1] = data.qvel[-self.joints :]
