"""The stand-in's `isaacgym.gymapi`: the part of its interface that a worker needs."""

import json
import os
import subprocess
import time
from typing import Any, List, Optional

import numpy as np

from . import importer, lines
from .kinds import (
    AssetOptions,
    CameraProperties,
    ContactCollection,
    CoordinateSpace,
    DofDriveMode,
    ImageType,
    IndexDomain,
    Mat33,
    PhysXParams,
    PlaneParams,
    Quat,
    RigidBodyProperties,
    RigidShapeProperties,
    SimParams,
    SimType,
    Tensor,
    TensorDataType,
    Transform,
    UpAxis,
    Vec3,
    Version,
)
from .lines import entered, error, info, refused
from .memory import CPU, open_memory, visible_gpus
from .physics import Actor, Robots, World
from .settings import SETTINGS
from .tensors import Tensors

__all__ = [
    "AssetOptions", "CameraProperties", "ContactCollection", "CoordinateSpace", "DofDriveMode",
    "ImageType", "IndexDomain", "Mat33", "PhysXParams", "PlaneParams", "Quat", "RigidBodyProperties",
    "RigidShapeProperties", "SimParams", "SimType", "Tensor", "TensorDataType", "Transform", "UpAxis",
    "Vec3", "Version",
]  # fmt: skip

SIM_PHYSX, SIM_FLEX = SimType.SIM_PHYSX, SimType.SIM_FLEX
UP_AXIS_Y, UP_AXIS_Z = UpAxis.UP_AXIS_Y, UpAxis.UP_AXIS_Z
DOF_MODE_NONE, DOF_MODE_POS = DofDriveMode.DOF_MODE_NONE, DofDriveMode.DOF_MODE_POS
DOF_MODE_VEL, DOF_MODE_EFFORT = DofDriveMode.DOF_MODE_VEL, DofDriveMode.DOF_MODE_EFFORT
DTYPE_FLOAT32, DTYPE_UINT32 = TensorDataType.DTYPE_FLOAT32, TensorDataType.DTYPE_UINT32
DTYPE_UINT64, DTYPE_UINT8 = TensorDataType.DTYPE_UINT64, TensorDataType.DTYPE_UINT8
DTYPE_INT16 = TensorDataType.DTYPE_INT16
CC_NEVER, CC_LAST_SUBSTEP = ContactCollection.CC_NEVER, ContactCollection.CC_LAST_SUBSTEP
CC_ALL_SUBSTEPS = ContactCollection.CC_ALL_SUBSTEPS
DOMAIN_ACTOR, DOMAIN_ENV = IndexDomain.DOMAIN_ACTOR, IndexDomain.DOMAIN_ENV
DOMAIN_SIM = IndexDomain.DOMAIN_SIM
ENV_SPACE, LOCAL_SPACE = CoordinateSpace.ENV_SPACE, CoordinateSpace.LOCAL_SPACE
GLOBAL_SPACE = CoordinateSpace.GLOBAL_SPACE
IMAGE_COLOR, IMAGE_DEPTH = ImageType.IMAGE_COLOR, ImageType.IMAGE_DEPTH
INVALID_HANDLE = -1

_FATAL_LOG = {
    "bad_ordinal": "Gym cuda error: invalid device ordinal: GymPhysXCuda.cu: 937",
    "no_kernel": "Gym cuda error: no kernel image is available for execution: GymPhysXCuda.cu: 937",
    "oom": "PxgCudaDeviceMemoryAllocator fail to allocate memory 67108864 bytes!! Result = 2",
}


