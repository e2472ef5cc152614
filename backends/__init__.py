"""What training code imports. Python 3.10+; imports `ipc`, never `workers`."""

from ..ipc.errors import (
    DeviceMismatchError,
    DevicePlanError,
    ErrorReport,
    OutboardError,
    ProtocolError,
    SceneError,
    UsageError,
    WorkerDied,
    WorkerFailed,
    WorkerLaunchError,
    WorkerTimeout,
)
from .backend import Backend
from .custom import CustomBackend, CustomCfg
from .device_plan import DevicePlan
from .fake import FakeBackend, FakeCfg
from .isaacgym import IsaacGymBackend, IsaacGymCfg
from .isaacsim import IsaacSimBackend, IsaacSimCfg
from .mjwarp import MJWarpBackend, MJWarpCfg
from .mujoco import MuJoCoBackend, MuJoCoCfg
from .rank_check import plan_together
from .rank_plan import RankPlan
from .state import Model, State, Timings
from .traits import Traits

__all__ = [
    "Backend",
    "CustomBackend",
    "CustomCfg",
    "DeviceMismatchError",
    "DevicePlan",
    "DevicePlanError",
    "ErrorReport",
    "FakeBackend",
    "FakeCfg",
    "IsaacGymBackend",
    "IsaacGymCfg",
    "IsaacSimBackend",
    "IsaacSimCfg",
    "MJWarpBackend",
    "MJWarpCfg",
    "Model",
    "MuJoCoBackend",
    "MuJoCoCfg",
    "OutboardError",
    "ProtocolError",
    "RankPlan",
    "SceneError",
    "State",
    "Timings",
    "Traits",
    "UsageError",
    "WorkerDied",
    "WorkerFailed",
    "WorkerLaunchError",
    "WorkerTimeout",
    "plan_together",
]
