"""The stage: physics settings, ground, one robot, its clones, and the views that `reset` makes of them.

Imported after Kit has started. Isaac Lab's own ground plane is a download, and a plane that is not listed
in the collision filter holds nobody.
"""

# pyright: reportAttributeAccessIssue=false
# (USD makes its names at run time.)

import re
from typing import Any, Dict, List

import isaaclab.sim as sim_utils  # type: ignore[import-not-found]
import numpy as np
from isaaclab.assets import Articulation  # type: ignore[import-not-found]
from isaaclab.sensors import ContactSensor, ContactSensorCfg  # type: ignore[import-not-found]
from isaacsim.core.cloner import GridCloner  # type: ignore[import-not-found]
from pxr import UsdGeom, UsdPhysics  # type: ignore[import-not-found]

from ..ipc.device import CPU
from ..ipc.errors import DevicePlanError, SceneError
from ..ipc.messages import Init
from . import isaacsim_robot, isaacsim_usd
from .contract import Contract
from .engine_log import EngineLog, flush
from .simulator import Progress

PHYSICS = "/physicsScene"
GROUND = "/World/ground"
ENVS = "/World/envs"
ROBOT = ENVS + "/env_.*/Robot"

# Lines after which the simulation is not where it should be, or is none; Kit goes on without failing.
ERROR = re.compile(
    r"GPU solver pipeline failed|switching to software|PhysX Internal CUDA|fail(ed)? to allocate"
    r"|no kernel image|invalid device ordinal|illegal memory access|CUDA error",
    re.I,
)
# Of the renderer, which counts GPUs that a mask hides from CUDA: of no weight to physics alone.
RENDERER = re.compile(
    r"Defaulting to GPU0|CUDA being in bad state|Failed to get primary context", re.I
)


