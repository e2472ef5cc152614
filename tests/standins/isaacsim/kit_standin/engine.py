"""The stand-in's physics: one MjData per environment. Names, orders and frames here are MuJoCo's; `view.py`
turns them into those of the physics views."""

# pyright: reportAttributeAccessIssue=false
# (USD makes its names at run time.)

import xml.etree.ElementTree as ET
from typing import Any, Dict, List, Optional

import mujoco  # type: ignore[import-untyped]
import numpy as np

from .importer import mesh_files
from .kit import KIT
from .settings import SETTINGS

mj: Any = mujoco
PHYSX_FRICTION = 0.5  # of a shape without a material


class Ground:
    """A plane: its normal, height, friction, and how frictions of two shapes are combined."""

    def __init__(self, axis: str, height: float, friction: float, combine: str) -> None:
        self.axis, self.height, self.friction, self.combine = axis, height, friction, combine


class Properties:
    """Of the robot's joints, bodies and shapes, in document order; the same in every environment."""

    def __init__(self, model: Any, fixed: bool) -> None:
        joints, bodies = slice(0 if fixed else 1, model.njnt), slice(1, model.nbody)
        count = model.njnt - joints.start
        self.limits = np.where(
            model.jnt_limited[joints, None].astype(bool), model.jnt_range[joints], (-1e30, 1e30)
        )
        # The importer's idea of a drive: a gain in the wrong unit, damping lost, no force at all.
        self.stiffness, self.damping, self.effort = (np.zeros(count) for _ in range(3))
        self.velocity = np.full(count, 1e30)
        self.armature = model.dof_armature[-count:].copy() if count else np.zeros(0)
        self.friction = np.zeros((count, 3))
        self.mass = model.body_mass[bodies].copy()
        self.com = np.concatenate(
            [model.body_ipos[bodies], model.body_iquat[bodies][:, [1, 2, 3, 0]]], axis=1
        )
        self.inertia = np.array([np.diag(row) for row in model.body_inertia[bodies]])
        self.materials = np.full((model.ngeom, 3), PHYSX_FRICTION)
        if SETTINGS.masses != "imported":
            self.mass[:] = 1.0


