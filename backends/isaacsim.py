"""Isaac Sim through Isaac Lab, in Kit's own Python: GPU, or CPU with `device="cpu"`."""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..ipc.device import CPU
from ..ipc.errors import UsageError
from ..ipc.messages import MAX_PIXELS, Scalar
from . import interpreters, isaacsim_home, mjcf
from .arguments import Cfg
from .backend import Backend
from .events import LOG
from .launch import Order
from .mjcf_contract import write_contract
from .traits import Traits

# Names under which other programs configure the same thing, and what to write here.
_OLD_KEYS = {
    "device_id": 'device="cuda:1" of the backend (1 as this process counts); -1 becomes device="cpu"',
    "isaacsim_device_id": 'device="cuda:1" of the backend (1 as this process counts, in the place of 1)',
    "headless": "nothing: the worker has no window",
    "render_mode": "render= of the backend",
    "tensor_cuda_ipc": 'transport="cuda" of the backend',
    "share_friction_materials": "nothing: the engine's tensors set the friction of all shapes at once",
    "sim_dt": "dt= of the backend, in seconds",
    "worker_timeout_s": "step_timeout_s= of the backend",
    "worker_command": "worker_python= of the backend",
    "base_name": "nothing: the root is the model's first body",
    "default_keyframe_name": "keyframe=",
    "num_envs": "num_envs= of the backend",
}

# The user's own answer to NVIDIA's licence, and what it may come with. Never set here.
_LICENCE = ("OMNI_KIT_ACCEPT_EULA", "ACCEPT_EULA", "PRIVACY_CONSENT", "OMNI_KIT_ALLOW_ROOT")


