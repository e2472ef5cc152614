"""MuJoCo-Warp: MuJoCo's model on the GPU, or on the CPU with `device="cpu"`."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

from ..ipc.errors import UsageError
from . import interpreters
from .arguments import Cfg
from .backend import Backend
from .launch import Order
from .traits import Recipe, Traits

_CACHE = "WARP_CACHE_PATH"

ENVIRONMENT = Recipe(
    name="mjwarp",
    requirements=("mujoco-warp==4.0.0", "warp-lang==1.19.0", "mujoco==4.0.0"),
    oldest=(3, 11),
    newest=(3, 13),
    size_gb=0.7,
)


@dataclass(frozen=True, kw_only=True)
class MJWarpCfg(Cfg):
    """MuJoCo-Warp's own settings.

    keyframe    initial state by name; "" = the only one, else the reference pose
    nconmax     contacts per environment, on average: all environments share one pool of num_envs * nconmax;
                0 = by the rule in `workers/mjwarp_capacity.py`
    njmax       constraint rows that one environment may have; 0 = by that rule

    The capacity in use stands in `report["notes"]`. An environment that needs more ends the run with
    WorkerFailed, which says which of the two to raise: going on would corrupt other environments too.
    """

    keyframe: str = ""
    nconmax: int = 0
    njmax: int = 0

    def __post_init__(self) -> None:
        for name in ("nconmax", "njmax"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise UsageError(f"{name}={value!r} must be a whole number; 0 = by the rule")


class MJWarpBackend(Backend):
    """MuJoCo-Warp in a worker. Consumes the MJCF as it is.

    Its Python is found as `interpreters.locate_for` says: `outboard setup mjwarp` makes one. Compiled kernels
    are kept in one folder for all ranks, WARP_CACHE_PATH where that is set.
    """

    simulator = "mjwarp"
    cfg_type = MJWarpCfg
    # With an empty cache two cores compile for half a minute, stage after stage with progress; eight ranks
    # that start together do it at the same time.
    traits = Traits(
        packages=("mujoco_warp",),
        init_s=180.0,
        init_hard_s=1800.0,
        close_s=10.0,
        gpu=True,
        setup="mjwarp",
        environment=ENVIRONMENT,
    )

    @classmethod
    def prepare(cls, order: Order) -> Order:
        """Name the folder of compiled kernels: all ranks, and later runs, share it."""
        if order.init.render:
            raise UsageError("mjwarp renders no pictures; leave out render=True")
        if not order.init.scene:
            raise UsageError("mjwarp needs a scene: the path of an MJCF file or one of our names")
        cache = os.environ.get(_CACHE) or str(interpreters.cache_folder() / "warp")
        return dataclasses.replace(order, env={_CACHE: cache, **order.env})
