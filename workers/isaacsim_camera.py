"""One camera and one light, for pictures of an environment. Imported after Kit has started with cameras."""

import math
from typing import Any, Dict, Tuple

import isaaclab.sensors as sensors  # type: ignore[import-not-found]
import isaaclab.sim as sim_utils  # type: ignore[import-not-found]
import numpy as np
import torch

from ..ipc.errors import UsageError
from ..ipc.messages import Render

# The first frames of a renderer that compiles its shaders are black.
_WARM_UP = 8
_LOOK = {
    "distance": 3.0,
    "azimuth": 135.0,
    "elevation": -20.0,
}  # m, degrees, as MuJoCo's free camera
_CENTRE = ("lookat_x", "lookat_y", "lookat_z")  # m, in the environment; default: the robot's root


class Camera:
    """Made before the simulation's reset. Pictures are rendered at the Cfg's size and scaled to what is
    asked for: a camera's size is fixed when it is made."""

    def __init__(self, scene: Any) -> None:
        self._scene, self._warm = scene, False
        light = sim_utils.DomeLightCfg(intensity=2000.0)
        light.func("/World/light", light)
        cfg = sensors.CameraCfg(
            prim_path="/World/camera",
            update_period=0.0,
            data_types=["rgb"],
            width=scene.options["render_width"],
            height=scene.options["render_height"],
            spawn=sim_utils.PinholeCameraCfg(),
        )
        self._camera = sensors.Camera(cfg)

    def picture(self, request: Render) -> np.ndarray:
        """uint8 (height, width, 3)"""
        scene = self._scene
        unknown = sorted(set(request.camera) - {*_LOOK, *_CENTRE})
        if unknown:
            raise UsageError(
                f"the camera has no {', '.join(unknown)}; it has {', '.join((*_LOOK, *_CENTRE))}"
            )
        eye, centre = self._view(request)
        where: Dict[str, Any] = {"device": scene.device, "dtype": torch.float32}
        self._camera.set_world_poses_from_view(
            torch.tensor([eye], **where), torch.tensor([centre], **where)
        )
        scene.sim.forward()  # poses of now, also of what was just reset
        for _ in range(1 if self._warm else _WARM_UP):
            scene.sim.render()
        self._warm = True
        self._camera.update(scene.dt, force_recompute=True)
        frame = self._camera.data.output["rgb"][:1, ..., :3].permute(0, 3, 1, 2).float()
        size = (request.height, request.width)
        frame = torch.nn.functional.interpolate(frame, size=size, mode="area")
        return frame[0].permute(1, 2, 0).round().to(torch.uint8).cpu().numpy()

    def _view(self, request: Render) -> Tuple[Any, Any]:
        """Where the camera is and what it looks at, in the world (m)."""
        scene, asked = self._scene, request.camera
        origin = scene.origins[request.env_id].astype(np.float64)
        root = scene.robot.data.root_link_pose_w[request.env_id, :3].cpu().numpy() - origin
        centre = np.array([asked.get(name, float(root[i])) for i, name in enumerate(_CENTRE)])
        distance, azimuth, elevation = (asked.get(name, value) for name, value in _LOOK.items())
        a, e = math.radians(azimuth), math.radians(elevation)
        ahead = np.array([math.cos(e) * math.cos(a), math.cos(e) * math.sin(a), math.sin(e)])
        return (centre - distance * ahead + origin).tolist(), (centre + origin).tolist()
