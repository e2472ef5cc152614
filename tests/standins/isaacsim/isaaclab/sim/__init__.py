"""The simulation context, spawners and stage helpers."""

# pyright: reportAttributeAccessIssue=false
# (USD makes its names at run time.)

import os
import tempfile
from dataclasses import dataclass, field
from typing import Any, Optional

from kit_standin.kit import KIT, die, error, require, segfault
from kit_standin.settings import SETTINGS
from kit_standin.view import SimulationView

require(__name__)

from pxr import Usd, UsdGeom, UsdPhysics, UsdShade  # noqa: E402

from .configs import (  # noqa: E402
    ArticulationRootPropertiesCfg,
    CollisionPropertiesCfg,
    PhysxCfg,
    PinholeCameraCfg,
    RigidBodyPropertiesCfg,
    SimulationCfg,
    UsdFileCfg,
)

__all__ = [
    "ArticulationRootPropertiesCfg",
    "CollisionPropertiesCfg",
    "DomeLightCfg",
    "GroundPlaneCfg",
    "PhysxCfg",
    "PinholeCameraCfg",
    "RigidBodyMaterialCfg",
    "RigidBodyPropertiesCfg",
    "SimulationCfg",
    "SimulationContext",
    "UsdFileCfg",
    "bind_physics_material",
    "create_new_stage",
    "get_current_stage",
]


def get_current_stage() -> Any:
    return KIT.stage


def create_new_stage() -> Any:
    KIT.stage = Usd.Stage.CreateInMemory()
    return KIT.stage


def bind_physics_material(prim_path: str, material_path: str) -> None:
    material = UsdShade.Material(KIT.stage.GetPrimAtPath(material_path))
    if not material:
        raise ValueError(f"there is no material at {material_path}")
    api = UsdShade.MaterialBindingAPI.Apply(KIT.stage.GetPrimAtPath(prim_path))
    api.Bind(material, UsdShade.Tokens.strongerThanDescendants, "physics")


def _spawn_material(prim_path: str, cfg: "RigidBodyMaterialCfg") -> Any:
    material = UsdShade.Material.Define(KIT.stage, prim_path)
    api = UsdPhysics.MaterialAPI.Apply(material.GetPrim())
    api.CreateStaticFrictionAttr(cfg.static_friction)
    api.CreateDynamicFrictionAttr(cfg.dynamic_friction)
    api.CreateRestitutionAttr(cfg.restitution)
    material.GetPrim().SetCustomDataByKey("combine", cfg.friction_combine_mode)
    return material.GetPrim()


def _spawn_light(prim_path: str, cfg: "DomeLightCfg") -> Any:
    return UsdGeom.Xform.Define(KIT.stage, prim_path).GetPrim()


def _download(prim_path: str, cfg: Any) -> Any:
    raise FileNotFoundError(f"the asset server cannot be reached: {cfg.usd_path}")


@dataclass
class RigidBodyMaterialCfg:
    static_friction: float = 0.5
    dynamic_friction: float = 0.5
    restitution: float = 0.0
    friction_combine_mode: str = "average"
    func: Any = field(default=_spawn_material)


@dataclass
class GroundPlaneCfg:
    usd_path: str = "https://assets.invalid/Environments/Grid/default_environment.usd"
    func: Any = field(default=_download)


@dataclass
class DomeLightCfg:
    intensity: float = 1.0
    func: Any = field(default=_spawn_light)


class SimulationContext:
    """A singleton. Assets register themselves and get their views in `reset`."""

    def __init__(self, cfg: Optional[SimulationCfg] = None) -> None:
        self.cfg = SimulationCfg() if cfg is None else cfg
        if KIT.stage is None:
            raise RuntimeError("The stage has not been created. Did you run the simulator?")
        if KIT.context is not None:
            die("a second SimulationContext")
        if self.cfg.save_logs_to_file and self.cfg.log_dir is None:
            die(f"a log is written to {tempfile.gettempdir()}")
        KIT.context = self
        self.device = self.cfg.device
        self._disable_app_control_on_stop_handle = False
        self.assets: list[Any] = []
        self.physics_sim_view: Any = None
        self._raised: Optional[Exception] = None
        UsdPhysics.Scene.Define(KIT.stage, self.cfg.physics_prim_path)
        if (SETTINGS.physics == "software" and "cuda" in self.device) or SETTINGS.physics == "log":
            error("PhysX error: GPU solver pipeline failed, switching to software")
        if SETTINGS.physics == "segv":
            segfault()

    def get_initial_stage(self) -> Any:
        return KIT.stage

    def is_playing(self) -> bool:
        return KIT.playing

    def reset(self, soft: bool = False) -> None:
        self._disable_app_control_on_stop_handle = True
        KIT.playing = True
        self.physics_sim_view = SimulationView()
        for asset in self.assets:
            try:
                asset.initialize()
            except Exception as why:  # noqa: BLE001 - kept, and raised by whatever comes next
                self._raised = self._raised or why
        for _ in range(2):
            self._app_update()
        self._disable_app_control_on_stop_handle = False

    def step(self, render: bool = True) -> None:
        self._raise()
        if not KIT.playing:
            die("step() while the timeline does not play: it renders for ever")
        if SETTINGS.complain:
            error(SETTINGS.complain)
        for engine in self.physics_sim_view.engines:
            engine.step()
        if render:
            self.render()

    def render(self, mode: Any = None) -> None:
        if not KIT.cameras:
            die("render() without cameras drives all of Kit for nothing")
        self._app_update()

    def forward(self) -> None:
        if self.physics_sim_view is not None:
            self.physics_sim_view.update_articulations_kinematic()

    def _app_update(self) -> None:
        self._raise()
        for asset in self.assets:
            asset.rendered()

    def _raise(self) -> None:
        why, self._raised = self._raised, None
        if why is not None:
            raise why

    def stop(self) -> None:
        KIT.playing = False
        while not self._disable_app_control_on_stop_handle:
            os.sched_yield()  # renders until the timeline plays again

    def clear_all_callbacks(self) -> None:
        pass

    @classmethod
    def clear_instance(cls) -> None:
        KIT.context = None