class Engine:
    """All environments of one robot."""

    def __init__(self, text: str, folder: str, fixed: bool, spawn: Any) -> None:
        self._root, self.fixed, self._spawn = ET.fromstring(text), fixed, spawn
        self._files = mesh_files(self._root, folder)
        bare = mj.MjModel.from_xml_string(text, self._files)
        self.props = Properties(bare, fixed)
        self.changed = True  # properties were set since the last compilation
        joints = range(0 if fixed else 1, bare.njnt)
        self.joint_names: List[str] = [bare.joint(i).name for i in joints]
        self.body_names: List[str] = [bare.body(i).name for i in range(1, bare.nbody)]
        self.body_parents: List[int] = [int(p) - 1 for p in bare.body_parentid[1:]]
        self.joint_bodies: List[int] = [int(bare.jnt_bodyid[i]) - 1 for i in joints]
        self.count = len(KIT.env_paths)
        self.base = [(bare.body_pos[1].copy(), bare.body_quat[1].copy()) for _ in range(self.count)]
        self.targets = np.zeros((self.count, len(self.joint_names)))
        self.links = np.zeros((self.count, len(self.body_names), 7))
        self.link_velocities = np.zeros((self.count, len(self.body_names), 6))
        self.contact = np.zeros((self.count, len(self.body_names), 3))
        self._ended = np.zeros((self.count, len(self.body_names)), bool)
        self.model: Any = bare
        self.datas: List[Any] = [mj.MjData(bare) for _ in range(self.count)]
        self._dt = float(KIT.context.cfg.dt)
        self._ground = find_ground()

    # -- the model -----------------------------------------------------------------------------------

    def compile(self) -> None:
        """With everything that was set on it since."""
        if not self.changed:
            return
        self.changed = False
        cfg, root = KIT.context.cfg, ET.fromstring(ET.tostring(self._root, encoding="unicode"))
        option = ET.SubElement(root, "option", timestep=repr(self._dt), integrator="implicitfast")
        option.set("gravity", _text(np.array(cfg.gravity)))
        world: Any = root.find("worldbody")
        for i, body in enumerate(world.iter("body")):
            for old in body.findall("inertial"):
                body.remove(old)
            body.append(self._inertial(i))
        self._write_joints(root, world)
        self._write_shapes(world)
        model = mj.MjModel.from_xml_string(ET.tostring(root, encoding="unicode"), self._files)
        old, self.model = self.datas, model
        self.datas = [mj.MjData(model) for _ in range(self.count)]
        for before, data in zip(old, self.datas):
            data.qpos[:], data.qvel[:] = before.qpos, before.qvel

    def _inertial(self, i: int) -> ET.Element:
        pos, quat = self.props.com[i, :3], self.props.com[i, [6, 3, 4, 5]]
        turn = rotation(quat)
        full = turn @ self.props.inertia[i] @ turn.T
        values = [full[r, c] for r, c in ((0, 0), (1, 1), (2, 2), (0, 1), (0, 2), (1, 2))]
        attributes = {"pos": _text(pos), "mass": repr(float(self.props.mass[i]))}
        return ET.Element("inertial", {**attributes, "fullinertia": _text(np.array(values))})

    def _write_joints(self, root: ET.Element, world: ET.Element) -> None:
        props, actuators = self.props, ET.SubElement(root, "actuator")
        for i, joint in enumerate(world.iter("joint")):
            limited = props.limits[i, 1] < 1e29
            joint.set("limited", "true" if limited else "false")
            if limited:
                joint.set("range", _text(props.limits[i]))
            joint.set("armature", repr(float(props.armature[i])))
            joint.set("frictionloss", repr(float(props.friction[i, 0])))
            if props.stiffness[i] or props.damping[i]:
                effort = float(props.effort[i])
                ET.SubElement(
                    actuators, "position", joint=joint.get("name", ""), forcelimited="true",
                    kp=repr(float(props.stiffness[i])), kv=repr(float(props.damping[i])),
                    forcerange=f"{-effort!r} {effort!r}",
                )  # fmt: skip
        self.driven = np.flatnonzero((props.stiffness != 0) | (props.damping != 0))

    def _write_shapes(self, world: ET.Element) -> None:
        collide = "1" if self._spawn.articulation_props.enabled_self_collisions else "0"
        floor = 0.0
        for i, geom in enumerate(world.iter("geom")):
            floor = own = float(self.props.materials[i, 0])
            if self._ground is not None and self._ground.combine == "max":
                floor = self._ground.friction
            elif self._ground is not None:  # PhysX's own rule is the mean
                floor = own = (own + self._ground.friction) / 2
            geom.set("contype", collide)
            geom.set("conaffinity", "1")
            geom.set("friction", f"{own!r} 0.005 0.0001")
        if self._ground is not None:
            zaxis = {"X": "1 0 0", "Y": "0 1 0", "Z": "0 0 1"}[self._ground.axis]
            ET.SubElement(
                world, "geom", type="plane", size="0 0 1", zaxis=zaxis, contype="1", conaffinity="0",
                pos=f"0 0 {self._ground.height!r}", friction=f"{floor!r} 0.005 0.0001",
            )  # fmt: skip

    # -- time ------------------------------------------------------------------------------------------

    def step(self) -> None:
        self.compile()
        if SETTINGS.physics == "zeros":
            self.links[:] = 0
            return
        for i, data in enumerate(self.datas):
            if len(self.driven):
                data.ctrl[:] = self.targets[i, self.driven]
            if self.fixed:
                self.model.body_pos[1], self.model.body_quat[1] = self.base[i]
            mj.mj_step(self.model, data)
            mj.mj_rnePostConstraint(self.model, data)
            bodies = len(self.body_names)
            self._touch(i, data.cfrc_ext[1 : bodies + 1, 3:])
        self.kinematics()
        self.observe_velocities()

    def _touch(self, i: int, force: np.ndarray) -> None:
        """A force that ended is zero in the step in which it ended, and for whoever does not look then it
        is the old one again."""
        now, before = force.any(axis=1), self.contact[i].any(axis=1)
        self.contact[i][now] = force[now]
        self._ended[i] = before & ~now & ~self._ended[i]

    def contacts(self) -> np.ndarray:
        """Who looks in the right step takes the ended forces away."""
        self.contact[self._ended] = 0
        return self.contact

    def kinematics(self) -> None:
        for i, data in enumerate(self.datas):
            if self.fixed:
                self.model.body_pos[1], self.model.body_quat[1] = self.base[i]
            mj.mj_kinematics(self.model, data)
            self.links[i, :, :3], self.links[i, :, 3:] = data.xpos[1:], data.xquat[1:]

    def observe_velocities(self) -> None:
        """Of the centres of mass, along world axes."""
        for i, data in enumerate(self.datas):
            if self.fixed:
                self.model.body_pos[1], self.model.body_quat[1] = self.base[i]
                mj.mj_kinematics(self.model, data)
            mj.mj_comPos(self.model, data)
            mj.mj_comVel(self.model, data)
            spin, moved = data.cvel[1:, :3], data.cvel[1:, 3:]
            arm = data.xipos[1:] - data.subtree_com[1]
            self.link_velocities[i, :, :3] = moved + np.cross(spin, arm)
            self.link_velocities[i, :, 3:] = spin

    # -- state: root pose (pos, quat wxyz), root velocity of the centre of mass, joints --------------------

    def root_pose(self, i: int) -> np.ndarray:
        if SETTINGS.physics == "zeros":
            return np.zeros(7)
        if self.fixed:
            return np.concatenate(self.base[i])
        return self.datas[i].qpos[:7].copy()

    def put_root_pose(self, i: int, pose: np.ndarray) -> None:
        if self.fixed:
            self.base[i] = pose[:3].copy(), pose[3:].copy()
            return
        data = self.datas[i]
        velocity = self.root_velocity(i)  # of the centre of mass: it stays what it was
        data.qpos[:7] = pose
        data.qacc_warmstart[:] = 0
        self.put_root_velocity(i, velocity)

    def root_velocity(self, i: int) -> np.ndarray:
        if self.fixed:
            return np.zeros(6)
        data = self.datas[i]
        turn = rotation(data.qpos[3:7])
        spin = turn @ data.qvel[3:6]
        moved = data.qvel[:3] + np.cross(spin, turn @ self.props.com[0, :3])
        return np.concatenate([moved, spin])

    def put_root_velocity(self, i: int, velocity: np.ndarray) -> None:
        if self.fixed:
            return
        data = self.datas[i]
        turn = rotation(data.qpos[3:7])
        moved, spin = velocity[:3], velocity[3:]
        data.qvel[:3] = moved - np.cross(spin, turn @ self.props.com[0, :3])
        data.qvel[3:6] = turn.T @ spin

    def joints(self, i: int) -> Dict[str, np.ndarray]:
        """Views of positions and velocities."""
        count, data = len(self.joint_names), self.datas[i]
        first_q, first_v = data.qpos.shape[0] - count, data.qvel.shape[0] - count
        return {"pos": data.qpos[first_q:], "vel": data.qvel[first_v:]}