@dataclass(frozen=True, kw_only=True)
class IsaacSimCfg(Cfg):
    """Isaac Sim's own settings. Lengths in m, times in s, velocities in m/s and rad/s.

    keyframe                initial state by name; "" = the only one, else the reference pose
    env_spacing             between the origins of neighbouring environments
    self_collision          of the robot; off is what the model contract promises
    fold_joint_damping      accept passive joint damping by adding it to kv (said in the notes)
    cache                   folder of Kit's and Warp's caches; "" = one of ours for each rank and GPU
    render_width, render_height
                            of the camera, in pixels; a picture is scaled to the size it is asked for
    solver_type             0 PGS, 1 TGS solver_position_iteration_count, solver_velocity_iteration_count,
    bounce_threshold_velocity, contact_offset, rest_offset, max_depenetration_velocity,
    gpu_max_rigid_contact_count, gpu_max_rigid_patch_count
                            PhysX's, by Isaac Lab's names
    max_linear_velocity, max_angular_velocity
                            PhysX clips body velocities there
    """

    keyframe: str = ""
    env_spacing: float = 4.0
    self_collision: bool = False
    fold_joint_damping: bool = False
    cache: str = ""
    render_width: int = 1280
    render_height: int = 720
    solver_type: int = 1
    solver_position_iteration_count: int = 4
    solver_velocity_iteration_count: int = 1
    bounce_threshold_velocity: float = 0.5
    contact_offset: float = 0.01
    rest_offset: float = 0.0
    max_depenetration_velocity: float = 1.0
    gpu_max_rigid_contact_count: int = 1 << 23
    gpu_max_rigid_patch_count: int = 5 << 15
    max_linear_velocity: float = 1000.0
    max_angular_velocity: float = 1000.0

    def __new__(cls, **given: Any) -> IsaacSimCfg:
        """Say what an old key is called here, before the dataclass says only that it has no such one."""
        for name in given:
            key = name.rpartition(".")[2]
            if key in _OLD_KEYS:
                raise UsageError(f"IsaacSimCfg has no {name!r}; write instead: {_OLD_KEYS[key]}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, low, high in (
            ("solver_position_iteration_count", 1, 255), ("solver_velocity_iteration_count", 0, 255),
            ("solver_type", 0, 1), ("env_spacing", 0.0, 1e6), ("contact_offset", 1e-6, 10.0),
            ("bounce_threshold_velocity", 0.0, 1e6), ("max_depenetration_velocity", 1e-6, 1e6),
            ("gpu_max_rigid_contact_count", 1, 1 << 31), ("gpu_max_rigid_patch_count", 1, 1 << 31),
            ("render_width", 16, MAX_PIXELS), ("render_height", 16, MAX_PIXELS),
            ("max_linear_velocity", 1e-3, 1e6), ("max_angular_velocity", 1e-3, 1e6),
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not low <= value <= high:
                raise UsageError(f"{name}={value!r} must be {low} to {high}")
        if not self.contact_offset > self.rest_offset:
            raise UsageError("contact_offset must be above rest_offset: PhysX demands it")
        if re.search(r"\s", self.cache):
            raise UsageError(
                f"cache={self.cache!r} must have no blanks: Kit's arguments are split there"
            )

    def options(self) -> dict[str, Scalar]:
        """What the worker reads; floats as floats, since the wire tells them from ints."""
        options = super().options()
        for field in dataclasses.fields(self):
            if field.type == "float":
                options[field.name] = float(options[field.name])
        return options


class IsaacSimBackend(Backend):
    """Isaac Sim in a worker. Consumes a flat MJCF that is made from the scene (`backends/mjcf.py`), so the
    scene must keep the model contract; SceneError names the rule that it breaks.

    The installation is found by `isaacsim_home.TABLE`; `worker_python=` comes before it. NVIDIA's licence
    must have been accepted by the user: OMNI_KIT_ACCEPT_EULA=YES in this process's environment, or in
    `env=`.
    """

    simulator = "isaacsim"
    cfg_type = IsaacSimCfg
    # The first start compiles shaders and may fetch extensions: more than ten minutes were seen. Whether Kit
    # reads UUIDs in the mask is not known; integers are what users report to work.
    traits: ClassVar[Traits] = Traits(
        packages=("isaacsim", "isaaclab", "torch"),
        init_s=600.0,
        init_hard_s=3600.0,
        close_s=10.0,
        uuid_tokens=False,
        pass_env=_LICENCE,
        gpu=True,
        setup="isaacsim",
    )

    @classmethod
    def prepare(cls, order: Order) -> Order:
        """Find the installation, judge the scene and export it, give this rank caches of its own."""
        _check(order)
        found = isaacsim_home.find(os.environ, order.python)
        options = dict(order.init.options)
        model = mjcf.inspect(
            order.init.scene,
            fold_joint_damping=bool(options.pop("fold_joint_damping")),
            keyframe=str(options.pop("keyframe")) or None,
        )
        models: Path = mjcf.default_cache_dir(os.environ)
        flat = mjcf.export_flat(model, models)
        cache = str(options["cache"]) or str(rank_cache(order))
        options["contract"] = str(write_contract(model, flat, models))
        options["package_root"] = found.package_root
        options["usd_cache"] = str(interpreters.cache_folder() / "usd")
        options["cache"] = cache
        if re.search(r"\s", cache):
            LOG.warning(
                "Kit's own cache stays shared: its arguments are split at the blanks of %s", cache
            )
            options["cache"] = ""
        # Of the GPU in PCI order, which a masked worker cannot know; -1: nobody does.
        index = order.plan.host_index
        options["physical_index"] = -1 if index is None else index
        return dataclasses.replace(
            order,
            traits=dataclasses.replace(order.traits, python_flags=found.python_flags),
            python=found.python,
            env={**cache_variables(cache), **order.env},
            init=dataclasses.replace(order.init, scene=str(flat.path), options=options),
        )


def _check(order: Order) -> None:
    if not order.init.scene:
        raise UsageError(
            "isaacsim needs a scene: scene= the path of an MJCF file or one of our names"
        )
    if order.init.render and order.plan.device.kind == CPU:
        raise UsageError("isaacsim renders pictures on a GPU only; leave out render=True")


def rank_cache(order: Order) -> Path:
    """Ranks that share Kit's data store and shader caches wait for one another's locks. By GPU besides: two
    jobs on one host both have a rank 0."""
    device = order.plan.device
    where = CPU if device.kind == CPU else device.uuid[:12]
    return interpreters.cache_folder() / "isaacsim" / f"rank{order.init.rank}-{where}"


def cache_variables(cache: str) -> dict[str, str]:
    """What moves the caches that no argument of Kit moves. The worker makes Kit's own portable."""
    return {"XDG_CACHE_HOME": cache, "WARP_CACHE_PATH": os.path.join(cache, "warp")}
