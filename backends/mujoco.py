"""MuJoCo on the CPU: the embedded default and the reference for all others."""

from __future__ import annotations

from dataclasses import dataclass

from .arguments import Cfg
from .backend import Backend
from .traits import Traits


@dataclass(frozen=True)
class MuJoCoCfg(Cfg):
    """threads: of the worker, 0 = the cores this process may use; keyframe: initial state by name."""

    threads: int = 0
    keyframe: str = ""


class MuJoCoBackend(Backend):
    """MuJoCo in a worker. Consumes the MJCF as it is; any version from 3.2.3 on."""

    simulator = "mujoco"
    traits = Traits(packages=("mujoco",), init_s=60.0, close_s=5.0)
    cfg_type = MuJoCoCfg