def _need(value: Any, *kinds: Any) -> None:
    """As pybind refuses an argument of another type; a bool is no int to it, and None nobody's pointer."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = ", ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"incompatible function arguments: {value!r} where {wanted} is expected")


class Env:
    def __init__(self, sim: "Sim", origin: Vec3) -> None:
        self.sim, self.origin = sim, origin
        self.actors: List[Actor] = []
        self.cameras: List[CameraProperties] = []


class Sim:
    def __init__(self, params: SimParams, graphics: int, device: int) -> None:
        self.params, self.graphics, self.device = params, graphics, device
        self.flex = self.broken = False
        self.ground: Any = None
        self.envs: List[Env] = []
        self.tensors: Optional[Tensors] = None  # made by prepare_sim
        self.fetched = self.drawn = self.rendered = False
        self.frames = 0


class Gym:
    _created = False

    # -- simulation --------------------------------------------------------------------------------

    def create_sim(
        self,
        compute_device: int = 0,
        graphics_device: int = 0,
        type: SimType = SIM_FLEX,
        params: Optional[SimParams] = None,
    ) -> Optional[Sim]:
        entered("create_sim")
        _need(compute_device, int)
        _need(graphics_device, int)
        _need(type, SimType)
        params = SimParams() if params is None else params
        _need(params, SimParams)
        if Gym._created:
            lines.segfault()  # one simulation in a process
        Gym._created = True
        info("Not connected to PVD")
        if SETTINGS.child:
            subprocess.Popen(["sleep", "60"], close_fds=False)
        gpu = params.use_gpu_pipeline
        if gpu and not params.physx.use_gpu:
            error("GPU pipeline with CPU physics")
            return None
        if SETTINGS.create == "none":
            error("*** Failed to create sim", plugin="")
            return None
        if gpu or params.physx.use_gpu:
            info("+++ Using GPU PhysX")
        if SETTINGS.create == "segv":
            lines.segfault()
        device = compute_device if gpu else CPU
        if SETTINGS.create == "cpu":
            info("*** Warning: failed to preload PhysX libs")
            device = CPU
        sim = Sim(params, graphics_device, device)
        sim.flex = type is SIM_FLEX
        wrong = SETTINGS.create
        if device != CPU and compute_device >= visible_gpus():
            wrong, sim.device = "bad_ordinal", 0
        if wrong in _FATAL_LOG:
            error(_FATAL_LOG[wrong], plugin="" if wrong == "oom" else "[Error] [carb.gym.plugin] ")
        sim.broken = wrong in _FATAL_LOG or wrong == "zeros"
        where = "cpu" if device == CPU else f"cuda:{device}"
        info(f"Physics Engine: PhysX\nPhysics Device: {where}")
        return sim

    def destroy_sim(self, sim: Sim, /) -> None:
        _need(sim, Sim)
        if SETTINGS.count:
            with open(SETTINGS.count, "w", encoding="utf-8") as file:
                json.dump(lines.COUNTS, file)
        if SETTINGS.destroy == "hang":
            time.sleep(1e6)
        if SETTINGS.destroy == "segv":
            lines.segfault()

    def prepare_sim(self, sim: Sim, /) -> bool:
        entered("prepare_sim")
        _need(sim, Sim)
        if SETTINGS.prepare == "false" or sim.tensors is not None or not sim.envs:
            error("prepare_sim failed")
            return False
        actors = [env.actors[0] for env in sim.envs]
        robots = Robots(actors, World(sim.params, sim.ground), SETTINGS.physics == "frozen")
        sim.tensors = Tensors(robots, open_memory(sim.device), sim.broken)
        return True

    def get_version(self) -> Version:
        return Version()

    def add_ground(self, sim: Sim, params: PlaneParams) -> None:
        entered("add_ground")
        _need(sim, Sim)
        _need(params, PlaneParams)
        sim.ground = params

    def get_sim_params(self, sim: Sim, /) -> SimParams:
        _need(sim, Sim)
        return sim.params

    def simulate(self, sim: Sim, /) -> None:
        entered("simulate")
        self._prepared(sim, "simulate").simulate()
        sim.fetched = sim.drawn = sim.rendered = False
        sim.frames += 1

    def fetch_results(self, sim: Sim, wait: bool, /) -> None:
        entered("fetch_results")
        _need(wait, bool)
        self._prepared(sim, "fetch_results").fetched()
        sim.fetched = True

    def get_frame_count(self, sim: Sim, /) -> int:
        _need(sim, Sim)
        return sim.frames

    def get_sim_actor_count(self, sim: Sim, /) -> int:
        _need(sim, Sim)
        return sum(len(env.actors) for env in sim.envs)

    def get_sim_dof_count(self, sim: Sim, /) -> int:
        _need(sim, Sim)
        return sum(len(actor.asset.dof_names) for env in sim.envs for actor in env.actors)

    def get_sim_rigid_body_count(self, sim: Sim, /) -> int:
        _need(sim, Sim)
        return sum(len(actor.asset.body_names) for env in sim.envs for actor in env.actors)

    def _prepared(self, sim: Sim, what: str) -> Tensors:
        _need(sim, Sim)
        if sim.tensors is None:
            lines.die(f"{what} before prepare_sim")
        assert sim.tensors is not None
        return sim.tensors

    # -- assets ------------------------------------------------------------------------------------

    def load_asset(
        self, sim: Sim, rootpath: str, filename: str, options: Optional[AssetOptions] = None
    ) -> Optional[importer.Asset]:
        entered("load_asset")
        _need(sim, Sim)
        _need(rootpath, str)
        _need(filename, str)
        options = AssetOptions() if options is None else options
        _need(options, AssetOptions)
        return importer.load(rootpath, filename, options)

    def get_asset_dof_count(self, asset: importer.Asset, /) -> int:
        _need(asset, importer.Asset)
        return len(asset.dof_names)

    def get_asset_rigid_body_count(self, asset: importer.Asset, /) -> int:
        _need(asset, importer.Asset)
        return len(asset.body_names)

    def get_asset_dof_names(self, asset: importer.Asset, /) -> List[str]:
        _need(asset, importer.Asset)
        return asset.told(asset.dof_names)

    def get_asset_rigid_body_names(self, asset: importer.Asset, /) -> List[str]:
        _need(asset, importer.Asset)
        return asset.told(asset.body_names)

    # -- environments and actors -------------------------------------------------------------------

    def create_env(self, sim: Sim, lower: Vec3, upper: Vec3, num_per_row: int, /) -> Optional[Env]:
        _need(sim, Sim)
        _need(lower, Vec3)
        _need(upper, Vec3)
        _need(num_per_row, int)
        if sim.tensors is not None or (sim.envs and not sim.envs[-1].actors):
            error("create_env: the last environment is empty, or the simulation is prepared")
            return None
        row, column = divmod(len(sim.envs), max(1, num_per_row))
        x, y = column * (upper.x - lower.x), row * (upper.y - lower.y)
        # The grid lies across the vertical axis.
        origin = Vec3(x, y, 0.0) if sim.params.up_axis is UP_AXIS_Z else Vec3(x, 0.0, y)
        sim.envs.append(Env(sim, origin))
        return sim.envs[-1]

    def create_actor(
        self,
        env: Env,
        asset: importer.Asset,
        pose: Transform,
        name: str = "",
        group: int = -1,
        filter: int = -1,
        segmentationId: int = 0,
    ) -> int:
        entered("create_actor")
        for value, kind in ((env, Env), (asset, importer.Asset), (pose, Transform), (name, str),
                            (group, int), (filter, int), (segmentationId, int)):  # fmt: skip
            _need(value, kind)
        if SETTINGS.actor_s:
            time.sleep(SETTINGS.actor_s)
        if env.sim.tensors is not None or env is not env.sim.envs[-1]:
            error("create_actor: not the newest environment, or the simulation is prepared")
            return INVALID_HANDLE
        if any(actor.group == group for each in env.sim.envs for actor in each.actors):
            lines.die("two environments share a collision group: their robots would collide")
        env.actors.append(Actor(asset, pose, group, 0 if filter == -1 else filter))
        return len(env.actors) - 1

    def _actor(self, env: Env, handle: int, what: str) -> Optional[Actor]:
        _need(env, Env)
        _need(handle, int)
        if 0 <= handle < len(env.actors):
            return env.actors[handle]
        error(f"Function {what}: invalid actor handle {handle}")
        return None

    def get_env_origin(self, env: Env, /) -> Vec3:
        _need(env, Env)
        return env.origin

    def get_actor_index(self, env: Env, handle: int, domain: IndexDomain, /) -> int:
        _need(env, Env)
        _need(handle, int)
        _need(domain, IndexDomain)
        return env.sim.envs.index(env) if domain is DOMAIN_SIM else handle

    def get_actor_dof_properties(self, env: Env, handle: int, /) -> Any:
        actor = self._actor(env, handle, "get_actor_dof_properties")
        return None if actor is None else actor.dofs.copy()

    def set_actor_dof_properties(self, env: Env, handle: int, props: Any, /) -> bool:
        entered("set_actor_dof_properties")
        actor = self._actor(env, handle, "set_actor_dof_properties")
        if actor is None or refused("set_actor_dof_properties"):
            return False
        if not isinstance(props, np.ndarray) or props.dtype != importer.DOF_DTYPE:
            raise TypeError("incompatible function arguments: DofProperties expected")
        if env.sim.tensors is not None or props.shape != actor.dofs.shape:
            error("Function set_actor_dof_properties: too late, or of another length")
            return False
        if not np.isfinite(props["effort"]).all():
            error("Function set_actor_dof_properties: an effort limit is not finite")
            return False
        actor.dofs = props.copy()
        if SETTINGS.limits == "lost":
            actor.dofs["hasLimits"] = False
        if SETTINGS.gains == "lost":
            actor.dofs["stiffness"] = 0
        return True

    def get_actor_rigid_body_properties(self, env: Env, handle: int, /) -> List[Any]:
        actor = self._actor(env, handle, "get_actor_rigid_body_properties")
        found: List[Any] = []
        if actor is not None:
            for mass, com, inertia in zip(actor.masses, actor.coms, actor.inertias):
                props = RigidBodyProperties()
                props.mass, props.com = float(np.float32(mass)), _vec3(com)
                props.invMass = 1 / props.mass
                props.inertia = _mat33(inertia)
                props.invInertia = _mat33(np.linalg.inv(inertia))
                found.append(props)
        return found

    def set_actor_rigid_body_properties(
        self,
        env: Env,
        actorHandle: int,
        props: List[RigidBodyProperties],
        recomputeInertia: bool = False,
    ) -> bool:
        entered("set_actor_rigid_body_properties")
        actor = self._actor(env, actorHandle, "set_actor_rigid_body_properties")
        _need(props, list)
        _need(recomputeInertia, bool)
        if actor is None or refused("set_actor_rigid_body_properties"):
            return False
        if env.sim.tensors is not None or len(props) != len(actor.masses):
            error("Function set_actor_rigid_body_properties: too late, or of another length")
            return False
        actor.masses = np.array([each.mass for each in props])
        actor.coms = np.array([_numbers(each.com) for each in props])
        if not recomputeInertia:
            rows = [[_numbers(getattr(each.inertia, axis)) for axis in "xyz"] for each in props]
            actor.inertias = np.array(rows)
        return True

    def get_actor_rigid_shape_properties(self, env: Env, handle: int, /) -> List[Any]:
        actor = self._actor(env, handle, "get_actor_rigid_shape_properties")
        found: List[Any] = []
        for friction in [] if actor is None else actor.frictions:
            props = RigidShapeProperties()
            props.friction, props.filter = float(friction), 0 if actor is None else actor.mask
            found.append(props)
        return found

    def set_actor_rigid_shape_properties(self, env: Env, handle: int, props: Any, /) -> bool:
        entered("set_actor_rigid_shape_properties")
        actor = self._actor(env, handle, "set_actor_rigid_shape_properties")
        _need(props, list)
        if actor is None or refused("set_actor_rigid_shape_properties"):
            return False
        if len(props) != len(actor.frictions):
            error("Function set_actor_rigid_shape_properties: another number of shapes")
            return False
        actor.frictions = [each.friction for each in props]
        return True

    # -- tensors -----------------------------------------------------------------------------------

    def _acquire(self, sim: Sim, name: str) -> Optional[Tensor]:
        tensors = self._prepared(sim, f"acquire of {name}")
        if sim.flex:
            error("the tensor interface needs PhysX")
            return None
        return tensors.acquire(name)

    def acquire_actor_root_state_tensor(self, sim: Sim, /) -> Optional[Tensor]:
        return self._acquire(sim, "root")

    def acquire_dof_state_tensor(self, sim: Sim, /) -> Optional[Tensor]:
        return self._acquire(sim, "dof")

    def acquire_rigid_body_state_tensor(self, sim: Sim, /) -> Optional[Tensor]:
        return self._acquire(sim, "body")

    def acquire_net_contact_force_tensor(self, sim: Sim, /) -> Optional[Tensor]:
        return self._acquire(sim, "contact")

    def _refresh(self, sim: Sim, name: str, method: str) -> bool:
        entered(method)
        tensors = self._prepared(sim, method)
        return not refused(method) and tensors.refresh(name)

    def refresh_actor_root_state_tensor(self, sim: Sim, /) -> bool:
        return self._refresh(sim, "root", "refresh_actor_root_state_tensor")

    def refresh_dof_state_tensor(self, sim: Sim, /) -> bool:
        return self._refresh(sim, "dof", "refresh_dof_state_tensor")

    def refresh_rigid_body_state_tensor(self, sim: Sim, /) -> bool:
        return self._refresh(sim, "body", "refresh_rigid_body_state_tensor")

    def refresh_net_contact_force_tensor(self, sim: Sim, /) -> bool:
        return self._refresh(sim, "contact", "refresh_net_contact_force_tensor")

    def _put(
        self, sim: Sim, kind: str, method: str, values: Any, indices: Any = None, count: int = 0
    ) -> bool:
        entered(method)
        tensors = self._prepared(sim, method)
        _need(values, Tensor)
        if indices is not None:
            _need(indices, Tensor)
            _need(count, int)
        return not refused(method) and tensors.put(kind, values, indices, count)

    def set_dof_position_target_tensor(self, sim: Sim, targets: Tensor, /) -> bool:
        return self._put(sim, "targets", "set_dof_position_target_tensor", targets)

    def set_dof_position_target_tensor_indexed(
        self, sim: Sim, targets: Tensor, indices: Tensor, count: int, /
    ) -> bool:
        name = "set_dof_position_target_tensor_indexed"
        return self._put(sim, "targets", name, targets, indices, count)

    def set_actor_root_state_tensor_indexed(
        self, sim: Sim, states: Tensor, indices: Tensor, count: int, /
    ) -> bool:
        name = "set_actor_root_state_tensor_indexed"
        return self._put(sim, "root", name, states, indices, count)

    def set_dof_state_tensor_indexed(
        self, sim: Sim, states: Tensor, indices: Tensor, count: int, /
    ) -> bool:
        name = "set_dof_state_tensor_indexed"
        return self._put(sim, "dof", name, states, indices, count)

    def apply_rigid_body_force_tensors(
        self,
        sim: Sim,
        forceTensor: Optional[Tensor] = None,
        torqueTensor: Optional[Tensor] = None,
        space: CoordinateSpace = ENV_SPACE,
    ) -> bool:
        _need(space, CoordinateSpace)
        if torqueTensor is not None or space is LOCAL_SPACE:
            error("the stand-in knows forces along the axes of the world only")
            return False
        return self._put(sim, "force", "apply_rigid_body_force_tensors", forceTensor)

    # -- pictures ----------------------------------------------------------------------------------

    def create_camera_sensor(self, env: Env, props: CameraProperties, /) -> int:
        _need(env, Env)
        _need(props, CameraProperties)
        if env.sim.graphics < 0:
            return INVALID_HANDLE
        env.cameras.append(props)
        return len(env.cameras) - 1

    def set_camera_location(self, handle: int, env: Env, at: Vec3, target: Vec3, /) -> None:
        for value, kind in ((handle, int), (env, Env), (at, Vec3), (target, Vec3)):
            _need(value, kind)

    def step_graphics(self, sim: Sim, /) -> None:
        _need(sim, Sim)
        sim.drawn = sim.fetched

    def render_all_camera_sensors(self, sim: Sim, /) -> None:
        _need(sim, Sim)
        sim.rendered = sim.drawn

    def get_camera_image(self, sim: Sim, env: Env, handle: int, kind: ImageType, /) -> Any:
        """Red; black before it was rendered; nothing at all without fetch_results and step_graphics."""
        _need(sim, Sim)
        _need(env, Env)
        _need(kind, ImageType)
        if not 0 <= handle < len(env.cameras) or not sim.drawn:
            return np.zeros((0, 0), np.uint8)
        props = env.cameras[handle]
        picture = np.zeros((props.height, props.width, 4), np.uint8)
        if sim.rendered:
            picture[:] = (255, 0, 0, 255)
        return picture.reshape(props.height, 4 * props.width)

    def create_viewer(self, sim: Sim, props: CameraProperties, /) -> Any:
        _need(sim, Sim)
        _need(props, CameraProperties)
        return object() if os.environ.get("DISPLAY") and sim.graphics >= 0 else None


def _vec3(values: Any) -> Vec3:
    return Vec3(*(float(np.float32(value)) for value in values))


def _mat33(rows: Any) -> Mat33:
    matrix = Mat33()
    matrix.x, matrix.y, matrix.z = (_vec3(row) for row in rows)
    return matrix


def _numbers(vector: Vec3) -> List[float]:
    return [vector.x, vector.y, vector.z]


_gym = Gym()


def acquire_gym(*args: Any, **kwargs: Any) -> Gym:
    return _gym
