"""Contact sensor and camera."""

import re
from types import SimpleNamespace
from typing import Any, List

import numpy as np
import torch
from kit_standin.kit import KIT, die, require, torch_device

require(__name__)

from .sim.configs import CameraCfg, ContactSensorCfg, validate  # noqa: E402

__all__ = ["Camera", "CameraCfg", "ContactSensor", "ContactSensorCfg"]


class ContactSensor:
    """Net forces of the bodies that match, from the last name to the first."""

    def __init__(self, cfg: ContactSensorCfg) -> None:
        validate(cfg)
        self.cfg, self._stale = cfg, False
        self.robots = [asset for asset in KIT.context.assets if hasattr(asset, "cfg")]
        KIT.context.assets.append(self)

    def initialize(self) -> None:
        (robot,) = (asset for asset in self.robots if hasattr(asset, "engine"))
        if not robot.cfg.spawn.activate_contact_sensors:
            raise RuntimeError("Sensor could not find any bodies with contact reporter API.")
        self._engine = robot.engine
        folder = self.cfg.prim_path.rpartition("/")[0].replace(".*", "0")
        bodies = KIT.stage.GetPrimAtPath(folder)
        names = [str(child.GetName()) for child in bodies.GetChildren()] if bodies else []
        leaf = self.cfg.prim_path.rpartition("/")[2]
        found = [name for name in names if re.fullmatch(leaf, name)]
        self.body_names: List[str] = sorted(found, reverse=True)
        if not self.body_names:
            raise RuntimeError(f"Sensor at path '{self.cfg.prim_path}' could not find any bodies")
        self._order = [self._engine.body_names.index(name) for name in self.body_names]
        self._device = torch_device(KIT.context.device)
        self._forces = torch.zeros((self._engine.count, len(self._order), 3), device=self._device)

    def rendered(self) -> None:
        pass

    def update(self, dt: float, force_recompute: bool = False) -> None:
        self._stale = True
        if force_recompute:
            self._recompute()

    def _recompute(self) -> None:
        forces = self._engine.contacts()[:, self._order].astype(np.float32)
        self._forces = torch.as_tensor(forces, device=self._device)
        self._stale = False

    @property
    def data(self) -> Any:
        if self._stale:
            self._recompute()
        return SimpleNamespace(net_forces_w=self._forces)


class Camera:
    """A picture whose red says how many frames were rendered, and whose blue is where it stands; the first
    frames are black."""

    def __init__(self, cfg: CameraCfg) -> None:
        validate(cfg)
        if not KIT.cameras:
            raise RuntimeError("A camera was spawned without the --enable_cameras flag.")
        self.cfg, self._frames, self._ready, self._eye = cfg, 0, False, None
        KIT.context.assets.append(self)
        self.data: Any = SimpleNamespace(output={})

    def initialize(self) -> None:
        self._ready = True

    def rendered(self) -> None:
        self._frames += 1

    def set_world_poses_from_view(self, eyes: Any, targets: Any, env_ids: Any = None) -> None:
        if not self._ready:
            die("a camera that was made after the simulation's reset")
        self._eye = eyes[0].cpu().numpy()

    def update(self, dt: float, force_recompute: bool = False) -> None:
        picture = torch.zeros((1, self.cfg.height, self.cfg.width, 3), dtype=torch.uint8)
        if self._frames > 6 and self._eye is not None and force_recompute:
            picture[..., 0], picture[..., 2] = 200, int(abs(float(self._eye[0])) * 10) % 256
        self.data.output["rgb"] = picture
