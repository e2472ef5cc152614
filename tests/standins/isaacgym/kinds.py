"""Plain data of the stand-in's gymapi: vectors, parameters, properties, enumerations.

Attributes are checked at assignment, as pybind does: a misspelt name is an AttributeError, a wrong type a
TypeError.
"""

import enum
from typing import TYPE_CHECKING, Any, ClassVar, Dict, Tuple


class Record:
    """A class with these attributes and no others, each with its default; its type is the default's."""

    DEFAULTS: ClassVar[Dict[str, Any]] = {}

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self) -> None:
        for name, value in self.DEFAULTS.items():
            object.__setattr__(self, name, value() if isinstance(value, type) else value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.DEFAULTS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        default = self.DEFAULTS[name]
        wanted = default if isinstance(default, type) else type(default)
        number = wanted is float and isinstance(value, int) and not isinstance(value, bool)
        if wanted is not object and not number and type(value) is not wanted:
            raise TypeError(
                f"(): incompatible function arguments: {name} takes {wanted.__name__}, not {value!r}"
            )
        object.__setattr__(self, name, float(value) if wanted is float else value)


class Vec3(Record):
    DEFAULTS: ClassVar[Dict[str, Any]] = {"x": 0.0, "y": 0.0, "z": 0.0}

    def __init__(self, x: float = 0.0, y: float = 0.0, z: float = 0.0) -> None:
        super().__init__()
        self.x, self.y, self.z = x, y, z


class Quat(Record):
    DEFAULTS: ClassVar[Dict[str, Any]] = {"x": 0.0, "y": 0.0, "z": 0.0, "w": 1.0}

    def __init__(self, x: float = 0.0, y: float = 0.0, z: float = 0.0, w: float = 1.0) -> None:
        super().__init__()
        self.x, self.y, self.z, self.w = x, y, z, w


class Transform(Record):
    DEFAULTS: ClassVar[Dict[str, Any]] = {"p": Vec3, "r": Quat}

    def __init__(self, p: Any = None, r: Any = None) -> None:
        super().__init__()
        if p is not None:
            self.p = p
        if r is not None:
            self.r = r


class Mat33(Record):
    DEFAULTS: ClassVar[Dict[str, Any]] = {"x": Vec3, "y": Vec3, "z": Vec3}


class SimType(enum.Enum):
    SIM_PHYSX = 0
    SIM_FLEX = 1


class UpAxis(enum.Enum):
    UP_AXIS_Y = 0
    UP_AXIS_Z = 1


class DofDriveMode(enum.IntEnum):
    DOF_MODE_NONE = 0
    DOF_MODE_POS = 1
    DOF_MODE_VEL = 2
    DOF_MODE_EFFORT = 3


class TensorDataType(enum.Enum):
    DTYPE_FLOAT32 = 1
    DTYPE_UINT32 = 2
    DTYPE_UINT64 = 3
    DTYPE_UINT8 = 4
    DTYPE_INT16 = 5


class ContactCollection(enum.Enum):
    CC_NEVER = 0
    CC_LAST_SUBSTEP = 1
    CC_ALL_SUBSTEPS = 2


class IndexDomain(enum.Enum):
    DOMAIN_ACTOR = 0
    DOMAIN_ENV = 1
    DOMAIN_SIM = 2


class CoordinateSpace(enum.Enum):
    ENV_SPACE = 0
    LOCAL_SPACE = 1
    GLOBAL_SPACE = 2


class ImageType(enum.Enum):
    IMAGE_COLOR = 0
    IMAGE_DEPTH = 1


class PhysXParams(Record):
    DEFAULTS: ClassVar[Dict[str, Any]] = {
        "always_use_articulations": False, "bounce_threshold_velocity": 0.2,
        "contact_collection": ContactCollection.CC_ALL_SUBSTEPS, "contact_offset": 0.02,
        "default_buffer_size_multiplier": 2.0, "friction_correlation_distance": 0.025,
        "friction_offset_threshold": 0.04, "max_depenetration_velocity": 100.0,
        "max_gpu_contact_pairs": 1 << 20, "num_position_iterations": 4, "num_subscenes": 0,
        "num_threads": 0, "num_velocity_iterations": 1, "rest_offset": 0.001, "solver_type": 0,
        "use_gpu": False,
    }  # fmt: skip


class SimParams(Record):
    DEFAULTS: ClassVar[Dict[str, Any]] = {
        "dt": 1 / 60, "gravity": Vec3, "up_axis": UpAxis.UP_AXIS_Y, "substeps": 2,
        "use_gpu_pipeline": False, "num_client_threads": 0, "physx": PhysXParams,
        "enable_actor_creation_warning": True,
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.gravity = Vec3(0.0, -9.8, 0.0)


class PlaneParams(Record):
    DEFAULTS: ClassVar[Dict[str, Any]] = {
        "distance": 0.0, "dynamic_friction": 1.0, "normal": Vec3, "restitution": 0.0,
        "segmentation_id": 0, "static_friction": 1.0,
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.normal = Vec3(0.0, 1.0, 0.0)


class AssetOptions(Record):
    DEFAULTS: ClassVar[Dict[str, Any]] = {
        "angular_damping": 0.5, "armature": 0.0, "collapse_fixed_joints": False,
        "default_dof_drive_mode": 0, "density": 1000.0, "disable_gravity": False,
        "enable_gyroscopic_forces": True, "fix_base_link": False,
        "flip_visual_attachments": True, "linear_damping": 0.0, "max_angular_velocity": 64.0,
        "max_linear_velocity": 1000.0, "override_com": False, "override_inertia": False,
        "replace_cylinder_with_capsule": False, "thickness": 0.02, "use_physx_armature": True,
        "vhacd_enabled": False,
    }  # fmt: skip


class RigidBodyProperties(Record):
    DEFAULTS: ClassVar[Dict[str, Any]] = {
        "mass": 0.0, "com": Vec3, "inertia": Mat33, "invMass": 0.0, "invInertia": Mat33, "flags": 0,
    }  # fmt: skip


class RigidShapeProperties(Record):
    DEFAULTS: ClassVar[Dict[str, Any]] = {
        "friction": 1.0, "rolling_friction": 0.0, "torsion_friction": 0.0, "restitution": 0.0,
        "contact_offset": 0.02, "rest_offset": 0.0, "filter": 0, "thickness": 0.02, "compliance": 0.0,
    }  # fmt: skip


class CameraProperties(Record):
    DEFAULTS: ClassVar[Dict[str, Any]] = {
        "width": 1600, "height": 900, "horizontal_fov": 90.0, "near_plane": 0.01, "far_plane": 1e5,
        "enable_tensors": False, "use_collision_geometry": False,
    }  # fmt: skip


class Version(Record):
    DEFAULTS: ClassVar[Dict[str, Any]] = {"major": 1, "minor": 0}


class Tensor(Record):
    """A descriptor: an address and what is said to be there. It keeps nothing alive."""

    DEFAULTS: ClassVar[Dict[str, Any]] = {
        "data_address": 0,
        "device": -1,
        "dtype": object,
        "own_data": False,
        "shape": object,
    }

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "shape":
            if len(value) > 8:
                raise ValueError("a tensor has at most 8 dimensions")
            value = tuple(int(size) for size in value)
        elif name == "dtype" and not isinstance(value, (TensorDataType, object)):
            raise TypeError("dtype takes a TensorDataType")
        super().__setattr__(name, value)

    def __init__(self) -> None:
        object.__setattr__(self, "data_address", 0)
        object.__setattr__(self, "device", -1)
        object.__setattr__(self, "dtype", None)
        object.__setattr__(self, "own_data", False)
        object.__setattr__(self, "shape", ())

    @property
    def ndim(self) -> int:
        return len(self.shape)


def size_of(shape: Tuple[int, ...]) -> int:
    count = 1
    for each in shape:
        count *= each
    return count
