"""From a contract to a prepared Isaac Gym simulation: the exact sequence of calls, every answer checked.

Its defaults are not ours (Flex, Y up, two substeps, damping of links): so everything is set.
"""

import math
import os
import re
from typing import Any, Dict, List, Tuple

import numpy as np

from ..ipc.device import CPU
from ..ipc.errors import DevicePlanError, SceneError, UsageError
from ..ipc.messages import Init
from .contract import Contract
from .engine_log import EngineLog, flush
from .isaacgym_properties import Properties
from .simulator import Progress

# Lines that mean that nothing after them can be trusted.
ERROR = re.compile(
    r"\[Error\] \[carb\.gym|Gym cuda error|fail(ed)? to allocate|no kernel image|PhysX Internal CUDA"
    r"|\*\*\* Failed to create sim"
)
_DEVICE = re.compile(r"cuda|allocate|kernel image|device", re.I)


class Options:
    """INIT's options; the host's Cfg has all defaults, so a missing one is a mistake of the host."""

    def __init__(self, values: Dict[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise UsageError(f"INIT's options lack {name!r}") from None


class Scene:
    """The simulation with its environments, and what could not be reproduced."""

    def __init__(
        self, gymapi: Any, init: Init, contract: Contract, log: EngineLog, progress: Progress
    ) -> None:
        self.gymapi, self.init, self.contract, self._log = gymapi, init, contract, log
        self.gpu = init.device.kind != CPU
        # As gymapi.Tensor counts: -1 is host memory. Under a mask of one entry there is a device 0 alone.
        self.device = int(init.device.local.partition(":")[2]) if self.gpu else -1
        self.where = f"{init.device.local} = {init.device.uuid}" if self.gpu else "the CPU"
        self.options = Options(dict(init.options))
        self.notes: List[str] = []
        self.not_reproduced: List[str] = []
        self.gym: Any = gymapi.acquire_gym()
        self.sim: Any = None
        self._progress = progress

    def build(self) -> None:
        self._create_sim()
        self._add_ground()
        asset = self._load_asset()
        self._create_environments(asset)
        self._progress("preparing the simulation", 0, 1)
        self.check(self.gym.prepare_sim(self.sim), "prepare_sim")
        self.look_at_log("preparing the simulation")
        self._check_identity()
        self._progress("preparing the simulation", 1, 1)

    # -- errors ------------------------------------------------------------------------------------

    def check(self, answer: Any, call: str) -> None:
        """Isaac Gym says False, and the reason in the log; it does not raise."""
        if answer is not True:
            flush()
            said = self._log.find(ERROR)
            raise RuntimeError(
                f"Isaac Gym's {call} answered {answer!r}" + (f": {said}" if said else "")
            )

    def look_at_log(self, doing: str) -> None:
        """Raise when the engine reported an error without failing. DevicePlanError when it is one of the
        GPU."""
        flush()
        self.watch_log(doing)

    def watch_log(self, doing: str) -> None:
        """The same in every step: without the flush, since native lines are passed on one by one."""
        said = self._log.find(ERROR)
        if said is None:
            return
        text = f"Isaac Gym logged an error while {doing}, and went on: {said}"
        raise DevicePlanError(text) if _DEVICE.search(said) else RuntimeError(text)

    # -- the simulation ----------------------------------------------------------------------------

    def _create_sim(self) -> None:
        gymapi, stage = self.gymapi, f"creating the simulation on {self.init.device.local}"
        self._progress(stage, 0, 1)
        compute, graphics = (
            max(0, self.device),
            -1,
        )  # the CPU's ordinal is unused; no graphics at all
        sim = self.gym.create_sim(compute, graphics, gymapi.SIM_PHYSX, self._sim_params())
        if sim is None:
            flush()
            raise DevicePlanError(
                f"Isaac Gym's create_sim returned None on {self.where}: it could not start PhysX there (a "
                "driver older than 470, a GPU that it has no kernels for, or no memory left); its own words "
                "stand in the log"
            )
        self.sim = sim
        self.look_at_log("creating the simulation")
        self._progress(stage, 1, 1)

    def _sim_params(self) -> Any:
        gymapi, cfg, gravity = self.gymapi, self.options, self.contract.gravity
        params = gymapi.SimParams()
        params.dt = self.init.dt or self.contract.timestep
        params.substeps = cfg.substeps
        params.up_axis = gymapi.UP_AXIS_Z
        params.gravity = gymapi.Vec3(*gravity)
        params.use_gpu_pipeline = self.gpu
        params.num_client_threads = 0
        params.physx.use_gpu = self.gpu
        params.physx.solver_type = cfg.solver_type
        params.physx.num_position_iterations = cfg.num_position_iterations
        params.physx.num_velocity_iterations = cfg.num_velocity_iterations
        params.physx.num_threads = cfg.num_threads
        params.physx.contact_offset = cfg.contact_offset
        params.physx.rest_offset = cfg.rest_offset
        params.physx.bounce_threshold_velocity = cfg.bounce_threshold_velocity
        params.physx.max_depenetration_velocity = cfg.max_depenetration_velocity
        params.physx.max_gpu_contact_pairs = cfg.max_gpu_contact_pairs
        params.physx.default_buffer_size_multiplier = cfg.default_buffer_size_multiplier
        params.physx.num_subscenes = cfg.num_subscenes
        params.physx.contact_collection = gymapi.CC_ALL_SUBSTEPS
        params.physx.always_use_articulations = True
        return params

    def _add_ground(self) -> None:
        contract = self.contract
        if contract.floor_height is None:
            return
        if contract.floor_height != 0.0:
            raise SceneError(
                f"{contract.path}: the floor is at height {contract.floor_height} m; Isaac Gym's ground is "
                "used at height 0 only"
            )
        plane = self.gymapi.PlaneParams()
        plane.normal = self.gymapi.Vec3(0.0, 0.0, 1.0)
        plane.distance = 0.0
        plane.static_friction = contract.floor_friction
        plane.dynamic_friction = contract.floor_friction
        plane.restitution = 0.0
        self.gym.add_ground(self.sim, plane)

    def _load_asset(self) -> Any:
        gym, contract, options = self.gym, self.contract, self.gymapi.AssetOptions()
        options.fix_base_link = not contract.floating
        options.collapse_fixed_joints = False  # bodies keep their names
        options.default_dof_drive_mode = int(self.gymapi.DOF_MODE_POS)
        options.disable_gravity = False
        options.linear_damping = 0.0
        options.angular_damping = 0.0
        options.max_linear_velocity = self.options.max_linear_velocity
        options.max_angular_velocity = self.options.max_angular_velocity
        options.armature = 0.0  # it would add to the links; ours is the joints'
        options.use_physx_armature = True
        options.density = 1000.0  # unused: every body has an inertial
        options.override_com = False
        options.override_inertia = False
        options.thickness = 0.01
        options.replace_cylinder_with_capsule = False
        options.flip_visual_attachments = False
        options.vhacd_enabled = False
        self._progress("loading the asset", 0, 1)
        root, file = os.path.split(self.init.scene)
        asset = gym.load_asset(self.sim, root, file, options)
        if asset is None:
            flush()
            said = self._log.find(ERROR)
            raise SceneError(
                f"Isaac Gym could not import {self.init.scene} (made from {contract.path})"
                + (f": {said}" if said else "")
            )
        self.look_at_log("loading the asset")
        _same_names("joint", contract.joint_names, gym.get_asset_dof_names(asset))
        _same_names("body", contract.body_names, gym.get_asset_rigid_body_names(asset))
        self._progress("loading the asset", 1, 1)
        return asset

    # -- environments ------------------------------------------------------------------------------

    def _create_environments(self, asset: Any) -> None:
        """Each is complete before the next is begun, as Isaac Gym wants it."""
        gym, gymapi, count = self.gym, self.gymapi, self.init.num_envs
        half, per_row = self.options.env_spacing / 2, math.ceil(math.sqrt(count))
        lower, upper = gymapi.Vec3(-half, -half, 0.0), gymapi.Vec3(half, half, 2 * half)
        pose, mask = self._start_pose(), 0 if self.options.self_collision else 1
        self.envs: List[Any] = []
        self.origins = np.zeros((count, 3), np.float32)
        properties = Properties(self)
        for i in range(count):
            env = gym.create_env(self.sim, lower, upper, per_row)
            if env is None:
                self.check(env, f"create_env number {i}")
            actor = gym.create_actor(env, asset, pose, "robot", i, mask, 0)
            if actor < 0:
                self.check(actor, f"create_actor number {i}")
            properties.write(env, actor)
            origin = gym.get_env_origin(env)
            self.origins[i] = origin.x, origin.y, origin.z
            self.envs.append(env)
            self._actor = actor
            self._progress("creating environments", i + 1, count)
        if not np.isfinite(self.origins).all():
            raise RuntimeError("Isaac Gym gave an environment an origin that is not finite")
        properties.read_back(self.envs[-1], self._actor)
        self.look_at_log("creating environments")

    def _start_pose(self) -> Any:
        """A fixed base stays there; a floating one is put to the keyframe anyway before the first step."""
        contract, gymapi = self.contract, self.gymapi
        at, turn = contract.body_pos[0], contract.body_quat[0]
        if contract.floating:
            at, turn = contract.default_qpos[:3], contract.default_qpos[3:7]
        w, x, y, z = (float(value) for value in turn)
        return gymapi.Transform(
            gymapi.Vec3(*(float(value) for value in at)), gymapi.Quat(x, y, z, w)
        )

    def _check_identity(self) -> None:
        """Rows of the tensors are ours in our order only if these hold."""
        gym, sim, count = self.gym, self.sim, self.init.num_envs
        joints, bodies = len(self.contract.joint_names), len(self.contract.body_names)
        for what, got, wanted in (
            ("actors", gym.get_sim_actor_count(sim), count),
            ("joints", gym.get_sim_dof_count(sim), count * joints),
            ("bodies", gym.get_sim_rigid_body_count(sim), count * bodies),
        ):
            if got != wanted:
                raise RuntimeError(f"Isaac Gym counts {got} {what} where there are {wanted}")
        domain = self.gymapi.DOMAIN_SIM
        for i, env in enumerate(self.envs):
            if gym.get_actor_index(env, self._actor, domain) != i:
                raise RuntimeError(f"the robot of environment {i} is not actor {i} to Isaac Gym")


def _same_names(kind: str, wanted: Tuple[str, ...], got: Any) -> None:
    if list(wanted) != list(got):
        raise SceneError(
            f"Isaac Gym orders or names the {kind} list differently.\n  model: {', '.join(wanted)}\n"
            f"  Isaac Gym: {', '.join(got)}"
        )
