"""Isaac Gym Preview 4 in its own Python 3.8: GPU, or CPU with `device="cpu"`."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..ipc.errors import UsageError
from ..ipc.messages import Scalar
from . import isaacgym_home, mjcf
from .arguments import Cfg
from .backend import Backend
from .events import LOG
from .launch import Order
from .mjcf_contract import write_contract
from .traits import Traits

DRIVER, GYMTORCH = "driver", "gymtorch"

# Names under which other programs configure the same thing, and what to write here.
_OLD_KEYS = {
    "isaacgym_device_id": 'device="cuda:1" of the backend (1 as this process counts, in the place of 1)',
    "device_id": 'device="cuda:1" of the backend; -1 becomes device="cpu"',
    "compute_device_id": 'device="cuda:1" of the backend',
    "sim_device": 'device="cuda:1" or "cpu" of the backend',
    "graphics_device_id": "nothing: the worker runs without graphics",
    "headless": "nothing: the worker runs without graphics",
    "sim_dt": "dt= of the backend, in seconds",
    "worker_timeout_s": "step_timeout_s= of the backend",
    "worker_command": "worker_python= of the backend",
    "base_name": "nothing: the root is the model's first body",
    "default_keyframe_name": "keyframe=",
    "num_envs": "num_envs= of the backend",
    "use_gpu_pipeline": 'device="cuda:0" or "cpu" of the backend',
}


@dataclass(frozen=True, kw_only=True)
class IsaacGymCfg(Cfg):
    """Isaac Gym's own settings. Lengths in m, times in s, velocities in m/s.

    keyframe                initial state by name; "" = the only one, else the reference pose
    env_spacing             between the origins of neighbouring environments
    self_collision          of the robot; off is what the model contract promises
    enforce_joint_limits    write the model's joint ranges into the engine; what was kept of them is read back
                            and stands in `model.not_reproduced` or `report["notes"]`
    fold_joint_damping      accept passive joint damping by adding it to kv (said in the notes)
    tensor_bridge           "driver": state through libcuda; "gymtorch": through torch, which must be there
    substeps                of the engine in one dt
    solver_type             0 PGS, 1 TGS
    contact_offset, rest_offset, bounce_threshold_velocity, max_depenetration_velocity,
    max_gpu_contact_pairs, default_buffer_size_multiplier, num_subscenes, num_threads,
    num_position_iterations, num_velocity_iterations
                            PhysX's, by its names; num_threads is for the CPU only
    max_linear_velocity, max_angular_velocity
                            PhysX clips body velocities there; rad/s
    """

    keyframe: str = ""
    env_spacing: float = 4.0
    self_collision: bool = False
    enforce_joint_limits: bool = True
    fold_joint_damping: bool = False
    tensor_bridge: str = DRIVER
    substeps: int = 1
    solver_type: int = 1
    num_position_iterations: int = 4
    num_velocity_iterations: int = 1
    num_threads: int = 4
    num_subscenes: int = 0
    contact_offset: float = 0.01
    rest_offset: float = 0.0
    bounce_threshold_velocity: float = 0.5
    max_depenetration_velocity: float = 1.0
    max_gpu_contact_pairs: int = 1 << 23
    default_buffer_size_multiplier: float = 5.0
    max_linear_velocity: float = 1000.0
    max_angular_velocity: float = 1000.0

    def __new__(cls, **given: Any) -> IsaacGymCfg:
        """Say what an old key is called here, before the dataclass says only that it has no such one."""
        for name in given:
            key = name.rpartition(".")[2]
            if key in _OLD_KEYS:
                raise UsageError(f"IsaacGymCfg has no {name!r}; write instead: {_OLD_KEYS[key]}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.tensor_bridge not in (DRIVER, GYMTORCH):
            raise UsageError(
                f"tensor_bridge={self.tensor_bridge!r} must be {DRIVER!r} or {GYMTORCH!r}"
            )
        for name, low, high in (
            ("num_position_iterations", 1, 255), ("num_velocity_iterations", 0, 255),
            ("solver_type", 0, 1), ("substeps", 1, 64), ("num_threads", 0, 1024),
            ("env_spacing", 0.0, 1e6), ("contact_offset", 1e-6, 10.0),
            ("max_linear_velocity", 1e-3, 1e6), ("max_angular_velocity", 1e-3, 1e6),
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not low <= value <= high:
                raise UsageError(f"{name}={value!r} must be {low} to {high}")
        if not self.contact_offset > self.rest_offset:
            raise UsageError("contact_offset must be above rest_offset: PhysX demands it")

    def options(self) -> dict[str, Scalar]:
        """What the worker reads; floats as floats, since the wire and pybind both tell them from ints."""
        options = super().options()
        for field in dataclasses.fields(self):
            if field.type == "float":
                options[field.name] = float(options[field.name])
        return options


class IsaacGymBackend(Backend):
    """Isaac Gym in a worker. Consumes a flat MJCF that is made from the scene (`backends/mjcf.py`), so the
    scene must keep the model contract; SceneError names the rule that it breaks.

    The installation is found by `isaacgym_home.TABLE`; `worker_python=` comes before it.
    """

    simulator = "isaacgym"
    cfg_type = IsaacGymCfg
    # UUID tokens are read by the CUDA driver, and nothing else in this worker reads the mask: no torch.
    # Creating thousands of environments is a loop in Python that reports progress.
    traits: ClassVar[Traits] = Traits(
        packages=("isaacgym",),
        init_s=180.0,
        init_hard_s=3600.0,
        close_s=10.0,
        gpu=True,
        setup="isaacgym",
    )

    @classmethod
    def prepare(cls, order: Order) -> Order:
        """Find the installation, judge the scene and export it."""
        if order.init.render:
            raise UsageError("isaacgym renders no pictures; leave out render=True")
        if not order.init.scene:
            raise UsageError(
                "isaacgym needs a scene: scene= the path of an MJCF file or one of our names"
            )
        found = isaacgym_home.find(os.environ, order.python)
        for notice in found.notices:
            LOG.warning("%s", notice)
        options = dict(order.init.options)
        model = mjcf.inspect(
            order.init.scene,
            fold_joint_damping=bool(options.pop("fold_joint_damping")),
            keyframe=str(options.pop("keyframe")) or None,
        )
        cache: Path = mjcf.default_cache_dir(os.environ)
        flat = mjcf.export_flat(model, cache)
        options["contract"] = str(write_contract(model, flat, cache))
        options["package_root"] = found.package_root
        traits = order.traits
        if options["tensor_bridge"] == GYMTORCH:
            # torch before 2.0 counts devices by NVML and understands integers only; the first build of
            # gymtorch takes minutes without a word.
            traits = dataclasses.replace(traits, uuid_tokens=False, init_s=900.0)
        return dataclasses.replace(
            order,
            traits=traits,
            python=found.python,
            env={**order.env, **found.variables(os.environ, order.env)},
            init=dataclasses.replace(order.init, scene=str(flat.path), options=options),
        )
