"""The articulation: buffers that are written later, and reads that are of the last update."""

# pyright: reportAttributeAccessIssue=false
# (USD makes its names at run time.)

import re
from typing import Any, Callable, Dict, List, Sequence, Tuple

import torch
from kit_standin.engine import Engine
from kit_standin.kit import KIT, require, torch_device
from kit_standin.view import ArticulationView

require(__name__)

from pxr import UsdPhysics  # noqa: E402

from .sim.configs import ArticulationCfg, ImplicitActuatorCfg, validate  # noqa: E402

__all__ = ["Articulation", "ArticulationCfg", "ArticulationData"]

# What a write makes stale; a root's velocity none of it.
_BY_POSE = ("body_link_pose_w",)
_BY_JOINTS = ("body_com_vel_w", "body_link_vel_w", "body_com_pose_b", "body_link_pose_w")


class ArticulationData:
    """Reads through the physics view, kept until time has passed. Quaternions wxyz, all in the world."""

    def __init__(self, root_physx_view: Any, device: str) -> None:
        self._view, self.device, self.now = root_physx_view, device, 0.0
        self._kept: Dict[str, Tuple[float, Any]] = {}

    def update(self, dt: float) -> None:
        self.now += dt
        _ = self.joint_vel  # for the accelerations: joint velocities are always those of the update

    def stale(self, names: Sequence[str]) -> None:
        for name in names:
            self._kept.pop(name, None)

    def _read(self, name: str, ask: Callable[[], Any]) -> Any:
        stamp, value = self._kept.get(name, (-1.0, None))
        if stamp < self.now:
            value = ask()
            self._kept[name] = self.now, value
        return value

    @property
    def root_link_pose_w(self) -> Any:
        ask = self._view.get_root_transforms
        return self._read("root_link_pose_w", lambda: _to_wxyz(ask().clone()))

    @property
    def root_com_vel_w(self) -> Any:
        return self._read("root_com_vel_w", self._view.get_root_velocities)

    @property
    def root_link_vel_w(self) -> Any:
        def ask() -> Any:
            velocity, pose = self.root_com_vel_w.clone(), self.root_link_pose_w
            arm = _turn(pose[:, 3:], self.body_com_pose_b[:, 0, :3])
            velocity[:, :3] -= torch.linalg.cross(velocity[:, 3:], arm)
            return velocity

        return self._read("root_link_vel_w", ask)

    @property
    def body_link_pose_w(self) -> Any:
        def ask() -> Any:
            KIT.context.physics_sim_view.update_articulations_kinematic()
            return _to_wxyz(self._view.get_link_transforms().clone())

        return self._read("body_link_pose_w", ask)

    @property
    def body_com_vel_w(self) -> Any:
        return self._read("body_com_vel_w", self._view.get_link_velocities)

    @property
    def body_link_vel_w(self) -> Any:
        def ask() -> Any:
            velocity, pose = self.body_com_vel_w.clone(), self.body_link_pose_w
            arm = _turn(pose[..., 3:], self.body_com_pose_b[..., :3])
            velocity[..., :3] -= torch.linalg.cross(velocity[..., 3:], arm)
            return velocity

        return self._read("body_link_vel_w", ask)

    @property
    def body_com_pose_b(self) -> Any:
        return self._read("body_com_pose_b", lambda: self._view.get_coms().to(self.device))

    @property
    def joint_pos(self) -> Any:
        return self._read("joint_pos", self._view.get_dof_positions)

    @property
    def joint_vel(self) -> Any:
        return self._read("joint_vel", self._view.get_dof_velocities)