def find_ground() -> Optional[Ground]:
    """The plane on the stage that the robots may touch."""
    from pxr import UsdGeom, UsdPhysics, UsdShade

    for prim in KIT.stage.Traverse():
        if prim.GetTypeName() != "Plane" or not prim.HasAPI(UsdPhysics.CollisionAPI):
            continue
        path = str(prim.GetPath())
        allowed = KIT.filtered_for
        if allowed is not None and not any(path == p or path.startswith(p + "/") for p in allowed):
            return None
        height = UsdGeom.XformCommonAPI(prim).GetXformVectors(0)[0][2]
        friction, combine = PHYSX_FRICTION, "average"
        material, _ = UsdShade.MaterialBindingAPI(prim).ComputeBoundMaterial("physics")
        if material:
            friction = UsdPhysics.MaterialAPI(material).GetStaticFrictionAttr().Get()
            combine = material.GetPrim().GetCustomDataByKey("combine")
        axis = UsdGeom.Plane(prim).GetAxisAttr().Get()
        return Ground(axis, float(height), float(np.float32(friction)), combine)
    return None


def rotation(quat: np.ndarray) -> np.ndarray:
    out = np.zeros(9)
    mj.mju_quat2Mat(out, np.asarray(quat, np.float64))
    return out.reshape(3, 3)


def _text(values: np.ndarray) -> str:
    return " ".join(repr(float(value)) for value in values)
