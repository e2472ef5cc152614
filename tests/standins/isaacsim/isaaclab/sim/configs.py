"""Configurations, with the original's names and defaults where ours differ from them on purpose. An unknown
keyword is a TypeError, a missing value is found by `validate`."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, List, Optional, Tuple

MISSING: Any = object()


def validate(cfg: Any) -> None:
    for one in dataclasses.fields(cfg):
        if getattr(cfg, one.name) is MISSING:
            raise TypeError(f"{type(cfg).__name__} has no value for {one.name}")


@dataclass
class PhysxCfg:
    solver_type: int = 1
    min_position_iteration_count: int = 1
    max_position_iteration_count: int = 255
    min_velocity_iteration_count: int = 0
    max_velocity_iteration_count: int = 255
    enable_stabilization: bool = False
    bounce_threshold_velocity: float = 0.5
    gpu_max_rigid_contact_count: int = 2**23
    gpu_max_rigid_patch_count: int = 5 * 2**15


@dataclass
class SimulationCfg:
    physics_prim_path: str = "/physicsScene"
    device: str = "cuda:0"
    dt: float = 1.0 / 60.0
    render_interval: int = 1
    gravity: Tuple[float, ...] = (0.0, 0.0, -9.81)
    use_fabric: bool = True
    physx: PhysxCfg = field(default_factory=PhysxCfg)
    logging_level: str = "WARNING"
    save_logs_to_file: bool = True
    log_dir: Optional[str] = None


@dataclass
class ArticulationRootPropertiesCfg:
    enabled_self_collisions: Optional[bool] = None
    solver_position_iteration_count: Optional[int] = None
    solver_velocity_iteration_count: Optional[int] = None
    sleep_threshold: Optional[float] = None
    stabilization_threshold: Optional[float] = None
    fix_root_link: Optional[bool] = None


@dataclass
class RigidBodyPropertiesCfg:
    disable_gravity: Optional[bool] = None
    linear_damping: Optional[float] = None
    angular_damping: Optional[float] = None
    max_linear_velocity: Optional[float] = None
    max_angular_velocity: Optional[float] = None  # degrees per second
    max_depenetration_velocity: Optional[float] = None


@dataclass
class CollisionPropertiesCfg:
    collision_enabled: Optional[bool] = None
    contact_offset: Optional[float] = None
    rest_offset: Optional[float] = None


@dataclass
class UsdFileCfg:
    usd_path: str = MISSING
    scale: Optional[Tuple[float, float, float]] = None
    activate_contact_sensors: bool = False
    rigid_props: Optional[RigidBodyPropertiesCfg] = None
    collision_props: Optional[CollisionPropertiesCfg] = None
    articulation_props: Optional[ArticulationRootPropertiesCfg] = None


@dataclass
class PinholeCameraCfg:
    focal_length: float = 24.0


@dataclass
class CameraCfg:
    prim_path: str = MISSING
    update_period: float = 0.0
    data_types: List[str] = field(default_factory=lambda: ["rgb"])
    width: int = MISSING
    height: int = MISSING
    spawn: Any = MISSING


@dataclass
class ContactSensorCfg:
    prim_path: str = MISSING
    update_period: float = 0.0
    history_length: int = 0


@dataclass
class MjcfConverterCfg:
    asset_path: str = MISSING
    usd_dir: Optional[str] = None
    usd_file_name: Optional[str] = None
    force_usd_conversion: bool = False
    make_instanceable: bool = True
    link_density: float = 0.0
    import_inertia_tensor: bool = True
    fix_base: bool = MISSING
    import_sites: bool = True
    self_collision: bool = False


@dataclass
class ImplicitActuatorCfg:
    joint_names_expr: List[str] = MISSING
    effort_limit: Any = None
    velocity_limit: Any = None
    effort_limit_sim: Any = None
    velocity_limit_sim: Any = None
    stiffness: Any = MISSING
    damping: Any = MISSING
    armature: Any = None
    friction: Any = None
    dynamic_friction: Any = None
    viscous_friction: Any = None


@dataclass
class InitialStateCfg:
    pos: Tuple[float, float, float] = (0.0, 0.0, 0.0)
    rot: Tuple[float, float, float, float] = (1.0, 0.0, 0.0, 0.0)
    lin_vel: Tuple[float, float, float] = (0.0, 0.0, 0.0)
    ang_vel: Tuple[float, float, float] = (0.0, 0.0, 0.0)
    joint_pos: Any = field(default_factory=lambda: {".*": 0.0})
    joint_vel: Any = field(default_factory=lambda: {".*": 0.0})


@dataclass
class ArticulationCfg:
    InitialStateCfg = InitialStateCfg

    prim_path: str = MISSING
    articulation_root_prim_path: Optional[str] = None
    spawn: Any = None
    init_state: InitialStateCfg = field(default_factory=InitialStateCfg)
    soft_joint_pos_limit_factor: float = 1.0
    actuators: Any = MISSING