class Articulation:
    def __init__(self, cfg: ArticulationCfg) -> None:
        validate(cfg)
        self.cfg = cfg
        parent, _, name = cfg.prim_path.rpartition("/")
        folder, _, leaf = parent.rpartition("/")
        found = [
            prim
            for prim in KIT.stage.GetPrimAtPath(folder).GetChildren()
            if re.fullmatch(leaf, prim.GetName())
        ]
        for prim in found:
            robot = KIT.stage.DefinePrim(f"{prim.GetPath()}/{name}")
            robot.GetReferences().AddReference(cfg.spawn.usd_path)
        if not found:
            raise RuntimeError(f"Could not find prim with path {cfg.prim_path}.")
        self._first = f"{found[0].GetPath()}/{name}"
        KIT.context.assets.append(self)

    def rendered(self) -> None:
        pass

    def initialize(self) -> None:
        """When the timeline starts."""
        first = KIT.stage.GetPrimAtPath(self._first)
        root = self._root(first)
        custom = first.GetCustomData()
        self.engine = Engine(custom["mjcf"], custom["folder"], custom["fix_base"], self.cfg.spawn)
        KIT.context.physics_sim_view.engines.append(self.engine)
        paths = [self._first.replace(KIT.env_paths[0], env, 1) + root for env in KIT.env_paths]
        self.device = torch_device(KIT.context.device)
        self.root_physx_view: Any = ArticulationView(self.engine, paths, KIT.context.device)
        self.data: Any = ArticulationData(self.root_physx_view, self.device)
        self._make_buffers()
        self._check_defaults()
        for name, group in self.cfg.actuators.items():
            self._apply(name, group)
        self.update(0.0)

    def _root(self, first: Any) -> str:
        path = self.cfg.articulation_root_prim_path
        if path is None:
            found = [
                str(prim.GetPath())
                for prim in KIT.stage.Traverse()
                if str(prim.GetPath()).startswith(self._first + "/")
                and prim.HasAPI(UsdPhysics.ArticulationRootAPI)
            ]
            if len(found) != 1:
                raise RuntimeError(f"Failed to find a single articulation: {found}")
            return found[0][len(self._first) :]
        prim = KIT.stage.GetPrimAtPath(self._first + path)
        if not prim or not prim.HasAPI(UsdPhysics.ArticulationRootAPI):
            raise RuntimeError(f"Failed to create articulation at: {self._first + path}")
        if path.rpartition("/")[2] == "worldBody":
            raise RuntimeError("Failed to create articulation: worldBody has no links")
        return path

    def _make_buffers(self) -> None:
        view, data = self.root_physx_view, self.data
        for name, values in (
            ("joint_pos_limits", view.get_dof_limits()),
            ("joint_stiffness", view.get_dof_stiffnesses()),
            ("joint_damping", view.get_dof_dampings()),
            ("joint_armature", view.get_dof_armatures()),
            ("joint_effort_limits", view.get_dof_max_forces()),
            ("joint_vel_limits", view.get_dof_max_velocities()),
            ("joint_friction_coeff", view.get_dof_friction_properties()[..., 0]),
        ):
            setattr(data, name, values.to(self.device))
        self._everyone = torch.arange(self.num_instances, device=self.device)
        data.joint_pos_target = torch.zeros(
            (self.num_instances, self.num_joints), device=self.device
        )

    def _check_defaults(self) -> None:
        state = self.cfg.init_state
        ids, values = _resolve(state.joint_pos, self.joint_names) if self.num_joints else ([], [])
        limits = self.root_physx_view.get_dof_limits()[0]
        for i, value in zip(ids, values):
            if not limits[i, 0] - 1e-6 <= value <= limits[i, 1] + 1e-6:
                raise ValueError(
                    "The following joints have default positions out of the limits: \n\t- "
                    f"'{self.joint_names[i]}': {value:.3f} not in {limits[i].tolist()}"
                )

    def _apply(self, name: str, group: ImplicitActuatorCfg) -> None:
        validate(group)
        if None not in (group.effort_limit, group.effort_limit_sim) and (
            group.effort_limit != group.effort_limit_sim
        ):
            raise ValueError("both 'effort_limit_sim' and 'effort_limit' are set and differ")
        ids, _ = self.find_joints(group.joint_names_expr)
        names = [self.joint_names[i] for i in ids]
        effort = group.effort_limit if group.effort_limit_sim is None else group.effort_limit_sim
        data, view = self.data, self.root_physx_view
        everyone = self._everyone.cpu()
        for buffer, value, put in (
            (data.joint_stiffness, group.stiffness, view.set_dof_stiffnesses),
            (data.joint_damping, group.damping, view.set_dof_dampings),
            (data.joint_effort_limits, effort, view.set_dof_max_forces),
            (data.joint_vel_limits, group.velocity_limit_sim, view.set_dof_max_velocities),
            (data.joint_armature, group.armature, view.set_dof_armatures),
        ):
            if value is not None:
                _fill(buffer, ids, names, value)
                put(buffer.cpu(), everyone)
        # As told by the engine: a gain that it did not keep shows.
        data.joint_stiffness = view.get_dof_stiffnesses().to(self.device)
        friction = view.get_dof_friction_properties()
        for i, value in enumerate((group.friction, group.dynamic_friction, group.viscous_friction)):
            if value is not None:
                _fill(friction[..., i], ids, names, value)
        view.set_dof_friction_properties(friction, everyone)
        data.joint_friction_coeff = friction[..., 0].to(self.device)

    # -- facts -----------------------------------------------------------------------------------------

    @property
    def num_instances(self) -> int:
        return self.root_physx_view.count

    @property
    def is_fixed_base(self) -> bool:
        return self.root_physx_view.shared_metatype.fixed_base

    @property
    def num_joints(self) -> int:
        return self.root_physx_view.shared_metatype.dof_count

    @property
    def joint_names(self) -> List[str]:
        return self.root_physx_view.shared_metatype.dof_names

    @property
    def body_names(self) -> List[str]:
        return self.root_physx_view.shared_metatype.link_names

    def find_joints(self, name_keys: Any) -> Tuple[List[int], List[str]]:
        ids = _match(name_keys, self.joint_names)
        if not ids:
            raise ValueError(f"No joints found for {name_keys}")
        return ids, [self.joint_names[i] for i in ids]

    # -- operations ------------------------------------------------------------------------------------

    def reset(self, env_ids: Any = None) -> None:
        pass  # the stand-in has no external wrenches

    def update(self, dt: float) -> None:
        self.data.update(dt)

    def write_data_to_sim(self) -> None:
        self.root_physx_view.set_dof_position_targets(self.data.joint_pos_target, self._everyone)

    def set_joint_position_target(
        self, target: Any, joint_ids: Any = None, env_ids: Any = None
    ) -> None:
        rows, columns = _where(joint_ids, env_ids)
        self.data.joint_pos_target[rows, columns] = target

    def write_root_link_pose_to_sim(self, root_pose: Any, env_ids: Any = None) -> None:
        self.data.root_link_pose_w[slice(None) if env_ids is None else env_ids] = root_pose.clone()
        pose = self.data.root_link_pose_w[:, [0, 1, 2, 4, 5, 6, 3]]
        self.data.stale(_BY_POSE)
        self.root_physx_view.set_root_transforms(pose, self._ids(env_ids))

    def write_root_com_velocity_to_sim(self, root_velocity: Any, env_ids: Any = None) -> None:
        self.data.root_com_vel_w[slice(None) if env_ids is None else env_ids] = root_velocity
        self.root_physx_view.set_root_velocities(self.data.root_com_vel_w, self._ids(env_ids))

    write_root_velocity_to_sim = write_root_com_velocity_to_sim  # the same, in the original too

    def write_root_link_velocity_to_sim(self, root_velocity: Any, env_ids: Any = None) -> None:
        rows = slice(None) if env_ids is None else env_ids
        self.data.root_link_vel_w[rows] = root_velocity.clone()
        velocity = root_velocity.clone()
        quat = self.data.root_link_pose_w[rows, 3:]
        arm = _turn(quat, self.data.body_com_pose_b[rows, 0, :3])
        velocity[:, :3] += torch.linalg.cross(velocity[:, 3:], arm)
        self.write_root_com_velocity_to_sim(velocity, env_ids)

    def write_joint_state_to_sim(
        self, position: Any, velocity: Any, joint_ids: Any = None, env_ids: Any = None
    ) -> None:
        rows, columns = _where(joint_ids, env_ids)
        self.data.joint_pos[rows, columns] = position
        self.data.stale(_BY_JOINTS)
        self.root_physx_view.set_dof_positions(self.data.joint_pos, self._ids(env_ids))
        self.data.joint_vel[rows, columns] = velocity
        self.root_physx_view.set_dof_velocities(self.data.joint_vel, self._ids(env_ids))

    def write_joint_position_limit_to_sim(
        self,
        limits: Any,
        joint_ids: Any = None,
        env_ids: Any = None,
        warn_limit_violation: bool = True,
    ) -> None:
        rows, columns = _where(joint_ids, env_ids)
        self.data.joint_pos_limits[rows, columns] = limits
        self.root_physx_view.set_dof_limits(
            self.data.joint_pos_limits.cpu(), self._ids(env_ids).cpu()
        )

    def _ids(self, env_ids: Any) -> Any:
        return self._everyone if env_ids is None else env_ids