class Scene:
    """The simulation with its environments. `robot` is an Isaac Lab Articulation, `sim` its context."""

    def __init__(
        self, init: Init, contract: Contract, version: str, log: EngineLog, progress: Progress
    ) -> None:
        self.init, self.contract, self._log, self._progress = init, contract, log, progress
        self.options: Dict[str, Any] = dict(init.options)
        self.version = version  # of Isaac Sim
        self.gpu = init.device.kind != CPU
        self.device = init.device.local if self.gpu else CPU
        self.where = f"{init.device.local} = {init.device.uuid}" if self.gpu else "the CPU"
        self.dt = init.dt or contract.timestep
        self.notes: List[str] = []
        self.not_reproduced: List[str] = []
        self.sensor: Any = None
        # Where each of the model's joints and bodies is in the engine's order.
        self.joint_ids: List[int] = []
        self.body_ids: List[int] = []
        self.camera: Any = None

    def build(self) -> None:
        self._stage("making the simulation", self._make_sim)
        self._stage("importing the model", self._import_model)
        self._stage("cloning environments", self._clone)
        self._stage("building the physics views", self._reset)
        self.look_at_log("building the physics views")
        self._check_views()
        isaacsim_robot.finish(self)

    def _stage(self, words: str, act: Any) -> None:
        """Kit may end the process in any of these; the last words tell where."""
        self._progress(words, 0, 1)
        act()
        self._progress(words, 1, 1)

    # -- errors ------------------------------------------------------------------------------------

    def look_at_log(self, doing: str) -> None:
        """DevicePlanError when the engine reported that it is not on its GPU, and went on."""
        flush()
        self.watch_log(doing)

    def watch_log(self, doing: str) -> None:
        """The same in every step: native lines are passed on one by one."""
        for line in self._log.new_lines():
            of_renderer = RENDERER.search(line)
            if ERROR.search(line) or (of_renderer and self.init.render):
                raise DevicePlanError(
                    f"Isaac Sim logged an error while {doing} on {self.where}, and went on: {line.strip()}"
                )
            if of_renderer:
                self.notes.append(f"of the renderer, which is not used: {line.strip()}")

    # -- the stage ---------------------------------------------------------------------------------

    def _make_sim(self) -> None:
        options = self.options
        positions, velocities = (
            options["solver_position_iteration_count"],
            options["solver_velocity_iteration_count"],
        )
        physx = sim_utils.PhysxCfg(
            solver_type=options["solver_type"],
            min_position_iteration_count=positions,  # a count is forced by an equal range
            max_position_iteration_count=positions,
            min_velocity_iteration_count=velocities,
            max_velocity_iteration_count=velocities,
            bounce_threshold_velocity=options["bounce_threshold_velocity"],
            gpu_max_rigid_contact_count=options["gpu_max_rigid_contact_count"],
            gpu_max_rigid_patch_count=options["gpu_max_rigid_patch_count"],
        )
        cfg = sim_utils.SimulationCfg(
            dt=self.dt,
            device=self.device,
            gravity=tuple(self.contract.gravity),
            physics_prim_path=PHYSICS,
            physx=physx,
            use_fabric=True,
            render_interval=1,
            save_logs_to_file=False,
            logging_level="ERROR",
        )
        if sim_utils.get_current_stage() is None:
            sim_utils.create_new_stage()
        self.sim = sim_utils.SimulationContext(cfg)
        self.look_at_log("making the simulation")

    def _import_model(self) -> None:
        options, contract = self.options, self.contract
        self.usd = isaacsim_usd.cached(
            self.init.scene,
            str(options["usd_cache"]),
            not contract.floating,
            bool(options["self_collision"]),
            self.version,
        )
        self.paths = isaacsim_usd.robot_paths(self.usd, contract.body_names[0])

    def _clone(self) -> None:
        """Ground, robot of environment 0, sensors; then all others are clones of environment 0."""
        stage, count = self.sim.get_initial_stage(), self.init.num_envs
        cloner = GridCloner(spacing=self.options["env_spacing"])
        cloner.define_base_env(ENVS)
        paths = cloner.generate_paths(ENVS + "/env", count)
        UsdGeom.Xform.Define(stage, paths[0])
        self._add_ground(stage)
        self.robot = Articulation(isaacsim_robot.articulation_cfg(self, ROBOT))
        origins = cloner.clone(
            source_prim_path=paths[0],
            prim_paths=paths,
            replicate_physics=True,
            base_env_path=ENVS,
            root_path=ENVS + "/env_",
            copy_from_source=False,
        )
        shared = [GROUND] if self.contract.floor_height is not None else []
        cloner.filter_collisions(PHYSICS, "/World/collisions", paths, global_paths=shared)
        self.origins = np.array(origins, np.float32).reshape(count, 3)
        self.env_paths = [str(path) for path in paths]
        if "contact_force" in self.init.publish:
            bodies = ROBOT + self.paths.bodies + "/.*"
            self.sensor = ContactSensor(ContactSensorCfg(prim_path=bodies, update_period=0.0))
        if self.init.render:
            from .isaacsim_camera import Camera

            self.camera = Camera(self)

    def _add_ground(self, stage: Any) -> None:
        """An endless plane with Z up. "max" is MuJoCo's rule for the friction of two shapes, and in PhysX
        the strongest: it decides whatever the robot's shapes say."""
        if self.contract.floor_height is None:
            return
        UsdGeom.Xform.Define(stage, GROUND)
        plane = UsdGeom.Plane.Define(stage, GROUND + "/plane")
        plane.CreateAxisAttr("Z")
        UsdGeom.XformCommonAPI(plane).SetTranslate((0.0, 0.0, self.contract.floor_height))
        UsdPhysics.CollisionAPI.Apply(plane.GetPrim())
        material = sim_utils.RigidBodyMaterialCfg(
            static_friction=self.contract.floor_friction,
            dynamic_friction=self.contract.floor_friction,
            restitution=0.0,
            friction_combine_mode="max",
        )
        material.func(GROUND + "/material", material)
        sim_utils.bind_physics_material(GROUND + "/plane", GROUND + "/material")

    def _reset(self) -> None:
        """Starts the timeline; the articulation has its tensors only from here on. Isaac Lab puts torch's
        current device right after it, and after each step."""
        try:
            self.sim.reset()
        except ValueError as error:  # of names that match none, or a pose outside its limits
            words = " ".join(str(error).split())
            raise SceneError(
                f"Isaac Lab refused the robot of {self.contract.path}: {words}"
            ) from error

    # -- what came of it -----------------------------------------------------------------------------

    def _check_views(self) -> None:
        """Rows of the views are ours in our order, and lie where they should, only if these hold."""
        view, count = self.robot.root_physx_view, self.init.num_envs
        paths = [str(path) for path in view.prim_paths]
        wrong = len(paths) != count or any(
            not path.startswith(env + "/") for path, env in zip(paths, self.env_paths)
        )
        if wrong:
            raise RuntimeError(
                f"Isaac Sim's view holds {len(paths)} robots in the order {', '.join(paths[:8])}; "
                f"{count} in the order of the environments belong there"
            )
        place = str(view.get_root_transforms().device)
        if place != self.device and place == CPU:
            raise DevicePlanError(
                "PhysX fell back to the CPU without failing: the state lies in host memory, and "
                f"{self.where} is planned"
            )
        if place != self.device:
            raise DevicePlanError(
                f"the state lies on Isaac Sim's {place}; {self.device} is planned"
            )