def _where(joint_ids: Any, env_ids: Any) -> Tuple[Any, Any]:
    rows, columns = (slice(None) if ids is None else ids for ids in (env_ids, joint_ids))
    if not isinstance(rows, slice) and not isinstance(columns, slice):
        rows = rows[:, None]  # a list has no such index
    return rows, columns


def _match(keys: Any, names: List[str]) -> List[int]:
    keys = [keys] if isinstance(keys, str) else list(keys)
    hits = [[key for key in keys if re.fullmatch(key, name)] for name in names]
    if any(len(hit) > 1 for hit in hits):
        raise ValueError("Multiple matches for one name")
    unused = set(keys) - {hit[0] for hit in hits if hit}
    if unused:
        raise ValueError(f"Not all regular expressions are matched! {sorted(unused)}")
    return [i for i, hit in enumerate(hits) if hit]


def _resolve(values: Dict[str, float], names: List[str]) -> Tuple[List[int], List[float]]:
    ids = _match(list(values), names)
    return ids, [next(v for k, v in values.items() if re.fullmatch(k, names[i])) for i in ids]


def _fill(buffer: Any, ids: List[int], names: List[str], value: Any) -> None:
    if not isinstance(value, dict):
        buffer[:, ids] = float(value)
        return
    inner, values = _resolve(value, names)
    buffer[:, [ids[i] for i in inner]] = torch.tensor(values, device=buffer.device)


def _to_wxyz(pose: Any) -> Any:
    pose[..., 3:] = pose[..., [6, 3, 4, 5]]
    return pose


def _turn(quat: Any, vector: Any) -> Any:
    half = torch.linalg.cross(quat[..., 1:], vector)
    return vector + 2 * (quat[..., :1] * half + torch.linalg.cross(quat[..., 1:], half))
